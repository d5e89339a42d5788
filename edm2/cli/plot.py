"""`python -m edm2 plot`: pictures of a training run."""

import math
from pathlib import Path

import click

from edm2.errors import UserError
from edm2.stats import read_stats


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", metavar="PNG", type=click.Path(path_type=Path), help="Where to.  [default: RUN/loss.png]")
def plot(run: Path, out: Path | None) -> None:
    """Draw the loss and the learning rate of the training run in the folder RUN."""
    stats = read_stats(run)
    if not stats:
        raise UserError(f"{run}/stats.jsonl is empty: the run has not reached its first status line")
    out = out or run / "loss.png"
    draw_loss(stats, out)
    click.echo(f"wrote {out}")


def draw_loss(stats: list[dict[str, float]], out: Path) -> None:
    """Loss and learning rate over thousands of images, as PNG. UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("plots need matplotlib: pip install 'edm2-triton[plot]'") from e
    keys = "Progress/kimg", "Loss/loss", "Loss/learning_rate"
    kimg, loss, lr = ([line.get(key, math.nan) for line in stats] for key in keys)
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(kimg, loss, color="tab:blue")
    axes.set(xlabel="training images (thousands)", ylabel="loss, mean per element: λ·(D − y)²/exp(u) + u")
    axes.grid(alpha=0.3)
    right = axes.twinx()
    right.plot(kimg, lr, color="tab:grey", linewidth=1, linestyle="--")
    right.set(ylabel="learning rate (dashed)", ylim=(0, None))
    try:
        figure.savefig(out)
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror or e}") from e
