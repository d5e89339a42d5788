"""`python -m edm2 metrics gen`: metrics of what networks make, without images on disk."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import click

from edm2.backends import full_precision
from edm2.cli.candidates import Candidate, Choice, candidates
from edm2.cli.chosen import guidance_interval_option, note_unused, preset_option
from edm2.cli.metrics_plan import plan
from edm2.cli.parameters import Float, FloatList, ImageCount, IntList, Names
from edm2.cli.planned import tell
from edm2.cli.results import Results, note_programs
from edm2.distributed import is_first, processes
from edm2.errors import UserError
from edm2.measuring import measure_network, metrics_of, open_measures
from edm2.networks import CACHE, network_file
from edm2.references import read_reference
from edm2.sweep import EVERYWHERE


@click.command()
@click.option("--net", "nets", metavar="FILE|URL|RUN", multiple=True,
              help="Network, or the folder of a training run; may be given several times.")  # fmt: skip
@click.option("--std", "stds", type=FloatList(), help="Widths of the averages, sigma_rel, of a --net that is a run.")
@click.option("--kimg", type=Float(above=0),
              help="Time in the run, in thousands of images as in its snapshots' names.  [default: the last]")  # fmt: skip
@click.option("--gnet", metavar="FILE|URL|RUN",
              help="Guide; of a run the average of the same sigma_rel.  "
              "[default: none, or NET itself if trained with --label-dropout]")  # fmt: skip
@click.option("--gnet-kimg", type=Float(above=0), help="The same as --kimg, in the guide's.  [default: the last]")
@preset_option
@click.option("--networks", metavar="DIR", default=CACHE, show_default=True,
              help="Where networks and references are kept that are given by preset or address, and the weights of fid and fd_dinov2.")
@click.option("--guidance", type=Float(), help="Guidance strength; 1 = off.  [default: 1, or the preset's]")
@guidance_interval_option
@click.option("--ref", metavar="FILE|URL", required=True, help="Reference statistics: of `ref`, or of the official release.")
@click.option("--metrics", "names", type=Names(), help="Which.  [default: those of REF, but for features of your own]")
@click.option("--num", type=ImageCount(), default=50000, show_default=True, help="Images of a run.")
@click.option("--seed", metavar="INT", type=click.IntRange(min=0), default=0, show_default=True, help="The first image's.")
@click.option("--runs", metavar="INT", type=click.IntRange(min=1), default=1, show_default=True,
              help="How many times, each with the seeds behind those of the last.")  # fmt: skip
@click.option("--steps", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help="Sampling steps.")
@click.option("--batch", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help="Images at a time.")
@click.option("--class", "class_idx", type=IntList(), help="Class, or classes to take in turn.  [default: random]")
@click.option("--vae", metavar="DIR|NAME", help="VAE that decodes latents: a folder, or a name on the hub.  [default: the snapshot's]")
@click.option("--fast", is_flag=True, help="Let an image's last bits depend on the batch it is in, where that is quicker.")
@click.option("--json", "out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="Also keep all results there; what it holds already is not measured again.")  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="Tell what would be measured, with which networks and at what cost, then exit.")
def gen(
    guidance_interval: tuple[float, float], ref: str, names: list[str] | None, num: int, seed: int, runs: int, steps: int, batch: int,
    class_idx: list[int] | None, out: Path | None, dry_run: bool, **choice: Any,
) -> None:  # fmt: skip
    """Generate images and measure them; none is saved.

    Run r takes the seeds from SEED + r x NUM on, and each seed draws its own class: the images are those of `sample.py`.
    A command that was interrupted goes on, with --json, where it was. On several GPUs:
    torchrun --standalone --nproc_per_node=8 -m -- edm2 metrics gen ...
    """
    full_precision()
    chosen = Choice(**choice)
    note_unused(chosen.gnet, guided=chosen.guidance is not None or chosen.preset is not None)
    if num < 2:
        raise UserError("--num: metrics need two images at least")
    if dry_run:
        for facts in list(plan(chosen, guidance_interval, steps, ref, num, seed, runs)):  # what is refused is told alone
            tell(facts if is_first() else {})
        return
    reference = read_reference(network_file(ref, chosen.networks))
    with processes() as procs:
        found = candidates(chosen, procs.device)
        measures = open_measures(reference, names or metrics_of(reference), procs, chosen.networks)
        note_programs(reference, measures)
        results = Results(out, reference, measures, procs)
        for candidate in found:
            generate = candidate.open()
            facts = describe(candidate, guidance_interval, chosen, generate) | {"class": class_idx, "steps": steps, "num": num}
            heun = {"num_steps": steps, "guidance": candidate.facts["guidance"], "guidance_interval": guidance_interval}
            for run in range(runs):
                seeds = range(seed + run * num, seed + (run + 1) * num)
                told = f"{seeds[0]}-{seeds[-1]}"
                measure = partial(measure_network, generate, procs=procs, seeds=seeds, batch=batch, class_idx=class_idx, **heun)
                results.measure(candidate.name, facts | {"seeds": told}, f"seeds {told}", measure)
            results.summarise(candidate.name)


def describe(candidate: Candidate, interval: tuple[float, float], choice: Choice, generate: Any) -> dict[str, Any]:
    """What the images depend on, for JSON; an interval only where there is guidance."""
    limits = [str(x) if x == math.inf else x for x in interval] if candidate.facts["guidance"] != 1 and interval != EVERYWHERE else None
    return {**candidate.facts, "guidance_interval": limits, "vae_sha256": getattr(generate.encoder, "sha256", None), "fast": choice.fast}
