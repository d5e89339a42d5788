"""All of a dataset read once: what is wrong with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edm2.data import latent_facts
from edm2.errors import UserError
from edm2.image_files import ImageFiles
from edm2.latent_statistics import LatentStatistics, LatentSums
from edm2.latents import LatentFacts


def faults(path: str | Path, progress: Callable[[int], Any] = lambda files: None, any_size: bool = False) -> Iterator[str]:
    """A line for each file that cannot be read, is of another size or type than the first readable one (images may be of `any_size` and
    grey or in colour if that is set), holds numbers that are not finite, or latents whose standard deviations are negative; and for
    labels, or what is told of latents, that do not fit. `progress` is told of files read. UserError where there is no dataset."""
    files = ImageFiles(path)
    of_labels = list(files.label_faults())
    yield from of_labels
    told, sums = None, LatentSums()
    try:
        told = latent_facts(files)
    except UserError as e:
        if str(e) not in of_labels:  # of the same file
            yield str(e)
    first: tuple[str, tuple[int, ...], np.dtype] | None = None
    for name, image in files.arrays():
        progress(1)
        if isinstance(image, UserError):
            yield str(image)
            continue
        first = first or (name, image.shape, image.dtype)
        if (image.shape, image.dtype) != first[1:] and not (any_size and image.dtype == first[2] == np.uint8):
            yield f"{files.where(name)} is {image.dtype} {list(image.shape)}, and {first[0]} is {first[2]} {list(first[1])}"
        elif fault := _fault(image):
            yield f"{files.where(name)} has {fault}"
        elif image.dtype == np.float32:
            sums = sums.plus(image)
    if told is not None and sums.count:
        yield from _statistics_faults(files, told, sums.statistics)


def _fault(image: np.ndarray) -> str | None:
    if image.dtype != np.float32:
        return None
    if len(image) % 2:
        return f"{len(image)} channels, and latents have means and as many standard deviations"
    if not np.isfinite(image).all():
        return "numbers that are not finite"
    return "standard deviations below zero" if image[len(image) // 2 :].min() < 0 else None


def _statistics_faults(files: ImageFiles, told: LatentFacts, found: LatentStatistics) -> Iterator[str]:
    for name, expected, actual in (("mean", told.raw_mean, found.raw_mean), ("standard deviation", told.raw_std, found.raw_std)):
        if len(expected) != len(actual) or not np.allclose(expected, actual, atol=0.1, rtol=0.1):
            rounded = np.round(actual, 3).tolist()
            yield f"{files.where('dataset.json')} tells of a {name} of {list(expected)}, and the files' is {rounded}"
