"""`python -m bench`: measure, or count where there is no GPU."""

import json
from collections.abc import Iterable
from pathlib import Path

import click
import torch

from bench import cases, counted, problems, tune
from bench.case import Case
from bench.gpu import run as run_gpu
from bench.ledger import CANDIDATES, count, table
from bench.machine import slug
from bench.report import differences, update
from bench.runner import CEILINGS, run_cases
from edm2.cli.commands import Group
from edm2.cli.parameters import Float, ImageCount
from edm2.errors import UserError
from edm2.presets import get_preset
from kernels import coverage

RESULTS = Path(__file__).parent / "results"


@click.group(cls=Group)
def main() -> None:
    """How fast is this, against what, and how far from the hardware's limit?"""


GROUPS = {
    "kernels": "Kernels of EDM2-S: this project's, and the libraries' convolutions, products and attention.",
    "block": "One encoder and one decoder block at each level of EDM2-S, forward and backward.",
    "train": "Training steps: images per second, MFU, phases, peak memory.",
    "sample": "Evaluations of the network: milliseconds and images per second.",
    "data": "Reading training data: latents per second.",
    "difference": "Ends of trajectories in fp16: how far from those in fp32.",
    "equivalence": "A thousand steps of training, compiled in fp16: how far the loss is from the plain network's in fp32.",
    "optimizer": "The optimizer's step alone.",
}


def measuring(name: str, help: str):
    """A sub-command that measures, with the options that all of these share."""

    def register(function):
        for option in (
            click.option("--dry-run", is_flag=True, help="Rehearse on small cases that run anywhere; writes to out/rehearsal."),
            click.option("--only", metavar="TEXT", default="", help="Only cases whose name contains this."),
            click.option("--budget", type=Float(above=0), default=540, show_default=True, help="Start no case after so many seconds."),
        ):
            function = option(function)
        return main.command(name, help=help)(function)

    return register


def measure(selected: Iterable[Case], budget: float, only: str, dry_run: bool) -> None:
    """Run the cases, or their rehearsal, in the order given."""
    ceilings = list(cases.ceiling_cases())
    selected = list(selected)
    if dry_run:
        groups = {case.group for case in selected}
        selected, ceilings = [case for case in cases.rehearsal_cases() if case.group in groups], []
    names = {case.name for case in ceilings}
    chosen = [case for case in selected if only in case.name and case.name not in names]
    run_cases([*ceilings, *chosen], out_folder(dry_run), budget, runs_of(dry_run))


def out_folder(dry_run: bool) -> Path:
    return Path("out/rehearsal") if dry_run else RESULTS / slug()


def runs_of(dry_run: bool) -> int:
    return 3 if dry_run else 20


for group, text in GROUPS.items():

    @measuring(group, text)
    def run_group(budget: float, only: str, dry_run: bool, group: str = group) -> None:
        measure(cases.group_cases(group), budget, only, dry_run)


@measuring("gpu", "All that a GPU should tell in a few minutes, the most important first: tests, baselines, this project.")
def gpu(budget: float, only: str, dry_run: bool) -> None:
    source = cases.rehearsal_cases if dry_run else cases.gpu_cases
    chosen = [case for case in source() if only in case.name or (not dry_run and case.name in CEILINGS)]
    run_gpu(source, chosen, out_folder(dry_run), budget, runs_of(dry_run))


@measuring("tune", "Candidate tiles for the convolutions of a training step, the most arithmetic first: prints the rows to add.")
@click.option("--preset", default="edm2-img512-s", show_default=True, help="Network whose convolutions are tuned.")
@click.option("--batch", type=ImageCount(), default=256, show_default=True, help="Images in a step.")
def run_tune(preset: str, batch: int, budget: float, only: str, dry_run: bool) -> None:
    get_preset(preset)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not dry_run:
        raise UserError("tune measures on a GPU, and there is none here; --dry-run rehearses it anywhere")
    major, minor = torch.cuda.get_device_capability() if has_gpu else (9, 0)
    capability = 10 * major + minor
    found = problems.small_problems(capability) if dry_run else problems.problems(preset, batch, capability)
    chosen = [problem for problem in found if only in problem.name]
    if not chosen:
        raise UserError(f"no convolution's name contains '{only}'; names are like {found[0].name}")
    if dry_run:
        click.echo("A rehearsal: its times say nothing, and its rows are for no table.")
    tune.run(chosen, out_folder(dry_run) / "tune", budget, capability, runs_of(dry_run))


@main.command()
@click.option("--check", is_flag=True, help="Write nothing; fail with a diff where README or docs differ from the results.")
def report(check: bool) -> None:
    """Write the tables of the READMEs, and tables and plots in docs/bench, from bench/results."""
    root = RESULTS.parent.parent
    if not check:
        update(root)
    elif changes := differences(root):
        click.echo(changes)
        raise UserError("README or docs differ from bench/results: python -m bench report")


@main.command()
def count_ledger() -> None:
    """Count the ledger of EDM2-S that the documents show, into bench/results/ledger.json."""
    counted.save(RESULTS.parent.parent)


@main.command()
@click.option("--preset", default="edm2-img512-s", show_default=True, help="Network to count.")
@click.option("--batch", type=ImageCount(), default=256, show_default=True, help="Images in a step.")
@click.option("--phase", type=click.Choice(["eval", "train"]), multiple=True, help="Evaluation, training step.  [default: both]")
@click.option("--candidate", type=click.Choice(list(CANDIDATES)), multiple=True, help="What to count.  [default: all]")
@click.option("--tflops", type=Float(above=0), default=790, show_default=True, help="Arithmetic ceiling, TFLOP/s.")
@click.option("--tbps", type=Float(above=0), default=4.3, show_default=True, help="Memory ceiling, TB/s.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def ledger(preset: str, batch: int, phase: tuple[str, ...], candidate: tuple[str, ...], tflops: float, tbps: float, as_json: bool) -> None:
    """Count launches, FLOPs, bytes and saved bytes of a step, without a GPU.

    The default ceilings are those measured on an NVIDIA H200: the largest cuBLAS product and a copy.
    """
    get_preset(preset)
    wanted = [(c, p) for c in candidate or CANDIDATES for p in phase or ("eval", "train")]
    ledgers = [count(c, preset, batch, p) for c, p in wanted]
    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in ledgers], indent=1))
    else:
        click.echo("\n\n".join(table(entry, tflops, tbps) for entry in ledgers))
        click.echo("\nops: " + ", ".join(f"{op} {backend}" for op, backend in sorted(coverage().items())))


if __name__ == "__main__":
    main(prog_name="python -m bench")
