"""`edm2 metrics gen --dry-run`: what would be measured, told without a download, without weights and without a GPU."""

from collections.abc import Iterator
from pathlib import Path

from edm2.averages import RunAverages
from edm2.cli.candidates import Choice, check_choice
from edm2.cli.chosen import choose_sources
from edm2.cli.planned import SamplingPlan, where
from edm2.files import user_path
from edm2.reconstruction import check_widths
from edm2.sampler import Heun


def plan(choice: Choice, interval: tuple[float, float], steps: int, ref: str, num: int, seed: int, runs: int) -> Iterator[dict[str, str]]:
    """Of each network, then of all, what `tell` takes. UserError for what would be refused, as far as headers show."""
    folders, cache = check_choice(choice), user_path(choice.networks)
    networks = 0
    for net in choice.nets or [None]:
        networks += len(choice.stds) if net in folders else 1
        yield _of_run(net, choice) if net in folders else _of_file(net, choice, cache, interval, steps)
    last = seed + runs * num - 1
    yield {
        "reference": where(ref, cache),
        "runs": f"{runs} of {num:,} images for each network: {networks * runs * num:,} in all, of the seeds {seed}-{last}",
    }


def _of_run(net: str, choice: Choice) -> dict[str, str]:
    run = RunAverages(net, choice.kimg)
    check_widths(choice.stds)
    facts = {"run": f"{net}, after {run.nimg:,} images", "averages": ", ".join(f"{std:.3f}" for std in dict.fromkeys(choice.stds))}
    guided = choice.guidance is not None and choice.guidance != 1
    return facts | ({"guide": choice.gnet or "the network itself, without labels", "guidance": f"{choice.guidance:g}"} if guided else {})


def _of_file(net: str | None, choice: Choice, cache: Path, interval: tuple[float, float], steps: int) -> dict[str, str]:
    files = choose_sources(choice.preset, cache, net, choice.gnet, choice.guidance)
    heun = Heun(num_steps=steps, guidance=files.guidance, guidance_interval=interval)
    return SamplingPlan(files, cache, heun, choice.vae, latents=False).facts()
