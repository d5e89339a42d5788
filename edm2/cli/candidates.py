"""What `metrics gen` measures: networks by file, address or preset, and averages of a run's folder, each with its guide."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edm2.averages import RunAverages
from edm2.cli.chosen import choose_encoder, choose_files, load_networks
from edm2.cli.sweep import check_guide_time, choose_guide, note_errors
from edm2.errors import UserError
from edm2.files import sha256, user_path
from edm2.generate import ImageGenerator
from edm2.reconstruction import check_widths

ITSELF = "itself without labels"


class Choice(NamedTuple):
    """What was asked for; `kimg` and `gnet_kimg` are times in runs, thousands of images."""

    nets: Sequence[str]
    stds: Sequence[float] | None
    kimg: float | None
    gnet: str | None
    gnet_kimg: float | None
    preset: str | None
    guidance: float | None
    vae: str | None
    fast: bool
    networks: str


class Candidate(NamedTuple):
    """A network to measure. `facts`: what its images depend on, for JSON; `guidance` among them. `open` loads it."""

    name: str
    facts: dict[str, Any]
    open: Callable[[], ImageGenerator]


def check_choice(choice: Choice) -> list[str]:
    """Which of the networks are folders of runs. UserError for options that contradict each other."""
    folders = [net for net in choice.nets if Path(net).is_dir()]
    if choice.stds is None and folders:
        raise UserError(f"--net {folders[0]} is a folder: give --std, the widths of the averages to measure")
    if not folders and (choice.stds is not None or choice.kimg is not None or choice.gnet_kimg is not None):
        raise UserError("--std, --kimg and --gnet-kimg are for a --net that is the folder of a training run")
    if folders and choice.preset is not None:
        raise UserError("--preset names networks of its own: give it, or the folder of a training run")
    check_guide_time(choice.gnet, choice.gnet_kimg)
    if len(set(choice.nets)) < len(choice.nets):
        raise UserError("--net: one of them is given twice")
    return folders


def candidates(choice: Choice, device: torch.device) -> list[Candidate]:
    """All, with their files read as far as that is quick. UserError for what is missing or does not fit."""
    folders = check_choice(choice)
    found: list[Candidate] = []
    for net in choice.nets or [None]:
        found += _of_run(net, choice, device) if net in folders else [_of_file(net, choice, device)]
    return found


def _of_file(net: str | None, choice: Choice, device: torch.device) -> Candidate:
    files = choose_files(choice.preset, user_path(choice.networks), net, choice.gnet, choice.guidance)

    def load() -> ImageGenerator:
        snapshot, guide = load_networks(files, device)
        return ImageGenerator(snapshot.net, guide, choose_encoder(snapshot, files.net, choice.vae, False, choice.fast, device), choice.fast)

    guide = {"gnet": files.gnet or ITSELF, "gnet_sha256": sha256(files.gnet) if files.gnet else None} if files.guidance != 1 else {}
    facts = {"net": files.net, "net_sha256": sha256(files.net), **guide, "guidance": files.guidance}
    return Candidate(files.net, facts, load)


def _of_run(folder: str, choice: Choice, device: torch.device) -> list[Candidate]:
    run, guidance = RunAverages(folder, choice.kimg), 1.0 if choice.guidance is None else choice.guidance
    check_widths(choice.stds)
    note_errors(run, list(choice.stds))
    guide = choose_guide(run, choice.gnet, choice.gnet_kimg, choice.networks, device) if guidance != 1 else None
    facts = {"net": folder, "nimg": run.nimg, "snapshots_sha256": run.identity, "guidance": guidance}
    facts |= {"gnet": choice.gnet or ITSELF, "gnet_sha256": None if choice.gnet is None else guide.identity} if guide else {}

    def load(std: float) -> ImageGenerator:
        snapshot = run.average(std, device)
        encoder = choose_encoder(snapshot, folder, choice.vae, False, choice.fast, device)
        return ImageGenerator(snapshot.net, None if guide is None else guide.of(snapshot.net, std), encoder, choice.fast)

    stds = dict.fromkeys(choice.stds)
    return [Candidate(f"{folder} sigma_rel {std:.3f}", {**facts, "std": std}, partial(load, std)) for std in stds]
