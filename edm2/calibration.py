"""Which noise levels to train with: those where the data have structure that a network can find.

A network that knows the data's mean and standard deviation s, and takes their elements for independent, has the weighted error
λ·(D − y)² = (σ² + σ_data²)·s² / (σ_data²·(σ² + s²)): 1 everywhere where s is σ_data. A trained one errs less at noise that hides
some of the data: neither at low noise, which cannot be told from them, nor at high noise, which leaves nothing of them. Karras
et al. 2022 (section 5) choose a log-normal distribution over such levels by looking at this dip; here its mean and standard
deviation over ln σ are computed, and s is what the error at the highest noise says.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edm2.errors import UserError

Float = NDArray[np.float64]
FEWEST = 100  # images that a noise level's mean needs


class Calibration(NamedTuple):
    """By noise level `[n]`: σ, the mean weighted error, exp u(σ), the error without structure, images. The suggested P_mean and
    P_std; what is odd, in words."""

    sigma: Float
    error: Float
    learnt: Float
    unstructured: Float
    images: Float
    p_mean: float
    p_std: float
    warnings: list[str]


def calibrate(stats: Sequence[dict[str, Any]], share: float = 0.25, fewest: int = FEWEST, sigma_data: float = 0.5) -> Calibration:
    """Of the last `share` of a run's status lines (`edm2.stats.read_stats`). UserError where they do not tell enough."""
    lines = [line["Loss/by_noise_level"] for line in stats if isinstance(line.get("Loss/by_noise_level"), dict)]
    lines = lines[-max(1, round(len(lines) * share)) :]
    sigma, images, error, learnt = _means(lines)
    seen = images >= fewest
    if seen.sum() < 5:
        raise UserError(f"the run's last status lines tell of {seen.sum()} noise levels, of {fewest} images or more: train longer")
    sigma, images, error, learnt = (x[seen] for x in (sigma, images, error, learnt))
    s = _data_std(sigma[-2:], error[-2:], images[-2:], sigma_data)
    unstructured = (sigma**2 + sigma_data**2) * s**2 / (sigma_data**2 * (sigma**2 + s**2))
    gain = np.maximum(1 - error / unstructured, 0)
    if gain.max() < 0.02:
        raise UserError("the network errs as much as one that knows only the data's mean and standard deviation: train longer")
    if np.count_nonzero(gain) < 2:
        raise UserError("the network has learnt structure at one noise level only: train longer")
    x, weight = np.log(sigma), gain / gain.sum()
    mean = float(weight @ x)
    std = math.sqrt(float(weight @ (x - mean) ** 2))
    warnings = _warnings(sigma, gain, error, learnt)
    if abs(s / sigma_data - 1) > 0.1:
        warnings.append(f"without their mean, the data have a standard deviation of {s:.2f}, where the network takes it for {sigma_data:g}")
    if sigma[-1] < 10 * sigma_data:
        warnings.append(f"the run saw no noise above σ = {sigma[-1]:.2g}, where structure may be left: use a larger --P_std first")
    return Calibration(sigma, error, learnt, unstructured, images, mean, std, warnings)


def _data_std(sigma: Float, error: Float, images: Float, sigma_data: float) -> float:
    """s, of errors where nothing but the mean is left."""
    rest = sigma**2 + sigma_data**2 - np.minimum(error, 1e3) * sigma_data**2
    if not (rest > 0).all() or not (error > 0).all():
        raise UserError(f"the error at σ = {sigma[-1]:.2g} is {error[-1]:.2g}: train longer")
    return float(np.sqrt(np.average(error * (sigma_data * sigma) ** 2 / rest, weights=images)))


def _means(lines: Sequence[dict[str, list[float | None]]]) -> tuple[Float, Float, Float, Float]:
    """σ, images, error, exp u by noise level, over lines: errors by their images."""
    if not lines:
        raise UserError("the run's status lines tell nothing by noise level: it is an old one, or has not reached its first")
    try:
        images, error, u = (np.array([line[name] for line in lines], np.float64) for name in ("images", "error", "u"))
        sigma = np.array(lines[-1]["sigma"], np.float64)
        weights = np.where(np.isfinite(error) & np.isfinite(u), images, 0)
        total = weights.sum(axis=0)
        if len(sigma) != len(total) or not (sigma > 0).all():
            raise ValueError("lists of different lengths")
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"the run's status lines by noise level are damaged ({e})") from e
    error, u = (np.where(weights > 0, x, 0) for x in (error, u))
    return sigma, total, (error * weights).sum(axis=0) / np.maximum(total, 1), np.exp((u * weights).sum(axis=0) / np.maximum(total, 1))


def _warnings(sigma: Float, gain: Float, error: Float, learnt: Float) -> list[str]:
    words = []
    if gain[0] > 0.1 * gain.max():
        words.append(f"at lower noise than the run saw (σ = {sigma[0]:.2g}) there is more to learn: use a larger --P_std first")
    if (off := np.abs(np.log(learnt / np.maximum(error, 1e-6)))).max() > math.log(1.25):
        words.append(f"u(σ) is {np.exp(off.max()) - 1:.0%} off the error at σ = {sigma[off.argmax()]:.2g}: it has not converged")
    return words
