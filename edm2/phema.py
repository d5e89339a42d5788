"""Power-function EMA and its post-hoc reconstruction (Karras et al. 2024, section 3 and appendix C).

An average is named by its relative width σ_rel ("std"); γ ("exp") is the exponent of its profile p(t) ∝ t^γ on
[0, t]. Times are counts of images. Float64 throughout.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Float = NDArray[np.float64]
MAX_STD = 12**-0.5  # σ_rel of γ = 0


def exp_to_std(exp: ArrayLike) -> Float:
    """γ → σ_rel, Eq. 126."""
    exp = np.asarray(exp, np.float64)
    return np.sqrt(exp + 1) / ((exp + 2) * np.sqrt(exp + 3))


def std_to_exp(std: ArrayLike) -> Float:
    """σ_rel → γ: the largest real root of γ³ + 7γ² + (16 − σ⁻²)γ + (12 − σ⁻²). ValueError outside (0, 12^-1/2)."""
    std = np.asarray(std, np.float64)
    if not np.all((std > 0) & (std < MAX_STD)):
        raise ValueError(f"sigma_rel must lie in (0, {MAX_STD:.4f}), got {std.tolist()}")
    roots = [np.roots([1, 7, 16 - s**-2, 12 - s**-2]).real.max() for s in std.flat]
    return np.array(roots, np.float64).reshape(std.shape)


def power_function_beta(std: ArrayLike, t_next: ArrayLike, t_delta: ArrayLike) -> Float:
    """Decay of the average at a step that ends after `t_next` images and saw `t_delta`: `(1 − Δ/t)^(γ+1)`, Eq. 127."""
    return (1 - np.asarray(t_delta, np.float64) / t_next) ** (std_to_exp(std) + 1)


def power_function_correlation(a_ofs: ArrayLike, a_std: ArrayLike, b_ofs: ArrayLike, b_std: ArrayLike) -> Float:
    """Inner product of two profiles that end at times `a_ofs`, `b_ofs`, Eq. 150–151; broadcasts."""
    a_ofs, b_ofs = np.asarray(a_ofs, np.float64), np.asarray(b_ofs, np.float64)
    a_exp, b_exp = std_to_exp(a_std), std_to_exp(b_std)
    ratio = a_ofs / b_ofs
    power = np.where(a_ofs < b_ofs, b_exp, -a_exp)
    return (a_exp + 1) * (b_exp + 1) * ratio**power / ((a_exp + b_exp + 1) * np.maximum(a_ofs, b_ofs))


def solve_posthoc_coefficients(in_ofs: ArrayLike, in_std: ArrayLike, out_ofs: ArrayLike, out_std: ArrayLike) -> Float:
    """Weights `[in, out]` with which stored averages add up to the wanted ones, Eq. 148; each column sums to 1.

    `in_ofs`, `in_std`: time and σ_rel of the stored averages; `out_ofs`, `out_std`: of the wanted ones.
    """
    in_ofs, in_std = np.broadcast_arrays(np.ravel(in_ofs), np.ravel(in_std))
    out_ofs, out_std = np.broadcast_arrays(np.ravel(out_ofs), np.ravel(out_std))
    A = power_function_correlation(in_ofs[:, None], in_std[:, None], in_ofs[None, :], in_std[None, :])
    B = power_function_correlation(in_ofs[:, None], in_std[:, None], out_ofs[None, :], out_std[None, :])
    X = np.linalg.solve(A, B)
    return X / X.sum(axis=0)


class Fit(NamedTuple):
    """Of several wanted averages: weights `[in, out]`; the L2 distance of each combined profile from the wanted one, relative
    to the latter's norm; the factor by which independent errors of the stored averages (their rounding) grow."""

    coefficients: Float
    error: Float
    amplification: Float


