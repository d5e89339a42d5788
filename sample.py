"""Generate images with an EDM2 network. On several GPUs: `torchrun --standalone --nproc_per_node=8 sample.py …`."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from edm2.backends import full_precision
from edm2.cli.chosen import (
    choose_encoder,
    choose_files,
    choose_sources,
    guidance_interval_option,
    load_networks,
    note_unused,
    preset_option,
)
from edm2.cli.commands import Command
from edm2.cli.parameters import Float, ImageCount, IntList
from edm2.cli.planned import SamplingPlan, tell
from edm2.distributed import is_first, processes
from edm2.errors import UserError
from edm2.files import sha256, user_path
from edm2.generate import ImageGenerator
from edm2.guidance import Unlabelled
from edm2.latents import Encoder
from edm2.networks import CACHE
from edm2.pictures import tile, write_png
from edm2.published import Published
from edm2.sampler import Heun
from edm2.samples import SampleFolder, list_samples, make_samples


@click.command(cls=Command)
@click.option("--net", metavar="FILE|URL", help="Network: a snapshot of this project, or a pickle of the official release.")
@click.option("--gnet", metavar="FILE|URL", help="Guide network.  [default: none, or NET itself if trained with --label-dropout]")
@preset_option
@click.option("--networks", metavar="DIR", default=CACHE, show_default=True,
              help="Where networks are kept that are given by preset or address.")
@click.option("--guidance", type=Float(), help="Guidance weight w of w·NET + (1−w)·GNET; 1 = off.  [default: 1, or the preset's]")
@guidance_interval_option
@click.option("--outdir", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where to save the images.")
@click.option("--subdirs", is_flag=True, help="Make a sub-folder for every 1000 seeds.")
@click.option("--seeds", type=IntList(), default="16-19", show_default=True, help="One image per seed, e.g. 1,2,5-10.")
@click.option("--class", "class_idx", type=IntList(), help="Class, or classes to take in turn.  [default: random]")
@click.option("--batch", type=ImageCount(), default=32, show_default=True, help="Images at a time; no image depends on it, see --fast.")
@click.option("--steps", "num_steps", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True,
              help="Sampling steps, each of two evaluations; the last of one.")  # fmt: skip
@click.option("--sigma_min", type=Float(above=0), default=0.002, show_default=True, help="Lowest noise level, of the last step.")
@click.option("--sigma_max", type=Float(above=0), default=80, show_default=True, help="Highest noise level, of the first step.")
@click.option("--rho", type=Float(above=0), default=7, show_default=True, help="How noise levels are spaced: higher for more low ones.")
@click.option("--S_churn", "S_churn", type=Float(0), default=0, show_default=True,
              help="Stochasticity: how much noise is added again in a step.")  # fmt: skip
@click.option("--S_min", "S_min", type=Float(0), default=0, show_default=True, help="Lowest noise level at which it is.")
@click.option("--S_max", "S_max", type=Float(0, infinite=True), default=math.inf, show_default=True,
              help="Highest noise level at which it is.")  # fmt: skip
@click.option("--S_noise", "S_noise", type=Float(), default=1, show_default=True, help="Factor of that noise.")
@click.option("--fast", is_flag=True, help="Let an image's last bits depend on the batch it is in, where that is quicker.")
@click.option("--vae", metavar="DIR|NAME", help="VAE that decodes latents: a folder, or a name on the hub.  [default: the snapshot's]")
@click.option("--latents", is_flag=True, help="Write VAE latents as .npy files instead of decoding them.")
@click.option("--overwrite", is_flag=True, help="Make anew what is there already.")
@click.option("--grid", metavar="PNG", type=click.Path(path_type=Path), help="Also write all images as one grid.")
@click.option("--columns", metavar="INT", type=click.IntRange(min=1), default=10, show_default=True, help="Width of the grid in images.")
@click.option("--scale", metavar="INT", type=click.IntRange(min=1), default=1, show_default=True, help="Enlarge the pixels of the grid.")
@click.option("-n", "--dry-run", is_flag=True, help="Tell what would be made, with which networks and at what cost, then exit.")
def main(
    net: str | None, gnet: str | None, preset: str | None, networks: str, guidance: float | None,
    outdir: Path, subdirs: bool, seeds: list[int], class_idx: list[int] | None, batch: int, fast: bool, vae: str | None,
    latents: bool, overwrite: bool, grid: Path | None, columns: int, scale: int, dry_run: bool, **options: Any,
) -> None:  # fmt: skip
    """Generate images: `{seed:06d}.png` in OUTDIR. Those that are there already, made with the same networks and options, stay."""
    full_precision()
    check_options(batch, options)
    chosen = preset, user_path(networks), net, gnet, guidance
    note_unused(gnet, guided=guidance is not None or preset is not None)
    samples = list_samples(seeds, class_idx)
    if dry_run:
        files = choose_sources(*chosen)
        plan = SamplingPlan(files, user_path(networks), Heun(guidance=files.guidance, **options), vae, latents)
        plan.check_classes(class_idx)
        facts = plan.lines([sample.seed for sample in samples], outdir, subdirs)
        tell(facts if is_first() else {})
        return
    files = choose_files(*chosen)
    heun = Heun(guidance=files.guidance, **options)
    with processes() as procs:
        snapshot, guide = load_networks(files, procs.device)
        encoder = choose_encoder(snapshot, files.net, vae, latents, fast, procs.device)
        if grid and not encoder.makes_pixels:
            raise UserError("--grid needs pixels: leave --latents out")
        folder = SampleFolder(outdir, subdirs, encoder, recipe(files, guide, heun, encoder, fast, procs.device))
        if grid and grid.resolve() in {folder.file(sample.seed).resolve() for sample in samples}:
            raise UserError(f"--grid {grid} has the name of a sample")
        generate = ImageGenerator(snapshot.net, guide, encoder, fast)
        generate.check_classes(class_idx)
        make_samples(generate, folder, samples, heun, batch, overwrite, procs)
        if grid and procs.rank == 0:
            images = folder.images([sample.seed for sample in samples])
            write_png(grid, tile(images, min(columns, len(images)), scale))


def check_options(batch: int, options: dict[str, Any]) -> None:
    """UserError for options that contradict each other."""
    if batch < 1:
        raise UserError("--batch must be at least 1")
    if options["sigma_min"] >= options["sigma_max"]:
        raise UserError(f"--sigma_min {options['sigma_min']} must be below --sigma_max {options['sigma_max']}")


def recipe(files: Published, guide: nn.Module | None, heun: Heun, encoder: Encoder, fast: bool, device: torch.device) -> dict[str, Any]:
    """What pixels depend on: the bytes of the networks, options, the device that draws the noise; but for what has no effect."""
    ineffective = ["guidance_interval"] if heun.guidance == 1 else []
    ineffective += [] if heun.S_churn else ["S_min", "S_max", "S_noise"]
    options = {key: str(value) if value == math.inf else value for key, value in asdict(heun).items() if key not in ineffective}
    guided_by = None if guide is None else "itself without labels" if isinstance(guide, Unlabelled) else sha256(files.gnet)
    networks = {"net": sha256(files.net), "gnet": guided_by, "vae": getattr(encoder, "sha256", None)}
    return {**networks, **options, "encoder": encoder.config(), "fast": fast, "device": device.type}


if __name__ == "__main__":
    main()
