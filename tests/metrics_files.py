"""Datasets of noise, their references, and processes that are threads, for tests of metrics."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from edm2.cli.main import main
from edm2.dataset_zip import write_zip
from edm2.distributed import Processes
from tests.command_lines import call

MINE = "tests.user_features:pixels"
CPU = torch.device("cpu")
BOTH = f"--metrics=frechet-small,{MINE}"


def noise(path: Path, count: int = 60, size: int = 8) -> Path:
    """RGB images in 5 classes."""
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    write_zip(path, images, [i % 5 for i in range(count)])
    return path


def told(*args) -> str:
    """What `edm2 metrics` says."""
    result = call(main, "metrics", *args)
    assert result.exit_code == 0, result.output
    return result.output


def runs(tmp_path: Path, command: str, *args) -> list[dict]:
    """What it writes of each measurement, to a file that was not there."""
    (tmp_path / "out.json").unlink(missing_ok=True)
    told(command, *args, f"--json={tmp_path}/out.json")
    return json.loads((tmp_path / "out.json").read_text())["runs"]


def reference(path: Path, data: Path, metrics: str = BOTH) -> Path:
    told("ref", f"--data={data}", f"--dest={path}", metrics)
    return path


@dataclass(frozen=True)
class Simulated(Processes):
    """One of several processes, which are threads."""

    said: list = field(default_factory=list)
    meeting: threading.Barrier | None = None

    def gather(self, x):
        self.said[self.rank] = x
        self.meeting.wait(20)
        found = list(self.said)
        self.meeting.wait(20)
        return found if self.rank == 0 else None

    def share(self, x):
        self.gather(x)
        self.meeting.wait(20)
        if self.rank == 0:
            self.said[:] = [x] * len(self.said)
        self.meeting.wait(20)
        return self.said[self.rank]


def simulated(function, count: int):
    """What the first of `count` processes gets; the error of the first that has one, if all have."""
    said, barrier = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        made = [pool.submit(function, Simulated(rank, count, CPU, None, said, barrier)) for rank in range(count)]
        errors = [each.exception() for each in made]
    assert all(errors) or not any(errors), errors
    return made[0].result()
