"""The optimizer of EDM2 (Karras et al. 2024, appendices B.5 and C): Adam, averages, forced weight normalisation."""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from edm2.network import normalize_rows_, normalized_weights
from edm2.phema import power_function_beta


def learning_rate_schedule(
    cur_nimg: int, batch_size: int, ref_lr: float, ref_batches: float, rampup_Mimg: float = 10
) -> float:
    """Learning rate of the step that starts after `cur_nimg` images, Eq. 67.

    A linear ramp over `rampup_Mimg` million images (the first step has rate 0), then constant, then
    1/sqrt(steps / ref_batches). `ref_batches = 0` means no decay.
    """
    lr = ref_lr
    if ref_batches > 0:
        lr /= math.sqrt(max(cur_nimg / (ref_batches * batch_size), 1))
    if rampup_Mimg > 0:
        lr *= min(cur_nimg / (rampup_Mimg * 1e6), 1)
    return lr


class EDM2Optimizer:
    """Adam on every parameter of `net`, power-function EMAs, then forced normalisation, in this order.

    The averages see the weights after Adam and before the normalisation. Non-finite gradients count as 0;
    `nonfinite` is the number of them in the last step (0-d int64 tensor, so that reading it is what synchronises).
    """

    def __init__(
        self,
        net: nn.Module,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        ema_stds: Sequence[float] = (0.05, 0.10),
    ):
        self.params = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.normalized = normalized_weights(net)
        self.adam = torch.optim.Adam(self.params.values(), lr=0.0, betas=betas, eps=eps, fused=True)
        self.emas = {float(std): [p.detach().clone() for p in self.params.values()] for std in ema_stds}
        self.nonfinite = torch.zeros([], dtype=torch.int64, device=next(iter(self.params.values())).device)

    @torch.no_grad()
    def step(self, lr: float, next_nimg: int, batch_size: int) -> None:
        """One step at learning rate `lr`; `next_nimg` = images seen after it, `batch_size` = images in it."""
        self._sanitize_gradients()
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        weights = list(self.params.values())
        for std, averages in self.emas.items():
            beta = float(power_function_beta(std, next_nimg, batch_size))
            torch._foreach_lerp_(averages, weights, 1 - beta)
        normalize_rows_(self.normalized)

    def ema(self, std: float) -> dict[str, Tensor]:
        """The running average of σ_rel `std` by parameter name. KeyError if it is not tracked."""
        return dict(zip(self.params, self.emas[float(std)]))

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Adam's state and the averages, by reference."""
        return {"adam": self.adam.state_dict(), "emas": {std: self.ema(std) for std in self.emas}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`. ValueError if it tracks other averages."""
        if set(state["emas"]) != set(self.emas):
            raise ValueError(f"the state holds the averages {sorted(state['emas'])}, not {sorted(self.emas)}")
        self.adam.load_state_dict(deepcopy(state["adam"]))  # it would share the tensors otherwise
        for std, averages in state["emas"].items():
            for name, average in self.ema(std).items():
                average.copy_(averages[name])

    def _sanitize_gradients(self) -> None:
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        if not grads:
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        self.nonfinite = torch.stack([(g - g).count_nonzero() for g in grads]).sum()  # x − x is NaN unless x is finite
        for grad in grads:
            torch.nan_to_num(grad, nan=0, posinf=0, neginf=0, out=grad)
