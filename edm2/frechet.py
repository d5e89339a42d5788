"""The Fréchet distance between two sets of features, each taken for a normal distribution (Heusel et al. 2017).

FID is this distance of Inception's features; which features they are matters to nothing here.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]


class Moments(NamedTuple):
    """Mean `[d]` and covariance `[d, d]` of features, and of how many, if that is known."""

    mean: Float
    covariance: Float
    count: int | None = None


class Gaussian:
    """Mean and covariance of features that come in batches, in float64. Only sums are kept, about the mean so far."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Float = np.zeros(0)  # `[d]`
        self._scatter: Float = np.zeros((0, 0))  # sum of outer products of the differences from the mean, `[d, d]`

    @classmethod
    def of(cls, features: ArrayLike) -> "Gaussian":
        """Of `[N, d]` at once."""
        gaussian = cls()
        gaussian.add(features)
        return gaussian

    def add(self, features: ArrayLike) -> None:
        """Some more, `[N, d]`. ValueError if they have another form or width, are not finite, or so large that their products are not."""
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or self.count and features.shape[1] != len(self.mean):
            raise ValueError(f"features: expected [N, {len(self.mean) if self.count else 'd'}], got {list(features.shape)}")
        if not np.isfinite(features).all():
            raise ValueError("features are not all finite")
        if not len(features):
            return
        with np.errstate(over="ignore", invalid="ignore"):  # which `_join` finds
            mean = features.mean(axis=0)
            centred = features - mean
            scatter = centred.T @ centred
        self._join(len(features), mean, scatter)

    def merge(self, other: "Gaussian") -> None:
        """What the other has seen, as if it had been added here. ValueError if its features are of another width, or too large."""
        if self.count and other.count and len(self.mean) != len(other.mean):
            raise ValueError(f"features of {len(self.mean)} and {len(other.mean)} numbers cannot be merged")
        if other.count:
            self._join(other.count, other.mean, other._scatter)

    def _join(self, count: int, mean: Float, scatter: Float) -> None:
        """Chan, Golub and LeVeque 1979: about the common mean, scatter grows by that of the two means."""
        if not self.count:
            self.mean, self._scatter = np.zeros_like(mean), np.zeros_like(scatter)
        total = self.count + count
        with np.errstate(over="ignore", invalid="ignore"):
            shift = mean - self.mean
            scatter = self._scatter + scatter + np.outer(shift, shift) * (self.count * count / total)
            mean = self.mean + shift * (count / total)
        if not np.isfinite(scatter).all() or not np.isfinite(mean).all():
            raise ValueError("features are too large: their covariance is not finite")
        self.count, self.mean, self._scatter = total, mean, scatter

    @property
    def covariance(self) -> Float:
        """With the denominator N − 1: `[d, d]`. ValueError for fewer than two features."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two features, got {self.count}")
        return self._scatter / (self.count - 1)

    def moments(self) -> Moments:
        """ValueError for fewer than two features."""
        return Moments(self.mean, self.covariance, self.count)


def frechet_distance(a: Gaussian | Moments, b: Gaussian | Moments) -> float:
    """|μ_a − μ_b|² + tr(Σ_a + Σ_b − 2·(Σ_a Σ_b)^½), not negative.

    The last trace is the sum of the singular values of Σ_a^½ Σ_b^½. ValueError if the features are of different widths, and for
    numbers that are not finite, or too large for the distance to be.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and {len(b.mean)} numbers cannot be compared")
    if not all(np.isfinite(x).all() for x in (a.mean, a.covariance, b.mean, b.covariance)):
        raise ValueError("a mean or covariance is not finite")
    with np.errstate(over="ignore", invalid="ignore"):
        overlap = np.linalg.norm(_root(a.covariance) @ _root(b.covariance), "nuc")
        distance = float(np.square(a.mean - b.mean).sum() + np.trace(a.covariance) + np.trace(b.covariance) - 2 * overlap)
    if not math.isfinite(distance):
        raise ValueError("the distance is not finite")
    return max(0.0, distance)


def _root(covariance: Float) -> Float:
    """The positive semi-definite square root. Eigenvalues that rounding alone can be are zero: their roots would be 1e-8 of the others."""
    values, vectors = np.linalg.eigh(covariance)
    rounding = len(values) * np.finfo(np.float64).eps * values[-1]
    return (vectors * np.sqrt(np.where(values > rounding, values, 0))) @ vectors.T
