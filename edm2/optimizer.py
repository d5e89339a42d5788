"""The optimizer of EDM2 (Karras et al. 2024, appendices B.5 and C): Adam, averages, forced weight normalisation."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from edm2.layers import normalize_rows_, normalized_weights
from edm2.phema import power_function_beta
from edm2.sharding import Shards
from edm2.weights import StepWeights
from kernels.fallback import note

if find_spec("triton"):
    from kernels.adam import AdamPass, refuses
    from kernels.jit import serves


ADAM_STATE = "step", "exp_avg", "exp_avg_sq"


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


def trained_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


class EDM2Optimizer:
    """Adam on every parameter of `net`, power-function EMAs, then forced normalisation, in this order.

    The averages see the weights after Adam and before the normalisation. Non-finite gradients count as 0;
    `nonfinite` is the number of them in the last step (0-d int64 tensor, so that reading it is what synchronises).
    On CUDA a step is one kernel, which leaves the gradients as they are; elsewhere it sets the non-finite ones to 0.
    Given the `StepWeights` of `net`, the kernel prepares what it can of them for the next step. Given `shards`, each process
    has and does its share of it all, and they exchange the new weights; the gradients are then already those of all.
    """

    def __init__(
        self,
        net: nn.Module,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        ema_stds: Sequence[float] = (0.05, 0.10),
        weights: StepWeights | None = None,
        shards: Shards | None = None,
    ):
        self.weights, self.shards = weights, shards
        self.all_params = trained_parameters(net)
        self.params = self.all_params if shards is None else shards.own
        own = set(self.params.values())
        self.normalized = [p for p in normalized_weights(net) if p in own]
        self.adam = torch.optim.Adam(self.params.values(), lr=0.0, betas=betas, eps=eps, fused=True)
        self.steps = [0] * len(self.params)  # what Adam's state counts on the device
        self.emas = {float(std): [p.detach().clone() for p in self.params.values()] for std in ema_stds}
        self._shares: list[float] = []  # of the new weights in the averages
        self.nonfinite = torch.zeros([], dtype=torch.int64, device=next(iter(self.params.values())).device)

    @torch.no_grad()
    def step(self, lr: float, next_nimg: int, batch_size: int) -> None:
        """One step at learning rate `lr`; `next_nimg` = images seen after it, `batch_size` = images in it."""
        self.advance(lr, next_nimg, batch_size)
        self.apply()

    def advance(self, lr: float, next_nimg: int, batch_size: int) -> None:
        """The part of `step` that counts: for those parameters that have a gradient now."""
        grads = [p.grad for p in self.params.values()]
        if all(grad is None for grad in grads):
            raise RuntimeError("step() before backward(): no parameter has a gradient")
        self.steps = [steps + (grad is not None) for steps, grad in zip(self.steps, grads)]
        self.adam.param_groups[0]["lr"] = lr
        self._shares = [1 - float(power_function_beta(std, next_nimg, batch_size)) for std in self.emas]
        if self._kernel is not None:
            self._kernel.set_rates(self.steps, lr, self._shares)

    @torch.no_grad()
    def apply(self) -> None:
        """The part of `step` that computes. By the kernel it can be captured in a CUDA graph: see `can_be_captured`."""
        if self._kernel is None:
            self._step_eager()
        else:
            self._step_triton()
        if self.shards is not None:
            self.nonfinite = self.shards.exchange(self.nonfinite)

    @property
    def can_be_captured(self) -> bool:
        """Do rates lie in memory, where `advance` changes them for a graph that has been captured?"""
        return self._kernel is not None

    @cached_property
    def _kernel(self) -> "AdamPass | None":
        """What takes the steps in place of PyTorch, if it can."""
        weights = list(self.params.values())
        if not find_spec("triton") or not serves(weights[0]):
            return None
        reason = refuses(weights)
        if reason is not None:
            note("optimizer", reason)
            return None
        normalized, group = set(self.normalized), self.adam.param_groups[0]
        alone = self.weights is not None and self.shards is None  # else most weights come from other processes
        targets = self.weights.targets() if alone else {}
        return AdamPass(
            weights, [p in normalized for p in weights], list(self.emas.values()), group["betas"], group["eps"], targets
        )

    def _step_eager(self) -> None:
        self._sanitize_gradients()
        self.adam.step()
        weights = list(self.params.values())
        for averages, share in zip(self.emas.values(), self._shares):
            torch._foreach_lerp_(averages, weights, share)
        normalize_rows_(self.normalized)

    def _step_triton(self) -> None:
        """Adam's state is made and kept as Adam would, but for its counts of steps."""
        grads = [p.grad for p in self.params.values()]
        states = [self.adam.state[p] if g is not None else {} for p, g in zip(self.params.values(), grads)]
        for p, state in zip(self.params.values(), states):
            if p.grad is not None and not state:
                state.update(step=torch.zeros([], device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        moments = [[state.get(name) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        self.nonfinite = self._kernel.step(grads, *moments)

    def ema(self, std: float) -> dict[str, Tensor]:
        """The running average of σ_rel `std` by parameter name. KeyError if it is not tracked.

        With shards: all processes must ask for it together, and the first one gets it, on its host; the others get {}.
        """
        return self._whole(dict(zip(self.params, self.emas[float(std)])))

    def zero_grad(self) -> None:
        for p in self.all_params.values():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Adam's state and the averages, by reference. With shards as `ema`: that of all, which has nothing of the shards."""
        states = {name: self.adam.state[p] for name, p in self.params.items() if p in self.adam.state}
        for name, steps in zip(self.params, self.steps):
            if name in states:
                states[name]["step"].fill_(steps)
        kinds = {kind: self._whole({name: state[kind] for name, state in states.items()}) for kind in ADAM_STATE}
        group = self.adam.state_dict()["param_groups"][0] | {"params": list(range(len(self.all_params)))}
        state = {i: {kind: kinds[kind][name] for kind in kinds} for i, name in enumerate(self.all_params) if name in kinds["step"]}
        return {"adam": {"state": state, "param_groups": [group]}, "emas": {std: self.ema(std) for std in self.emas}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, of any number of processes. ValueError if it tracks other averages."""
        if set(state["emas"]) != set(self.emas):
            raise ValueError(f"the state holds the averages {sorted(state['emas'])}, not {sorted(self.emas)}")
        places = {name: i for i, name in enumerate(self.all_params)}
        states, group = state["adam"]["state"], state["adam"]["param_groups"][0]
        own = {i: states[places[name]] for i, name in enumerate(self.params) if places[name] in states}
        loaded = {"state": own, "param_groups": [group | {"params": list(range(len(self.params)))}]}
        self.adam.load_state_dict(deepcopy(loaded) if self.nonfinite.device.type == "cpu" else loaded)  # it would share the tensors
        self.steps = [int(self.adam.state[p]["step"]) if p in self.adam.state else 0 for p in self.params.values()]
        for std, averages in self.emas.items():
            for name, average in zip(self.params, averages):
                average.copy_(state["emas"][std][name])

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all processes, in the order of the parameters."""
        if self.shards is None:
            return tensors
        collected = self.shards.collect(tensors)
        return {name: collected[name] for name in self.all_params if name in collected}

    def _sanitize_gradients(self) -> None:
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        self.nonfinite = torch.stack([(g - g).count_nonzero() for g in grads]).sum()  # x − x is NaN unless x is finite
        for grad in grads:
            torch.nan_to_num(grad, nan=0, posinf=0, neginf=0, out=grad)
