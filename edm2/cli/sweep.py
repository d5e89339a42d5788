"""`python -m edm2 sweep`: the best width of the average, guidance weight and guidance interval of a run."""

import json
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from edm2.averages import RunAverages
from edm2.backends import full_precision
from edm2.checkpoint import OPTIONS
from edm2.cli.chosen import note_unused
from edm2.cli.figures import figure_class, save_figure
from edm2.cli.parameters import Float, FloatList, Interval, IntList
from edm2.cli.results import note_programs
from edm2.data import ImageDataset
from edm2.distributed import is_first, processes
from edm2.errors import UserError
from edm2.features import check_measurable
from edm2.latents import LatentEncoder
from edm2.measuring import open_metric, share_of
from edm2.metrics import SMALL, check_metrics, open_labelled
from edm2.networks import CACHE, network_file
from edm2.references import read_reference
from edm2.sweep import EVERYWHERE, Guide, Point, Result, Sweep, check_pixels, file_guide, grid, run_guide, self_guide
from edm2.vae import VAEEncoder, load_vae

STDS = "0.020,0.030,0.040,0.055,0.075,0.100,0.140,0.200"
POOR = 0.1  # error of a profile


@click.command(short_help="Find the best width of the average and guidance of a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--std", "stds", type=FloatList(), default=STDS, show_default=True, help="Widths of the average, sigma_rel.")
@click.option("--guidance", "guidances", type=FloatList(), default="1", show_default=True, help="Guidance weights; 1 = none.")
@click.option("--guidance-interval", "intervals", type=Interval(), multiple=True, default=[EVERYWHERE],
              help="Guide where LO < sigma <= HI; may be given several times.  [default: 0,inf]")  # fmt: skip
@click.option("--gnet", metavar="DIR|FILE|URL",
              help="Guide: another run, of which the average of the same sigma_rel is taken, or a network.  "
              "[default: the network itself if trained with --label-dropout]")  # fmt: skip
@click.option("--data", metavar="ZIP|DIR", type=click.Path(path_type=Path), help="Dataset to compare with.  [default: the run's]")
@click.option("--ref", metavar="FILE|URL", help="Reference statistics to compare with, in a dataset's place.")
@click.option("--metric", default=SMALL, show_default=True,
              help="frechet-small: Fréchet distance by features of a small classifier of the dataset; for small images.  "
              "Or fid, fd_dinov2, features of your own: package.module:function.")  # fmt: skip
@click.option("--vae", metavar="DIR|NAME", help="VAE that decodes latents: a folder, or a name on the hub.  [default: the snapshots']")
@click.option("--networks", metavar="DIR", default=CACHE, show_default=True,
              help="Where the weights of fid and fd_dinov2 are kept, and what is given by address.")  # fmt: skip
@click.option("--kimg", type=Float(above=0),
              help="Time in the run, in thousands of images as in its snapshots' names.  [default: the last]")  # fmt: skip
@click.option("--gnet-kimg", type=Float(above=0), help="The same, in the guide's.  [default: the last]")
@click.option("--seeds", type=IntList(), default="0-999", show_default=True, help="One image per seed; classes in turn.")
@click.option("--steps", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help="Sampling steps.")
@click.option("--batch", metavar="INT", type=click.IntRange(min=1), default=100, show_default=True, help="Images at a time.")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Where to.  [default: RUN/sweep]")
def sweep(
    run: Path, stds: list[float], guidances: list[float], intervals: tuple[tuple[float, float], ...], gnet: str | None, data: Path | None,
    ref: str | None, metric: str, vae: str | None, networks: str, kimg: float | None, gnet_kimg: float | None,
    seeds: list[int], steps: int, batch: int, out: Path | None,
) -> None:  # fmt: skip
    """Measure the training run in the folder RUN for all combinations of --std, --guidance and --guidance-interval.

    Each result is a line of OUT/sweep.jsonl, and what is there is not made again; OUT/sweep.png shows those
    of the same seeds, steps, metric and guide. On several GPUs: torchrun --standalone --nproc_per_node=8 -m -- edm2 sweep ...
    """
    full_precision()
    points = grid(stds, guidances, intervals)
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise UserError("--seeds: a metric needs two images at least, and no seed twice")
    check_metrics([metric])
    check_guide_time(gnet, gnet_kimg)
    if ref is not None and data is not None:
        raise UserError("--ref stands in a dataset's place: give it or --data")
    averages, out = RunAverages(run, kimg), out or run / "sweep"
    with processes() as procs:
        encoder = decoder(averages, metric, vae, procs.device)
        note_errors(averages, stds)
        reference = None if ref is None else read_reference(network_file(ref, networks))
        dataset = open_data(averages, data, metric) if reference is None else None
        guided = any(point.guidance != 1 for point in points)
        note_unused(gnet, guided, tuple(intervals) != (EVERYWHERE,))
        guide = choose_guide(averages, gnet, gnet_kimg, networks, procs.device) if guided else None
        distance = open_metric(metric, reference, dataset, out, procs, networks)
        note_programs(reference, [distance])
        measured = Sweep(averages, distance, out, guide, seeds, steps, batch, procs.device, encoder, procs)
        measure(measured, points)
        if procs.rank == 0:
            conclude(measured, points)


