"""The Heun sampler of EDM with guidance (Karras et al. 2022, Algorithm 2; 2024, Eq. 152)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

SNAP = 0.015  # published guidance intervals are noise levels of the schedule rounded to within this


def noise_levels(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80, rho: float = 7) -> Tensor:
    """σ_0 = sigma_max … σ_{N−1} = sigma_min, then 0: float64 `[num_steps + 1]`. One step means [sigma_max, 0]."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    ramp = torch.arange(num_steps, dtype=torch.float64) / max(num_steps - 1, 1)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    sigmas = (high + ramp * (low - high)) ** rho
    return torch.cat([sigmas, sigmas.new_zeros(1)])


def guided_steps(sigmas: list[float], interval: tuple[float, float]) -> list[bool]:
    """Which steps are guided: those with lo < σ_i ≤ hi (Kynkäänniemi et al. 2024).

    A bound within 1.5 % of a σ_i means that σ_i. The decision belongs to the step, its correction included.
    """
    lo, hi = (_snap(bound, sigmas) for bound in interval)
    return [lo < sigma <= hi for sigma in sigmas]


def _snap(bound: float, sigmas: list[float]) -> float:
    nearest = min(sigmas, key=lambda sigma: abs(sigma - bound))
    return nearest if abs(nearest - bound) <= SNAP * nearest else bound


@torch.no_grad()
def edm_sampler(
    net: nn.Module,
    noise: Tensor,
    labels: Tensor | None = None,
    gnet: nn.Module | None = None,
    num_steps: int = 32,
    sigma_min: float = 0.002,
    sigma_max: float = 80,
    rho: float = 7,
    guidance: float = 1,
    guidance_interval: tuple[float, float] = (0, math.inf),
    S_churn: float = 0,
    S_min: float = 0,
    S_max: float = math.inf,
    S_noise: float = 1,
    dtype: torch.dtype = torch.float32,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    callback: Callable[[int, float, Tensor], None] | None = None,
) -> Tensor:
    """From standard normal `noise` `[N, C, H, W]` to samples of the same shape, in `dtype`.

    `guidance` w evaluates `w·net + (1−w)·gnet`, in steps whose σ lies in `guidance_interval` (lo, hi]; where it has
    no effect the guide is not evaluated. S_churn > 0 adds noise back in each step within [S_min, S_max]. The last bits of an
    image may depend on its batch; `generate_images` sees to it that they do not.
    `callback(i, sigma, x)` sees the state after step i.
    """
    if guidance != 1 and gnet is None:
        raise ValueError(f"guidance {guidance} needs a guide network: pass gnet")
    sigmas = noise_levels(num_steps, sigma_min, sigma_max, rho).tolist()
    guided = guided_steps(sigmas[:-1], guidance_interval)

    def denoise(x: Tensor, sigma: float, guide: bool) -> Tensor:
        D = net(x, sigma, labels).to(dtype)
        return D if not guide else gnet(x, sigma, labels).to(dtype).lerp(D, guidance)

    x = noise.to(dtype) * sigmas[0]
    for i, (sigma, sigma_next) in enumerate(zip(sigmas, sigmas[1:])):
        guide = guidance != 1 and guided[i]
        if S_churn > 0 and S_min <= sigma <= S_max:
            gamma = min(S_churn / num_steps, math.sqrt(2) - 1)
            sigma, sigma_before = sigma * (1 + gamma), sigma
            x = x + math.sqrt(sigma**2 - sigma_before**2) * S_noise * randn_like(x)
        slope = (x - denoise(x, sigma, guide)) / sigma
        x_euler = x + (sigma_next - sigma) * slope
        if sigma_next > 0:
            slope_next = (x_euler - denoise(x_euler, sigma_next, guide)) / sigma_next
            x_euler = x + (sigma_next - sigma) * (slope + slope_next) / 2
        x = x_euler
        if callback is not None:
            callback(i, sigma_next, x)
    return x
