"""Networks for evaluation alone: every weight normalised, scaled, summed, laid out and cast once instead of at each evaluation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels as ops
from edm2.network import Precond
from edm2.weights import weight_groups
from kernels.raw_weight import RawWeight


@torch.no_grad()
def fold(net: Precond, dtype: torch.dtype | None = None) -> Precond:
    """A network that evaluates like `net` in eval mode, bit for bit, on its device, and holds the prepared weights only.

    dtype: its compute dtype, by default that of `net` where it now is: move it to its device first. `net` stays as it is.
    The result has no parameters: it cannot be trained, saved or evaluated in another type. ValueError if `net` is folded
    already, or is something else than a `Precond`.
    """
    if type(net) is not Precond:
        raise ValueError(f"only an edm2.Precond can be folded, not a {type(net).__name__}")
    if net.folded is not None:
        raise ValueError("the network is folded already")
    compute = dtype or net.compute_dtype(net.device)
    with torch.device("meta"):
        folded = Precond(**net.config, dtype=dtype or net.dtype).eval()
    buffers = dict(net.named_buffers())
    for name, module in folded.named_modules():
        for key in list(module._buffers):
            module._buffers[key] = buffers[f"{name}.{key}"].detach().clone()
    places = {id(module): name for name, module in net.named_modules()}
    weights = [(folded.get_submodule(places[id(module)]), attribute, group) for (module, attribute), group in weight_groups(net, compute)]
    for module in folded.modules():
        for key in list(module._parameters):
            shape = module._parameters.pop(key).shape
            setattr(module, key, torch.empty(shape, device="meta"))  # who reads it fails
    for module, attribute, group in weights:
        _hold(module, attribute, prepare(group))
    folded.folded = compute
    return folded


def prepare(group: Sequence[RawWeight]) -> Tensor:
    """One prepared weight, its members one after the other along Cout."""
    w = torch.cat([ops.mp_weight(raw.weight, raw.gain, raw.dtype, raw.heads, raw.up, raw.factors) for raw in group], dim=1)
    return F.pad(w, (0, 0, 0, -w.shape[1] % 8)) if group[0].padded else w


def _hold(module: nn.Module, attribute: str, weight: Tensor) -> None:
    """As a buffer, which moves with the module."""
    delattr(module, attribute)
    module.register_buffer(attribute, weight, persistent=False)
