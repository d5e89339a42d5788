"""`python -m edm2 plot`: pictures of a training run."""

import math
from pathlib import Path
from typing import Any

import click

from edm2.cli.figures import figure_class, save_figure
from edm2.errors import UserError
from edm2.stats import read_stats


@click.command(short_help="Draw the loss of a run, errors and magnitudes.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", metavar="PNG", type=click.Path(path_type=Path), help="Where to.  [default: RUN/loss.png]")
def plot(run: Path, out: Path | None) -> None:
    """Draw what the training run in the folder RUN tells of itself: its loss and learning rate; the error by noise level, and
    what the network's u(sigma) takes it for; magnitudes of activations by block."""
    stats = read_stats(run)
    if not stats:
        raise UserError(f"{run}/stats.jsonl is empty: the run has not reached its first status line")
    out = out or run / "loss.png"
    draw(stats, out)
    click.echo(f"wrote {out}")


def draw(stats: list[dict[str, Any]], out: Path) -> None:
    """As PNG, what of it the lines hold. UserError without matplotlib."""
    told = [line for line in stats if "Loss/by_noise_level" in line and "Magnitudes/activations" in line]  # not by older runs
    figure = figure_class()(figsize=(7, 12 if told else 4), dpi=120, layout="constrained")
    axes = figure.subplots(3 if told else 1, squeeze=False)[:, 0]
    _draw_loss(axes[0], stats)
    if told:
        _draw_error(axes[1], told[-1]["Loss/by_noise_level"])
        _draw_magnitudes(axes[2], told)
    save_figure(figure, out)


def _draw_loss(axes: Any, stats: list[dict[str, Any]]) -> None:
    keys = "Progress/kimg", "Loss/loss", "Loss/learning_rate"
    kimg, loss, lr = ([line.get(key, math.nan) for line in stats] for key in keys)
    axes.plot(kimg, loss, color="tab:blue", label="of training images")
    held_out = [(line["Progress/kimg"], line["Loss/held_out"]) for line in stats if line.get("Loss/held_out") is not None]
    if held_out:
        axes.plot(*zip(*held_out), color="tab:orange", label="of held-out images")
        axes.legend(loc="upper center")
    axes.set(xlabel="training images (thousands)", ylabel="loss: λ·(D − y)²/exp(u) + u")
    axes.grid(alpha=0.3)
    right = axes.twinx()
    right.plot(kimg, lr, color="tab:grey", linewidth=1, linestyle="--")
    right.set(ylabel="learning rate (dashed)", ylim=(0, None))


def _draw_error(axes: Any, levels: dict[str, list[float | None]]) -> None:
    """Of the last line: where u(σ) has learnt the error, the curves meet."""
    rows = [row for row in zip(levels["sigma"], levels["error"], levels["u"]) if None not in row]
    sigma, error, u = zip(*rows) if rows else ((), (), ())
    axes.plot(sigma, error, "o", color="tab:blue", label="λ·(D − y)², mean of the last images")
    axes.plot(sigma, [math.exp(x) for x in u], color="tab:orange", label="exp u(σ), what the network takes it for")
    axes.set(xlabel="noise level σ", ylabel="weighted error", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_magnitudes(axes: Any, stats: list[dict[str, Any]]) -> None:
    """A line for each status line, the last the darkest."""
    blocks = list(stats[-1]["Magnitudes/activations"])
    for i, line in enumerate(stats):
        values = [line["Magnitudes/activations"].get(name) or math.nan for name in blocks]
        axes.plot(range(len(blocks)), values, color="tab:blue", alpha=1 if line is stats[-1] else 0.1 + 0.4 * i / len(stats))
    axes.set(xlabel="block, in the order of the forward pass", ylabel="RMS of its output; the last line dark", ylim=(0, None))
    axes.set_xticks(range(len(blocks)), blocks, rotation=90, fontsize=6)
    axes.grid(alpha=0.3)
