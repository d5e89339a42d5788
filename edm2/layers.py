"""The layers of the network and the normalisation of their weights. Equation numbers: Karras et al. 2024."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import kernels as ops
from kernels.reference import EPS, NO_FACTORS, Factors

if TYPE_CHECKING:
    from kernels.weight import PreparedWeight


class MPFourier(nn.Module):
    """Random Fourier features of unit variance, Eq. 75: `[N]` → fp32 `[N, num_channels]`."""

    def __init__(self, num_channels: int, bandwidth: float = 1.0):
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * torch.randn(num_channels) * bandwidth)
        self.register_buffer("phases", 2 * math.pi * torch.rand(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return ops.mp_fourier(x.float().contiguous(), self.freqs.float(), self.phases.float())


class MPConv(nn.Module):
    """Weight-normalised convolution or (with `kernel=()`) linear layer without bias, Eq. 47 and 66.

    The raw weight `[out, in, *kernel]` is fp32. `forward` never writes to it: see `force_weight_norm_`. `heads` orders
    the rows of a qkv weight; `up`: it convolves behind an up-sampling that its op does; `factors` scale what it gives its op.
    `prepared` is the weight as the ops want it, where `edm2.weights` has made it beforehand.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Sequence[int] = (),
        heads: int = 0,
        up: bool = False,
        factors: Factors = NO_FACTORS,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, *kernel))
        self.heads, self.up, self.factors = heads, up, factors
        self.prepared = None

    def prepare(self, dtype: torch.dtype, gain: Tensor | None = None) -> "Tensor | PreparedWeight":
        """The weight as the ops want it, `[taps, out, in]`: see `kernels.mp_weight`."""
        if self.prepared is not None:
            return self.prepared
        return ops.mp_weight(self.weight, gain, dtype, self.heads, self.up, self.factors)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        op = ops.conv if self.weight.ndim == 4 else ops.linear
        return op(x, self.prepare(x.dtype, gain))


@torch.no_grad()
def force_weight_norm_(net: nn.Module) -> None:
    """Forced normalisation of every weight in place, Eq. 47: each row gets an RMS of (almost) 1.

    For weights that are fresh or foreign (initialisation, import, fine-tuning). The optimizer does it after every
    step. Not idempotent in floating point, hence never on resume.
    """
    normalize_rows_(normalized_weights(net))


@torch.no_grad()
def normalize_rows_(weights: Sequence[Tensor]) -> None:
    """Normalise each row of each weight `[out, …]` in place, all weights in few launches."""
    scales = [torch.linalg.vector_norm(w, dim=tuple(range(1, w.ndim)), keepdim=True) for w in weights]
    torch._foreach_mul_(scales, [1 / math.sqrt(w[0].numel()) for w in weights])
    torch._foreach_add_(scales, EPS)
    torch._foreach_div_(weights, scales)


def normalized_weights(net: nn.Module) -> list[nn.Parameter]:
    """The parameters under forced weight normalisation: those of every `MPConv`."""
    return [module.weight for module in net.modules() if isinstance(module, MPConv)]
