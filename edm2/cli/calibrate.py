"""`python -m edm2 calibrate`: noise levels for one's own data, from a run on them."""

from pathlib import Path

import click
import numpy as np

from edm2.calibration import Calibration, calibrate
from edm2.cli.figures import figure_class, save_figure
from edm2.cli.parameters import Float
from edm2.errors import UserError
from edm2.stats import read_stats


@click.command("calibrate", short_help="Suggest noise levels for training on your data.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--share", type=Float(above=0, max=1), default=0.25, show_default=True, help="How much of the run counts, from its end on.")
@click.option("--out", metavar="PNG", type=click.Path(path_type=Path), help="Where to.  [default: RUN/noise_levels.png]")
def calibrate_run(run: Path, share: float, out: Path | None) -> None:
    """Suggest the noise levels to train with on this run's data, from its error by noise level and u(sigma): --P_mean and
    --P_std of train.py, centred where the network finds structure. A short run with a large --P_std (2, say) will do."""
    stats, out = read_stats(run), out or run / "noise_levels.png"
    try:
        found = calibrate(stats, share)
    except UserError as e:
        raise UserError(f"{run}: {e}") from e
    draw(found, out)
    for words in found.warnings:
        click.echo(f"Note: {words}.")
    click.echo(f"suggested: --P_mean={found.p_mean:.2f} --P_std={found.p_std:.2f}")
    click.echo(f"wrote {out}")


def draw(found: Calibration, out: Path) -> None:
    """As PNG: errors, u(σ), how many images the run spent where, and the suggestion. UserError without matplotlib."""
    figure = figure_class()(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(found.sigma, found.error, "o", color="tab:blue", label="λ·(D − y)²")
    axes.plot(found.sigma, found.learnt, color="tab:orange", label="exp u(σ)")
    axes.plot(found.sigma, found.unstructured, color="black", linewidth=1, linestyle=":", label="of data without structure")
    axes.set(xlabel="noise level σ", ylabel="weighted error", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    x = np.linspace(np.log(found.sigma[0]), np.log(found.sigma[-1]), 300)
    density = np.exp(-0.5 * ((x - found.p_mean) / found.p_std) ** 2)
    right = axes.twinx()
    right.fill_between(np.exp(x), density, color="tab:green", alpha=0.15, label=f"suggested: ln σ = {found.p_mean:.2f} ± {found.p_std:.2f}")
    right.plot(found.sigma, found.images / found.images.max(), color="tab:grey", linestyle="--", linewidth=1, label="this run's images")
    right.set(ylabel="density of noise levels", ylim=(0, 3), yticks=[])
    handles, labels = (a + b for a, b in zip(axes.get_legend_handles_labels(), right.get_legend_handles_labels()))
    axes.legend(handles, labels, fontsize=8)
    save_figure(figure, out)
