"""Matrix product with a prepared weight. M rows."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_weight
from kernels.registration import register
from kernels.weight import Weight, split_gradient, unpack


def linear(x: Tensor, w: Weight) -> Tensor:
    """`x @ w[0].T`: x `[..., Cin]`, w `[1, Cout, Cin]` → `[..., Cout]`."""
    w, master = unpack(w)
    check_weight("w", w, "x", x, taps=(1,))
    return _linear(x, w, master)


def _fake(x: Tensor, w: Tensor, master: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1])


def _fake_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), w.new_empty(w.shape, dtype=eager.wide(w.dtype))


def _flops(x: tuple[int, ...], w: tuple[int, ...], master: tuple[int, ...] | None = None) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * w[1] * w[2]


_linear = register("linear", eager.linear, _fake, flops=_flops)
_linear_backward = register(
    "linear_backward", eager.linear_backward, _fake_backward, flops=lambda g, x, w: 2 * _flops(x, w)
)


def _save(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master = inputs
    ctx.save_for_backward(x, w)


def _autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = _linear_backward(g.contiguous(), *ctx.saved_tensors)
    return dx, *split_gradient(dw, ctx.master)


_linear.register_autograd(_autograd, setup_context=_save)
