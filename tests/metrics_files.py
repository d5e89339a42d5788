"""Datasets of noise and their references, for tests of metrics."""

import json
from pathlib import Path

import numpy as np

from edm2.cli.main import main
from edm2.image_files import write_zip
from tests.command_lines import call

MINE = "tests.user_features:pixels"
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
    """What it writes of each measurement."""
    told(command, *args, f"--json={tmp_path}/out.json")
    return json.loads((tmp_path / "out.json").read_text())["runs"]


def reference(path: Path, data: Path, metrics: str = BOTH) -> Path:
    told("ref", f"--data={data}", f"--dest={path}", metrics)
    return path
