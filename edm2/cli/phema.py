"""`python -m edm2 phema`: averages of any width from a run's snapshots, how often to save them, and pictures of both."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from click.core import ParameterSource

from edm2.cli.commands import Group
from edm2.cli.figures import figure_class, save_figure
from edm2.cli.parameters import Float, FloatList, ImageCount
from edm2.download import is_url
from edm2.errors import UserError
from edm2.files import user_path
from edm2.names import snapshot_name
from edm2.networks import CACHE, network_file
from edm2.phema import fit, profile
from edm2.reconstruction import Plan, check_widths, make_plan, missing, reconstruct_files, snapshot_files

PLACE = "DIR|FILE|URL"
POOR = 0.1  # error of fit
TIMES_AT_MOST = 512  # that `plan` looks at


class Override(click.ParamType):
    """`dec.*attn*=0.05`: tensors whose names match, and their σ_rel."""

    name = "PATTERN=STD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        pattern, _, std = str(value).rpartition("=")
        try:
            return pattern, float(std) if pattern else float("x")
        except ValueError:
            self.fail(f"'{value}' is not of the form PATTERN=STD; write 'dec.*attn*=0.05'", param, ctx)


def input_options(command: Callable) -> Callable:
    """Which snapshots."""
    for option in (
        click.option("--outkimg", type=Float(above=0), help="Time of the averages, thousands of images.  [default: the last]"),
        click.option("--instd", type=FloatList(), help="Only snapshots of these widths."),
        click.option("--inprefix", metavar="STR", default="network-snapshot", show_default=True, help="How files of a folder begin."),
        click.option("--indir", metavar=PLACE, multiple=True, help="Snapshots, or official pickles; may be repeated."),
    ):
        command = option(command)
    return command


@click.group(cls=Group, invoke_without_command=True, short_help="Make averages of the weights of any width, after training.")
@input_options
@click.option("--outdir", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the averages.  [default: the first input's]")
@click.option("--outprefix", metavar="STR", default="phema", show_default=True, help="How the names of the averages begin.")
@click.option("--outstd", type=FloatList(), help="Widths to make: 0.05,0.10 or 0.010,0.015,...,0.250.")
@click.option("--tensor", "overrides", type=Override(), multiple=True, help="Another width for tensors whose names match; may be repeated.")
@click.option("--dtype", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True, help="Of the stored parameters.")
@click.option("--skip", is_flag=True, help="Leave out averages whose files are there, whatever they hold.")
@click.option("-n", "--dry-run", is_flag=True, help="Tell what would be made, and how well, then exit.")
@click.pass_context
def phema(
    ctx: click.Context, indir: tuple[str, ...], inprefix: str, instd: list[float] | None, outkimg: float | None, outdir: Path | None,
    outprefix: str, outstd: list[float] | None, overrides: tuple[tuple[str, float], ...], dtype: str, skip: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Make averages of a run's weights, of the widths --outstd, from its snapshots, all in one pass over them.

    A width is σ_rel, the standard deviation of the average's profile as a share of the training time. Of each width the command
    first tells how far the profile that the snapshots can combine to is from the wanted one (relative L2 distance), and how
    much errors of the snapshots, such as their rounding to fp16, grow in it. Files that are there under the names of the new ones are
    replaced, unless --skip keeps them.
    """
    if ctx.invoked_subcommand is not None:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise UserError(f"options of `phema {ctx.invoked_subcommand}` come behind its name")
        return
    if outstd is None:
        raise UserError("give the widths to make with --outstd, e.g. 0.05,0.10 or 0.010,0.015,...,0.250")
    check_widths([*outstd, *(std for _, std in overrides)])
    if outdir is None and any(map(is_url, indir)):
        raise UserError("give the folder for the averages of an address with --outdir")
    paths = _inputs(indir, inprefix)
    plan = make_plan(paths, outstd, outkimg, instd, overrides)
    folder = user_path(outdir or paths[0].parent)
    outs = [folder / snapshot_name(plan.nimg, std, outprefix) for std in plan.stds]
    if len(set(outs)) < len(outs):
        raise UserError("two of --outstd have the same three decimals, and would be files of one name")
    if taken := {path.resolve() for path in outs} & {source.path.resolve() for source in plan.sources}:
        raise UserError(f"{min(taken)} is an input; choose another --outprefix")
    click.echo(_table(plan))
    if skip:
        left = [(std, out) for std, out in zip(plan.stds, outs) if not out.exists()]
        click.echo(f"{len(outs) - len(left)} of {len(outs)} are there already")
        plan, outs = Plan(plan.sources, plan.nimg, [std for std, _ in left], plan.overrides), [out for _, out in left]
    if dry_run or not outs:
        return
    reconstruct_files(plan, outs, torch.float16 if dtype == "fp16" else torch.float32)
    for out in outs:
        click.echo(f"wrote {out}")


def _inputs(places: Sequence[str], prefix: str) -> list[Path]:
    if not places:
        raise UserError("give the folder of a run's snapshots with --indir")
    paths: list[Path] = []
    for place in places:
        path = network_file(place, CACHE)
        if not is_url(place) and not path.exists():
            raise UserError(f"{path} does not exist")
        paths += [path] if path.is_file() else snapshot_files(path, prefix)
    return paths


