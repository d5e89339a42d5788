"""The prepared weights of a network for the length of an optimizer step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from edm2.layers import MPConv
from edm2.network import Precond
from kernels.raw_weight import RawWeight

if find_spec("triton"):
    from kernels.prepared import Member, PreparedWeights
else:
    PreparedWeights = None  # every forward prepares them by autograd


BUCKET = 2**25  # gradients that processes sum at a time: 134 MB

StartSum = Callable[[Tensor], Any]  # begins to sum a tensor over the processes, and returns what can `wait()` for it


class StepWeights:
    """Prepares all weights of `net` once per optimizer step, however many rounds of images it takes.

    Within `prepared()`, forward and backward use the prepared weights, and the raw ones have no part in autograd;
    `project()` then gives these their `.grad`. An `EDM2Optimizer` that is told of it prepares most weights itself.
    In buckets of at most `bucket` numbers, the gradients of some layers can be summed over processes while others' are made.
    """

    def __init__(self, net: Precond, bucket: int | None = None):
        self.net = net
        self._sets: list[PreparedWeights] = []
        self._start_sum: StartSum | None = None
        self._works: list[Any] = []
        if PreparedWeights is not None:
            places, groups = zip(*weight_groups(net, net.compute_dtype(net.device)))
            parts = _buckets(groups, bucket)
            self._sets = [PreparedWeights([groups[i] for i in part]) for part in parts]
            self._places = [places[i] for part in parts for i in part]
            if bucket is not None:
                self._watch()
        prepared = {raw for members in self._sets for raw in members.raw()}
        self._others = [p for p in net.parameters() if p.requires_grad and p not in prepared]
        self._missing = [len(prepared.weights) for prepared in self._sets]  # gradients of this step; −1: projected

    @contextmanager
    def prepared(self) -> Iterator[None]:
        if not self._sets:
            yield
            return
        for prepared in self._sets:
            prepared.prepare()
        self._attach([weight for prepared in self._sets for weight in prepared.weights])
        try:
            yield
        finally:  # the raw weights are about to change
            self._attach([None] * len(self._places))

    @contextmanager
    def summing(self, start_sum: StartSum) -> Iterator[None]:
        """Within it, the last backward of a step projects each bucket and begins to sum it as soon as its gradients are there."""
        self._start_sum = start_sum
        try:
            yield
        finally:
            self._start_sum = None

    def project(self, start_sum: StartSum | None = None) -> None:
        """Turn the gradients of the prepared weights into those of the parameters, replacing what was there; wait for sums."""
        for i, prepared in enumerate(self._sets):
            if self._missing[i] >= 0:
                self._project(i, start_sum)
            self._missing[i] = len(prepared.weights)
        if start_sum is not None:
            self._works += [start_sum(p.grad) for p in self._others if p.grad is not None]
        for work in self._works:
            work.wait()
        self._works = []

    def gradients(self) -> list[Tensor]:
        """All gradients, in as few tensors as they lie in."""
        return [*(prepared.gradients for prepared in self._sets), *(p.grad for p in self._others if p.grad is not None)]

    def targets(self) -> "dict[Tensor, Member]":
        """What the optimizer can prepare, by parameter."""
        return {raw: member for prepared in self._sets for raw, member in prepared.targets().items()}

    def _project(self, i: int, start_sum: StartSum | None) -> None:
        self._sets[i].project()
        self._missing[i] = -1
        if start_sum is not None:
            self._works.append(start_sum(self._sets[i].gradients))

    def _watch(self) -> None:
        """Have autograd tell of each gradient."""
        for i, prepared in enumerate(self._sets):
            for weight in prepared.weights:
                weight.master.register_post_accumulate_grad_hook(partial(self._arrived, i))

    def _arrived(self, i: int, _: Tensor) -> None:
        if self._start_sum is not None:
            self._missing[i] -= 1
            if self._missing[i] == 0:
                self._project(i, self._start_sum)

    def _attach(self, weights: list) -> None:
        for (module, attribute), weight in zip(self._places, weights):
            setattr(module, attribute, weight)


def _buckets(groups: Sequence[Sequence[RawWeight]], size: int | None) -> list[list[int]]:
    """Their numbers, in parts of at most `size` elements (or one group): neighbours, whose gradients come at nearly one time;
    linear ones, whose gradients come last, apart."""
    if size is None:
        return [list(range(len(groups)))]
    parts: list[list[int]] = []
    for last in (False, True):
        held = None
        for i, group in enumerate(groups):
            if (group[0].weight.ndim == 2) == last:
                elements = sum(raw.weight.numel() for raw in group)
                if held is None or held + elements > size:
                    parts.append([])
                    held = 0
                parts[-1].append(i)
                held += elements
    return parts


def weight_groups(net: Precond, compute: torch.dtype) -> Iterator[tuple[tuple[nn.Module, str], list[RawWeight]]]:
    """Where each prepared weight goes, and what it is made of; those of convolutions are of the type `compute`."""
    unet = net.unet
    blocks = unet.blocks()
    together = {block.emb_linear for block in blocks}
    for module in net.modules():
        if isinstance(module, MPConv) and module not in together:
            dtype = compute if module.weight.ndim == 4 else torch.float32
            last = module is unet.out_conv
            gain = unet.out_gain if last else None
            yield (module, "prepared"), [RawWeight(module.weight, dtype, gain, module.heads, module.up, module.factors, padded=last)]
    yield (unet, "prepared_modulation"), [RawWeight(b.emb_linear.weight, torch.float32, b.emb_gain) for b in blocks]
