"""The prepared weights of a network for the length of an optimizer step."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from edm2.layers import MPConv
from edm2.network import Precond
from kernels.raw_weight import RawWeight

if find_spec("triton"):
    from kernels.prepared import Member, PreparedWeights
else:
    PreparedWeights = None  # every forward prepares them by autograd


class StepWeights:
    """Prepares all weights of `net` once per optimizer step, however many rounds of images it takes.

    Within `prepared()`, forward and backward use the prepared weights, and the raw ones have no part in autograd;
    `project()` then gives these their `.grad`. An `EDM2Optimizer` that is told of it prepares most weights itself.
    """

    def __init__(self, net: Precond):
        self.net = net
        self._set = None
        if PreparedWeights is not None:
            self._places, groups = zip(*weight_groups(net, net.compute_dtype(net.device)))
            self._set = PreparedWeights(groups)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        if self._set is None:
            yield
            return
        self._set.prepare()
        self._attach(self._set.weights)
        try:
            yield
        finally:  # the raw weights are about to change
            self._attach([None] * len(self._places))

    def project(self) -> None:
        """Turn the gradients of the prepared weights into those of the parameters, replacing what was there."""
        if self._set is not None:
            self._set.project()

    def gradients(self) -> list[Tensor]:
        """All gradients, in as few tensors as they lie in."""
        return [p.grad for p in self.net.parameters()] if self._set is None else [self._set.gradients]

    def targets(self) -> "dict[Tensor, Member]":
        """What the optimizer can prepare, by parameter."""
        return {} if self._set is None else self._set.targets()

    def _attach(self, weights: list) -> None:
        for (module, attribute), weight in zip(self._places, weights):
            setattr(module, attribute, weight)


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
