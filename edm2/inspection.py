"""All of a dataset read once: what is wrong with it, and the statistics that an encoder needs."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edm2.errors import UserError
from edm2.image_files import ImageFiles

AHEAD = 64  # files that are read before they are looked at


class LatentStatistics(NamedTuple):
    """Per channel of a VAE's latents: what `edm2.LatentEncoder` calls `raw_mean` and `raw_std`."""

    raw_mean: list[float]
    raw_std: list[float]


def faults(path: str | Path, progress: Callable[[int], Any] = lambda files: None) -> Iterator[str]:
    """A line for each file that cannot be read, is of another size or type than the first readable one, or holds numbers that are
    not finite; and for labels that do not fit. `progress` is told of files read. UserError where there is no dataset."""
    files = ImageFiles(path)
    try:
        files.labels()
    except UserError as e:
        yield str(e)
    first: tuple[str, tuple[int, ...], np.dtype] | None = None
    for name, image in _arrays(files):
        progress(1)
        if isinstance(image, UserError):
            yield str(image)
            continue
        first = first or (name, image.shape, image.dtype)
        if (image.shape, image.dtype) != first[1:]:
            yield f"{files.where(name)} is {image.dtype} {list(image.shape)}, and {first[0]} is {first[2]} {list(first[1])}"
        elif not np.isfinite(image).all():
            yield f"{files.where(name)} has numbers that are not finite"


def latent_statistics(path: str | Path, progress: Callable[[int], Any] = lambda files: None) -> LatentStatistics:
    """Mean and standard deviation of latents drawn from a dataset's means and deviations, in float64. UserError for a dataset of
    pixels, and for the first file that is damaged."""
    files = ImageFiles(path)
    count, total, squares = 0, 0.0, 0.0  # of numbers per channel
    for name, image in _arrays(files):
        progress(1)
        if isinstance(image, UserError):
            raise image
        if image.dtype != np.float32 or image.shape[0] % 2:
            raise UserError(f"{files.where(name)} is {image.dtype} {list(image.shape)}, and no latents: float32 means, then deviations")
        mean, std = (half.reshape(len(half), -1).astype(np.float64) for half in np.split(image, 2))
        if count and len(mean) != len(total):
            raise UserError(f"{files.where(name)} has {len(image)} channels, and others have {2 * len(total)}")
        count, total, squares = count + mean.shape[1], total + mean.sum(axis=1), squares + (mean**2 + std**2).sum(axis=1)
    return _statistics(count, total, squares)


def _statistics(count: int, total: NDArray[np.float64], squares: NDArray[np.float64]) -> LatentStatistics:
    mean = total / count
    return LatentStatistics(mean.tolist(), np.sqrt(squares / count - mean**2).tolist())


def _arrays(files: ImageFiles) -> Iterator[tuple[str, np.ndarray | UserError]]:
    """Each file's name and array, or what is wrong with it, in order; read by several threads, a few ahead."""

    def read(name: str) -> np.ndarray | UserError:
        try:
            return files.array(name)
        except UserError as e:
            return e

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(files.names), AHEAD):
            names = files.names[start : start + AHEAD]
            yield from zip(names, threads.map(read, names))
