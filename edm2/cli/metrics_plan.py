"""`edm2 metrics gen --dry-run`: what would be measured, told without a download, without weights and without a GPU."""

from collections.abc import Iterator
from pathlib import Path

from edm2.averages import RunAverages
from edm2.cli.candidates import Choice, check_choice
from edm2.cli.chosen import choose_sources
from edm2.cli.planned import SamplingPlan, read_header, where
from edm2.files import user_path
from edm2.guidance import check_fits
from edm2.networks import file_at_hand
from edm2.reconstruction import check_widths
from edm2.references import read_reference
from edm2.sampler import Heun
from edm2.sweep import self_guide


def plan(choice: Choice, interval: tuple[float, float], steps: int, ref: str, num: int, seed: int, runs: int) -> Iterator[dict[str, str]]:
    """Of each network, then of all, what `tell` takes. UserError for what would be refused, as far as headers show."""
    folders, cache = check_choice(choice), user_path(choice.networks)
    networks = 0
    for net in choice.nets or [None]:
        networks += len(set(choice.stds)) if net in folders else 1
        yield _of_run(net, choice, cache) if net in folders else _of_file(net, choice, cache, interval, steps)
    if (path := file_at_hand(ref, cache)) is not None:
        read_reference(path)
    last = seed + runs * num - 1
    yield {
        "reference": where(ref, cache),
        "runs": f"{runs} of {num:,} images for each network: {networks * runs * num:,} in all, of the seeds {seed}-{last}",
    }


def _of_run(net: str, choice: Choice, cache: Path) -> dict[str, str]:
    run = RunAverages(net, choice.kimg)
    check_widths(choice.stds)
    facts = {"run": f"{net}, after {run.nimg:,} images", "averages": ", ".join(f"{std:.3f}" for std in dict.fromkeys(choice.stds))}
    if choice.guidance is None or choice.guidance == 1:
        return facts
    return facts | {"guide": _guide_of_run(run, choice, cache), "guidance": f"{choice.guidance:g}"}


def _guide_of_run(run: RunAverages, choice: Choice, cache: Path) -> str:
    if choice.gnet is None:
        self_guide(run)
        return "the network itself, without labels"
    if Path(choice.gnet).is_dir():
        guide = RunAverages(choice.gnet, choice.gnet_kimg)
        check_fits(run.config, guide.config, str(run.folder), choice.gnet)
        return f"{choice.gnet}, after {guide.nimg:,} images"
    if (path := file_at_hand(choice.gnet, cache)) is not None:
        check_fits(run.config, read_header(path).config, str(run.folder), str(path))
    return where(choice.gnet, cache)


def _of_file(net: str | None, choice: Choice, cache: Path, interval: tuple[float, float], steps: int) -> dict[str, str]:
    files = choose_sources(choice.preset, cache, net, choice.gnet, choice.guidance)
    heun = Heun(num_steps=steps, guidance=files.guidance, guidance_interval=interval)
    return SamplingPlan(files, cache, heun, choice.vae, latents=False).facts()
