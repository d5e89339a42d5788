"""All of a dataset read once: what is wrong with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edm2.errors import UserError
from edm2.image_files import ImageFiles


def faults(path: str | Path, progress: Callable[[int], Any] = lambda files: None) -> Iterator[str]:
    """A line for each file that cannot be read, is of another size or type than the first readable one, or holds numbers that are
    not finite; and for labels that do not fit. `progress` is told of files read. UserError where there is no dataset."""
    files = ImageFiles(path)
    try:
        files.labels()
    except UserError as e:
        yield str(e)
    first: tuple[str, tuple[int, ...], np.dtype] | None = None
    for name, image in files.arrays():
        progress(1)
        if isinstance(image, UserError):
            yield str(image)
            continue
        first = first or (name, image.shape, image.dtype)
        if (image.shape, image.dtype) != first[1:]:
            yield f"{files.where(name)} is {image.dtype} {list(image.shape)}, and {first[0]} is {first[2]} {list(first[1])}"
        elif not np.isfinite(image).all():
            yield f"{files.where(name)} has numbers that are not finite"
