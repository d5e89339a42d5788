"""`python -m bench`: measure, or count where there is no GPU."""

import json

import click

from bench.ledger import CANDIDATES, count, table
from edm2.cli.common import Group, ImageCount
from edm2.presets import get_preset


@click.group(cls=Group)
def main() -> None:
    """How fast is this, against what, and how far from the hardware's limit?"""


@main.command()
@click.option("--preset", default="edm2-img512-s", show_default=True, help="Network to count.")
@click.option("--batch", type=ImageCount(), default=256, show_default=True, help="Images in a step.")
@click.option("--phase", type=click.Choice(["eval", "train"]), multiple=True, help="Evaluation, training step.  [default: both]")
@click.option("--candidate", type=click.Choice(list(CANDIDATES)), multiple=True, help="What to count.  [default: all]")
@click.option("--tflops", type=click.FloatRange(0, min_open=True), default=790, show_default=True, help="Arithmetic ceiling, TFLOP/s.")
@click.option("--tbps", type=click.FloatRange(0, min_open=True), default=4.3, show_default=True, help="Memory ceiling, TB/s.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def ledger(
    preset: str, batch: int, phase: tuple[str, ...], candidate: tuple[str, ...], tflops: float, tbps: float, as_json: bool
) -> None:
    """Count launches, FLOPs, bytes and saved bytes of a step, without a GPU.

    The default ceilings are those measured on an NVIDIA H200: the largest cuBLAS product and a copy.
    """
    get_preset(preset)
    cases = [(c, p) for c in candidate or CANDIDATES for p in phase or ("eval", "train")]
    ledgers = [count(c, preset, batch, p) for c, p in cases]
    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in ledgers], indent=1))
    else:
        click.echo("\n\n".join(table(entry, tflops, tbps) for entry in ledgers))


if __name__ == "__main__":
    main(prog_name="python -m bench")