def _table(plan: Plan) -> str:
    """What is told of a plan before it is carried out."""
    times = {source.nimg for source in plan.sources}
    count = f"{len(plan.sources)} snapshot{'s' * (len(plan.sources) > 1)}"
    when = f"{len(times)} times, the last" if len(times) > 1 else "one time,"
    lines = [f"{count} at {when} after {plan.nimg:,} images"]
    lines += ["  width   error of fit   growth of rounding"]
    widths = list(plan.stds) + [std for _, std in plan.overrides]
    names = [""] * len(plan.stds) + [f"   of {pattern}" for pattern, _ in plan.overrides]
    found = plan.fit(widths)
    notes = [f"Note: there is no {name}." for name in missing(plan)[:5]]
    if (found.error > POOR).any():
        notes += [f"Note: averages whose error of fit is above {POOR:.0%} are not what they are named; see `phema plan`."]
    rows = zip(widths, found.error, found.amplification, names)
    lines += [f"  {std:.3f}   {error:11.3%}   {growth:14.2f}x{name}" for std, error, growth, name in rows]
    return "\n".join(lines + notes)


@phema.command(short_help="Tell how often a run must save snapshots.")
@click.option("--duration", type=ImageCount(), required=True, help="Images of the whole run: 2Gi.")
@click.option("--outstd", type=FloatList(), default="0.03,0.05,0.10,0.15,0.20,0.25", show_default=True, help="Widths to be made from it.")
@click.option("--instd", type=FloatList(), default="0.05,0.10", show_default=True, help="Widths that the run tracks.")
@click.option("--accuracy", type=Float(above=0), default=0.01, show_default=True, help="Error of fit that will do.")
def plan(duration: int, outstd: list[float], instd: list[float], accuracy: float) -> None:
    """Tell how often a run must save snapshots, so that averages of these widths can be made at its end."""
    check_widths([*outstd, *instd])
    if duration < 1:
        raise UserError("--duration must be one image at least")
    instd = list(dict.fromkeys(instd))
    click.echo("snapshots every   times   worst error of fit   growth of rounding")
    times = 1
    while times <= duration:
        found = fit(*_regular(times, instd), 1.0, outstd)
        worst = int(found.error.argmax())
        end = f"{found.error[worst]:14.3%} ({outstd[worst]:g})   {found.amplification.max():14.2f}x"
        click.echo(f"{_count(duration // times):>15}   {times:5}   {end}")
        if found.error[worst] <= accuracy:
            click.echo(f"{times * len(instd)} snapshots: every {duration // times:,} images of {duration:,}, widths {instd}")
            return
        if times >= TIMES_AT_MOST:
            break
        times *= 2
    raise UserError(f"that is not enough for errors of {accuracy:g}: track wider or narrower averages, or allow for more")


def _count(nimg: int) -> str:
    """Images, as train.py takes their number."""
    for unit, size in (("Mi", 2**20), ("Ki", 2**10)):
        if nimg >= size and nimg % size == 0:
            return f"{nimg // size}{unit}"
    return str(nimg)


def _regular(times: int, stds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """So many, up to 1, each of these widths."""
    return np.repeat(np.arange(1, times + 1) / times, len(stds)), np.tile(stds, times)


@phema.command("plot", short_help="Draw the stored, combined and wanted profiles.")
@input_options
@click.option("--times", type=click.IntRange(1, TIMES_AT_MOST), help="Instead of --indir: so many regular times of widths --instd.")
@click.option("--outstd", type=FloatList(), default="0.15", show_default=True, help="Widths to be made.")
@click.option("--out", metavar="PNG", type=click.Path(path_type=Path), default="phema.png", show_default=True, help="Where to.")
def plot_fit(
    indir: tuple[str, ...],
    inprefix: str,
    instd: list[float] | None,
    outkimg: float | None,
    times: int | None,
    outstd: list[float],
    out: Path,
) -> None:
    """Draw the profiles of the stored averages, of the wanted ones, and of what is combined of them (Fig. 4 of the paper)."""
    if (times is None) == (not indir):
        raise UserError("give either the folder of a run's snapshots with --indir, or a number of --times")
    if times is not None:
        if outkimg is not None:
            raise UserError("--outkimg chooses a time of --indir, and --times ends at 1")
        check_widths([*outstd, *(instd or [])])
        stored, end = _regular(times, list(dict.fromkeys(instd or [0.05, 0.10]))), 1.0
    else:
        plan = make_plan(_inputs(indir, inprefix), outstd, outkimg, instd)
        stored, end = zip(*((source.nimg, source.std) for source in plan.sources)), float(plan.nimg)
    draw(*map(np.asarray, stored), end, outstd, out)
    click.echo(f"wrote {out}")


def draw(in_ofs: np.ndarray, in_std: np.ndarray, end: float, stds: Sequence[float], out: Path) -> None:
    """As PNG: a panel for the stored profiles, one for each wanted one. UserError without matplotlib."""
    figure = figure_class()(figsize=(7, 1.5 + 1.7 * len(stds)), dpi=120, layout="constrained")
    axes = figure.subplots(1 + len(stds), sharex=True)
    found, t = fit(in_ofs, in_std, end, stds), np.linspace(0, end, 1200)[1:]
    kinds = sorted(set(in_std.tolist()))
    for ofs, std in zip(in_ofs, in_std):
        curve = profile(t, ofs, std)[:, 0]
        axes[0].plot(t / end, curve * end, color=f"C{kinds.index(std)}", linewidth=0.8)
    axes[0].set(ylabel="stored", ylim=(0, None))
    for panel, std, column, error in zip(axes[1:], stds, found.coefficients.T, found.error):
        panel.plot(t / end, profile(t, in_ofs, in_std) @ column * end, color="tab:blue", label=f"combined, {error:.2%} off")
        panel.plot(t / end, profile(t, end, std)[:, 0] * end, color="black", linestyle="--", linewidth=1, label=f"wanted, σ_rel {std:g}")
        panel.set(ylabel="weight")
        panel.grid(alpha=0.3)
        panel.legend(loc="upper left")
    axes[-1].set(xlabel="training time, as a share of the whole", xlim=(0, 1))
    save_figure(figure, out)
