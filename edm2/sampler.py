"""The Heun sampler of EDM with guidance (Karras et al. 2022, Algorithm 2; 2024, Eq. 152)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edm2.denoisers import Denoise, Plain

SNAP = 0.015  # published guidance intervals are noise levels of the schedule rounded to within this
Callback = Callable[[int, float, Tensor], None]


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


class Step(NamedTuple):
    """From noise level `sigma`, raised to `churned` first, to `to`."""

    sigma: float
    churned: float
    to: float
    guidance: float | None  # strength; None where the guide is not evaluated


@dataclass(frozen=True)
class Heun:
    """The steps of a trajectory: all that is known before the first image. The arguments are those of `edm_sampler`."""

    num_steps: int = 32
    sigma_min: float = 0.002
    sigma_max: float = 80
    rho: float = 7
    guidance: float = 1
    guidance_interval: tuple[float, float] = (0, math.inf)
    S_churn: float = 0
    S_min: float = 0
    S_max: float = math.inf
    S_noise: float = 1

    def check(self, has_guide: bool) -> None:
        """ValueError if there is guidance, but no guide."""
        if self.guidance != 1 and not has_guide:
            raise ValueError(f"guidance {self.guidance} needs a guide network: pass gnet")

    def steps(self) -> list[Step]:
        sigmas = noise_levels(self.num_steps, self.sigma_min, self.sigma_max, self.rho).tolist()
        guided = guided_steps(sigmas[:-1], self.guidance_interval)
        strengths = [self.guidance if self.guidance != 1 and g else None for g in guided]
        return [Step(sigma, self._churn(sigma), to, w) for sigma, to, w in zip(sigmas, sigmas[1:], strengths)]

    def evaluations(self) -> list[tuple[float, bool]]:
        """Noise level and whether the guide counts, of each evaluation."""
        return [(sigma, s.guidance is not None) for s in self.steps() for sigma in (s.churned, s.to) if sigma > 0]

    def _churn(self, sigma: float) -> float:
        if not (self.S_churn > 0 and self.S_min <= sigma <= self.S_max):
            return sigma
        return sigma * (1 + min(self.S_churn / self.num_steps, math.sqrt(2) - 1))

    def integrate(
        self, denoise: Denoise, noise: Tensor, dtype: torch.dtype, randn_like: Callable[[Tensor], Tensor], callback: Callback | None = None
    ) -> Tensor:
        """From standard normal noise to samples."""
        steps = self.steps()
        x = noise.to(dtype) * steps[0].sigma
        for i, step in enumerate(steps):
            if step.churned > step.sigma:
                x = x + math.sqrt(step.churned**2 - step.sigma**2) * self.S_noise * randn_like(x)
            slope = (x - denoise(x, step.churned, step.guidance)) / step.churned
            x_euler = x + (step.to - step.churned) * slope
            if step.to > 0:
                slope_next = (x_euler - denoise(x_euler, step.to, step.guidance)) / step.to
                x_euler = x + (step.to - step.churned) * (slope + slope_next) / 2
            x = x_euler
            if callback is not None:
                callback(i, step.to, x)
        return x


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
    callback: Callback | None = None,
) -> Tensor:
    """From standard normal `noise` `[N, C, H, W]` to samples of the same shape, in `dtype`.

    `guidance` w evaluates `w·net + (1−w)·gnet`, in steps whose σ lies in `guidance_interval` (lo, hi]; where it has
    no effect the guide is not evaluated. S_churn > 0 adds noise back in each step within [S_min, S_max]. The last bits of an
    image may depend on its batch; `generate_images` sees to it that they do not.
    `callback(i, sigma, x)` sees the state after step i.
    """
    heun = Heun(num_steps, sigma_min, sigma_max, rho, guidance, guidance_interval, S_churn, S_min, S_max, S_noise)
    heun.check(gnet is not None)
    denoise = Plain(net, gnet).along(heun.evaluations(), labels, len(noise))
    return heun.integrate(denoise, noise, dtype, randn_like, callback)
