"""The Fréchet distance between two sets of features, each taken for a normal distribution (Heusel et al. 2017).

FID is this distance of Inception's features; which features they are matters to nothing here.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]


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
        """Some more, `[N, d]`. ValueError if they have another form or width, or are not finite."""
        features = np.asarray(features, np.float64)
        if features.ndim != 2 or self.count and features.shape[1] != len(self.mean):
            raise ValueError(f"features: expected [N, {len(self.mean) if self.count else 'd'}], got {list(features.shape)}")
        if not np.isfinite(features).all():
            raise ValueError("features are not all finite")
        if not len(features):
            return
        if not self.count:
            self.mean, self._scatter = np.zeros(features.shape[1]), np.zeros((features.shape[1],) * 2)
        mean = features.mean(axis=0)
        centred, shift, total = features - mean, mean - self.mean, self.count + len(features)
        self._scatter += centred.T @ centred + np.outer(shift, shift) * (self.count * len(features) / total)
        self.mean = self.mean + shift * (len(features) / total)
        self.count = total

    @property
    def covariance(self) -> Float:
        """With the denominator N − 1: `[d, d]`. ValueError for fewer than two features."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two features, got {self.count}")
        return self._scatter / (self.count - 1)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|μ_a − μ_b|² + tr(Σ_a + Σ_b − 2·(Σ_a Σ_b)^½), not negative.

    The last trace is the sum of the singular values of Σ_a^½ Σ_b^½. ValueError if the features are of different widths.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and {len(b.mean)} numbers cannot be compared")
    overlap = np.linalg.norm(_root(a.covariance) @ _root(b.covariance), "nuc")
    distance = np.square(a.mean - b.mean).sum() + np.trace(a.covariance) + np.trace(b.covariance) - 2 * overlap
    return max(0.0, float(distance))


def _root(covariance: Float) -> Float:
    """The positive semi-definite square root; eigenvalues below zero are rounding."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