def conclude(measured: Sweep, points: list[Point]) -> None:
    """The best of these points, and a picture of all."""
    metric, out = measured.metric.name, measured.results.path.with_name("sweep.png")
    best = min(measured.known(points), key=lambda result: result.value)
    click.echo(f"lowest: {tell(best, metric)}")
    try:
        draw(measured.all_known(), metric, out)
        click.echo(f"wrote {out}")
    except UserError as e:
        click.echo(f"no picture: {e}; then give the command again", err=True)


def decoder(run: RunAverages, metric: str, vae: str | None, device: torch.device) -> VAEEncoder | None:
    """What makes pixels of a run's latents; None for a run of pixels. UserError where that is not wanted."""
    if not isinstance(run.encoder, LatentEncoder):
        if vae is not None:
            raise UserError(f"--vae: {run.folder} makes pixels")
        return None
    if metric == SMALL and vae is None:  # which is for small images
        check_pixels(run)
    return load_vae(run.encoder, vae, device)


def note_errors(run: RunAverages, stds: list[float]) -> None:
    """Of widths for which the run saved too seldom; the first process tells."""
    poor = [f"{std:g} ({error:.0%})" for std, error in zip(stds, run.errors(stds)) if error > POOR]
    if poor and is_first():
        click.echo(f"Note: the profiles of these averages are far from the wanted ones: {', '.join(poor)}; see `edm2 phema plan`.")


def open_data(run: RunAverages, data: Path | None, metric: str) -> ImageDataset:
    """The one given, else the run's own. UserError if there is none, or it cannot be compared with the run's images by this metric."""
    data = recorded_data(run.folder) if data is None else data
    dataset = open_labelled(data)
    if metric != SMALL:
        return dataset
    check_measurable(dataset, data)
    size = run.config["img_channels"], run.config["img_resolution"], run.config["img_resolution"]
    if dataset.image_shape != size or run.config["label_dim"] not in (0, dataset.label_dim):
        raise UserError(f"{run.folder} and {data} differ in image size or number of classes")
    return dataset


def recorded_data(folder: Path) -> Path:
    """What the run was trained on. UserError if that is not recorded, or no longer there."""
    try:
        data = Path(json.loads((folder / OPTIONS).read_text())["data"])
    except (KeyError, OSError, TypeError, ValueError) as e:
        raise UserError(f"{folder / OPTIONS} does not tell the run's dataset: give --data") from e
    if not data.exists():
        raise UserError(f"{data}, which {folder} was trained on, is not there: give --data")
    return data


def check_guide_time(gnet: str | None, kimg: float | None) -> None:
    """UserError for a time of what has none."""
    if kimg is not None and (gnet is None or not Path(gnet).is_dir()):
        raise UserError("--gnet-kimg is for a --gnet that is a run's folder")


def choose_guide(run: RunAverages, gnet: str | None, kimg: float | None, networks: str, device: torch.device) -> Guide:
    """UserError for one that is none, or does not fit."""
    check_guide_time(gnet, kimg)
    if gnet is None:
        return self_guide(run)
    if Path(gnet).is_dir():
        return run_guide(run, RunAverages(gnet, kimg), device)
    return file_guide(run, network_file(gnet, networks), device)


def measure(sweep: Sweep, points: list[Point]) -> None:
    """What is missing, with a line for each; the bar is of the first process's images."""
    there, rank = len(sweep.known(points)), sweep.procs.rank
    if there and rank == 0:
        click.echo(f"{there} of {len(points)} are in {sweep.results.path} already")
    own = sum(map(len, share_of(len(sweep.seeds), sweep.batch, sweep.procs)))
    with tqdm(total=(len(points) - there) * own, unit="img", disable=True if rank else None) as bar:
        for result in sweep.measure(points, bar.update):
            tqdm.write(tell(result, sweep.metric.name))


def tell(result: Result, metric: str) -> str:
    return f"sigma_rel {result.point.std:.3f}  {label(result.point, 'guidance', 'sigma in ({:g}, {:g}]')}  {metric} {result.value:.4f}"


def label(point: Point, weight: str = "w =", interval: str = "σ in ({:g}, {:g}]") -> str:
    """How it is guided."""
    text = f"{weight} {point.guidance:g}"
    return text if point.interval == EVERYWHERE else f"{text}, {interval.format(*point.interval)}"


def draw(results: list[Result], metric: str, out: Path) -> None:
    """The metric over σ_rel as PNG, a line for each way of guiding, its lowest point marked. UserError without matplotlib."""
    figure = figure_class()(figsize=(7, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    _draw_lines(axes, results)
    stds = sorted({result.point.std for result in results})
    axes.set(xscale="log", xlabel="width of the average σ_rel", ylabel=f"{metric} (lower is better)")
    axes.set_xticks(stds, [f"{std:.1%}" for std in stds], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, out)


def _draw_lines(axes: Any, results: list[Result]) -> None:
    lines: dict[tuple[float, tuple[float, float]], list[Result]] = {}
    for result in sorted(results):
        lines.setdefault((result.point.guidance, result.point.interval), []).append(result)
    for i, (_, line) in enumerate(sorted(lines.items())):
        best = min(line, key=lambda result: result.value)
        text = f"{label(best.point)}: {best.value:.3f} at {best.point.std:.1%}"
        (drawn,) = axes.plot(*zip(*((each.point.std, each.value) for each in line)), "o-", markersize=3, color=f"C{i % 10}", label=text)
        axes.plot(best.point.std, best.value, "*", markersize=12, color=drawn.get_color())
    values = [result.value for result in results]
    if min(values) > 0 and max(values) > 4 * min(values):
        axes.set_yscale("log")
