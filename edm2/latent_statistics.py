"""Mean and standard deviation of a dataset's latents, which its encoder needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edm2.errors import UserError
from edm2.image_files import ImageFiles


class LatentStatistics(NamedTuple):
    """Per channel of a VAE's latents: what `edm2.LatentEncoder` calls `raw_mean` and `raw_std`."""

    raw_mean: list[float]
    raw_std: list[float]


class LatentSums(NamedTuple):
    """Sums per channel over latents drawn from means and standard deviations, in float64."""

    count: int = 0
    total: list[float] = []
    squares: list[float] = []

    def plus(self, latents: NDArray[np.float32]) -> "LatentSums":
        """With an image's means ⊕ standard deviations `[2C, H, W]`. ValueError for another number of channels."""
        mean, std = (half.reshape(len(half), -1).astype(np.float64) for half in np.split(latents, 2))
        if self.count and len(mean) != len(self.total):
            raise ValueError(f"{2 * len(mean)} channels, and others have {2 * len(self.total)}")
        total, squares = mean.sum(axis=1), (mean**2 + std**2).sum(axis=1)
        if self.count:
            total, squares = total + self.total, squares + self.squares
        return LatentSums(self.count + mean.shape[1], total.tolist(), squares.tolist())

    @property
    def statistics(self) -> LatentStatistics:
        mean = np.array(self.total) / self.count
        return LatentStatistics(mean.tolist(), np.sqrt(np.array(self.squares) / self.count - mean**2).tolist())


def latent_statistics(path: str | Path, progress: Callable[[int], Any] = lambda files: None) -> LatentStatistics:
    """Of a dataset. UserError for one of pixels, and for the first file that is damaged."""
    files, sums = ImageFiles(path), LatentSums()
    for name, image in files.arrays():
        progress(1)
        if isinstance(image, UserError):
            raise image
        if image.dtype != np.float32 or image.shape[0] % 2:
            raise UserError(f"{files.where(name)} is {image.dtype} {list(image.shape)}, and no latents: float32 means, then deviations")
        try:
            sums = sums.plus(image)
        except ValueError as e:
            raise UserError(f"{files.where(name)} has {e}") from e
    return sums.statistics
