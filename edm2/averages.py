"""The averages of a training run's folder: those that it stores, and those of any width that follow from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from edm2.errors import UserError
from edm2.files import sha256
from edm2.networks import open_snapshot
from edm2.reconstruction import make_plan, reconstruct_files, snapshot_files
from edm2.snapshot import Snapshot, load_snapshot

PREFIX = "network-snapshot"


class RunAverages:
    """The snapshots of a training run, or official pickles, up to a time, thousands of images as `make_plan` takes them (default:
    the last one's).

    UserError if the folder holds none or none of that time, and for files that do not fit together.
    """

    def __init__(self, folder: str | Path, kimg: float | None = None):
        self.folder = Path(folder)
        try:
            paths = snapshot_files(self.folder, PREFIX)
        except UserError as e:
            raise UserError(f"{folder} holds no network snapshots: give the folder of a training run") from e
        self.plan = make_plan(paths, [], kimg)
        self.nimg = self.plan.nimg
        last = open_snapshot(self.plan.sources[-1].path)
        self.config, self.encoder, self.meta = last.config, last.encoder, last.meta

    @cached_property
    def identity(self) -> str:
        """A checksum of all that averages of this time are made of."""
        checksums = sorted(sha256(source.path) for source in self.plan.sources)
        return hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]

    def errors(self, stds: Sequence[float]) -> list[float]:
        """How far the profile of each of these averages is from the wanted one, as a share of it."""
        return self.plan.fit(stds).error.tolist()

    def average(self, std: float, device: str | torch.device = "cpu") -> Snapshot:
        """The network whose average is of relative width σ_rel `std`, in fp32. UserError for damaged snapshots."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "average.safetensors"
            reconstruct_files(replace(self.plan, stds=[std]), [path], torch.float32)
            return load_snapshot(path, device)
