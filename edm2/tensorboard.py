"""What a run tells of itself, for TensorBoard where it is installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edm2.distributed import Processes

FOLDER = "tensorboard"


class TensorBoard:
    """A context manager: the log in a run's folder that the first process writes from image `nimg` on; does nothing without it."""

    def __init__(self, outdir: Path, nimg: int, procs: Processes):
        self._writer = None
        if procs.rank == 0 and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(outdir / FOLDER, purge_step=nimg + 1)  # what a run that is resumed has to do again

    def __enter__(self) -> "TensorBoard":
        return self

    def write(self, stats: dict[str, Any], nimg: int) -> None:
        """A status line, at the image `nimg`."""
        if self._writer is not None:
            for tag, value in scalars(stats):
                self._writer.add_scalar(tag, value, nimg)

    def show(self, grid: np.ndarray | None, nimg: int) -> None:
        """A picture, uint8 `[H, W, C]`."""
        if self._writer is not None and grid is not None:
            self._writer.add_image("samples", grid, nimg, dataformats="HWC")

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a status line, those by block or noise level each under a name of its own."""
    levels = stats.get("sigma")
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            pairs = zip(levels, value) if name not in ("sigma", "images") else ()
            yield from ((f"{prefix}{name}/{sigma:.3g}", x) for sigma, x in pairs if x is not None)
        elif value is not None and name != "timestamp":
            yield prefix + name, value