def fit(in_ofs: ArrayLike, in_std: ArrayLike, out_ofs: ArrayLike, out_std: ArrayLike) -> Fit:
    """`solve_posthoc_coefficients`, and how good they are. ValueError for impossible widths and times, and for duplicates."""
    in_ofs, in_std = np.broadcast_arrays(np.ravel(in_ofs), np.ravel(in_std))
    out_ofs, out_std = np.broadcast_arrays(np.ravel(out_ofs), np.ravel(out_std))
    if not (in_ofs > 0).all() or len(set(zip(in_ofs.tolist(), in_std.tolist()))) < len(in_ofs):
        raise ValueError("stored averages at a time that is not positive, or two of one time and width")
    coefficients = solve_posthoc_coefficients(in_ofs, in_std, out_ofs, out_std)
    edges = np.unique(np.concatenate([[0.0], in_ofs, out_ofs]))  # between them, profiles are smooth
    x, weights = np.polynomial.legendre.leggauss(48)
    width = np.diff(edges)[:, None]
    t, dt = (edges[:-1, None] + width * (x + 1) / 2).ravel(), (width * weights / 2).ravel()
    wanted = profile(t, out_ofs, out_std)
    difference = profile(t, in_ofs, in_std) @ coefficients - wanted
    error = np.sqrt(dt @ difference**2 / (dt @ wanted**2))
    return Fit(coefficients, error, np.sqrt((coefficients**2).sum(axis=0)))


def profile(t: ArrayLike, ofs: ArrayLike, std: ArrayLike) -> Float:
    """Density `[len(t), n]` at the times `t` of the averages that end at `ofs`, Eq. 125: (γ+1)·t^γ / T^(γ+1) up to T, then 0."""
    t, ofs, exp = np.ravel(t)[:, None], np.ravel(ofs), std_to_exp(np.ravel(std))
    return np.where(t <= ofs, (exp + 1) / ofs * np.minimum(t / ofs, 1) ** exp, 0.0)


class StoredAverage(NamedTuple):
    """An average as a snapshot holds it."""

    nimg: int  # images seen
    std: float  # σ_rel
    tensors: Mapping[str, Tensor]


def reconstruct(snapshots: Iterable, out_stds: Sequence[float], out_nimg: int | None = None) -> list[dict[str, Tensor]]:
    """Averages of any σ_rel from the stored ones: one fp32 dict of tensors for each of `out_stds`.

    `snapshots`: what `edm2.load_snapshot` returns, `StoredAverage`s or plain (nimg, std, tensors). Those after
    `out_nimg` (default: the last one's time) are left out, and one of them must lie at it. Raises ValueError where they
    do not fit together.
    """
    snapshots = [_stored_average(s) for s in snapshots]
    if not snapshots:
        raise ValueError("no snapshots to reconstruct from")
    out_nimg = max(s.nimg for s in snapshots) if out_nimg is None else out_nimg
    used = [s for s in snapshots if 0 < s.nimg <= out_nimg]
    _check(used, out_nimg)
    coefficients = solve_posthoc_coefficients([s.nimg for s in used], [s.std for s in used], out_nimg, out_stds)
    outputs: list[dict[str, Tensor]] = [{} for _ in out_stds]
    for name in used[0].tensors:
        tensors = [s.tensors[name].detach().float() for s in used]
        for output, column in zip(outputs, coefficients.T):
            output[name] = sum(c * tensor for c, tensor in zip(column.tolist(), tensors))
    return outputs


def _stored_average(snapshot) -> StoredAverage:
    if isinstance(snapshot, tuple):
        return StoredAverage(*snapshot)
    meta = snapshot.meta
    if "nimg" not in meta or "std" not in meta:
        raise ValueError(f"a snapshot does not say its images seen (nimg) and sigma_rel (std): its meta is {meta}")
    return StoredAverage(meta["nimg"], meta["std"], dict(snapshot.net.named_parameters()))


def _check(used: Sequence[StoredAverage], out_nimg: int) -> None:
    if out_nimg not in {s.nimg for s in used}:
        raise ValueError(f"no snapshot at {out_nimg} images: choose one of the times stored")
    keys = [(s.nimg, s.std) for s in used]
    if len(set(keys)) < len(keys):
        raise ValueError("two snapshots have the same time and sigma_rel")
    shapes = [{name: tensor.shape for name, tensor in s.tensors.items()} for s in used]
    if any(shape != shapes[0] for shape in shapes[1:]):
        raise ValueError("the snapshots are of different networks")
