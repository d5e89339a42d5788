"""3×3 and 1×1 convolutions with what follows them. No kernels yet: every device takes the library's.

The meaning of each op is in `kernels.reference`. P is N·H·W.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_activation, check_like, check_shape, check_weight
from kernels.registration import register
from kernels.weight import Weight, split_gradient, unpack


def conv(x: Tensor, w: Weight) -> Tensor:
    """3×3 or 1×1 convolution, stride 1, zero padding: x `[N, H, W, Cin]`, w `[9 or 1, Cout, Cin]` → `[N, H, W, Cout]`."""
    w, master = _check(x, w)
    return _conv(x, w, master)


def conv_silu(x: Tensor, w: Weight, m: Tensor) -> Tensor:
    """MP-SiLU of the convolution modulated per image and channel by m `[N, Cout]`."""
    w, master = _check(x, w)
    check_shape("m", m, (x.shape[0], w.shape[1]))
    check_like("m", m, "x", x)
    return _conv_silu(x, w, master, m)[0]


def conv_sum(x: Tensor, w: Weight, residual: Tensor, t: float, clip: float | None = None) -> Tensor:
    """MP-Sum of `residual` `[N, H, W, Cout]` (weight ∝ 1−t) and the convolution of x (weight ∝ t), then clip.

    Where the output is at the clip, the gradient is 0.
    """
    w, master = _check(x, w)
    check_activation("residual", residual)
    check_shape("residual", residual, (*x.shape[:3], w.shape[1]))
    check_like("residual", residual, "x", x)
    return _conv_sum(x, w, master, residual, t, clip)


def conv_cat_sum(
    x: Tensor, w: Weight, a: Tensor, b: Tensor, w_skip: Weight, cat_t: float, t: float, clip: float | None = None
) -> Tensor:
    """`conv_sum` whose residual is the 1×1 convolution `w_skip` `[1, Cout, Ca+Cb]` of the MP-Cat of a and b."""
    w, master = _check(x, w)
    w_skip, master_skip = unpack(w_skip)
    for name, source in (("a", a), ("b", b)):
        check_activation(name, source)
        check_shape(name, source, (*x.shape[:3], source.shape[3]))
        check_like(name, source, "x", x)
    check_shape("w_skip", w_skip, (1, w.shape[1], a.shape[3] + b.shape[3]))
    check_like("w_skip", w_skip, "x", x)
    return _conv_cat_sum(x, w, master, a, b, w_skip, master_skip, cat_t, t, clip)


def _check(x: Tensor, w: Weight) -> tuple[Tensor, Tensor | None]:
    w, master = unpack(w)
    check_activation("x", x)
    check_weight("w", w, "x", x)
    return w, master


def _output(x: Tensor, w: Tensor, *_: Tensor | float | None) -> Tensor:
    return x.new_empty(*x.shape[:3], w.shape[1])


def _gradient(w: Tensor) -> Tensor:
    """Of a weight: fp32 at least."""
    return w.new_empty(w.shape, dtype=eager.wide(w.dtype))


def _flops(x: tuple[int, ...], w: tuple[int, ...], *_: tuple[int, ...] | float | None) -> int:
    return 2 * x[0] * x[1] * x[2] * w[0] * w[1] * w[2]


_conv = register("conv", eager.conv, _output, flops=_flops)
_conv_backward = register(
    "conv_backward",
    eager.conv_backward,
    lambda g, x, w: (torch.empty_like(x), _gradient(w)),
    flops=lambda g, x, w: 2 * _flops(x, w),
)
_conv_silu = register("conv_silu", eager.conv_silu, lambda x, w, *_: (_output(x, w), _output(x, w)), flops=_flops)
_conv_silu_backward = register(
    "conv_silu_backward",
    eager.conv_silu_backward,
    lambda g, x, w, m, u: (torch.empty_like(x), _gradient(w), m.new_empty(m.shape)),
    flops=lambda g, x, w, m, u: 2 * _flops(x, w),
)
_conv_sum = register("conv_sum", eager.conv_sum, _output, flops=_flops)
_conv_sum_backward = register(
    "conv_sum_backward",
    eager.conv_sum_backward,
    lambda g, x, w, *_: (torch.empty_like(x), _gradient(w), torch.empty_like(g)),
    flops=lambda g, x, w, *_: 2 * _flops(x, w),
)
_conv_cat_sum = register(
    "conv_cat_sum",
    eager.conv_cat_sum,
    _output,
    flops=lambda x, w, _, a, b, w_skip, *__: _flops(x, w) + _flops(x, w_skip),
)
_conv_cat_sum_backward = register(
    "conv_cat_sum_backward",
    eager.conv_cat_sum_backward,
    lambda g, x, w, a, b, w_skip, *_: (
        torch.empty_like(x), _gradient(w), torch.empty_like(a), torch.empty_like(b), _gradient(w_skip),
    ),
    flops=lambda g, x, w, a, b, w_skip, *_: 2 * (_flops(x, w) + _flops(x, w_skip)),
)  # fmt: skip


def _save_conv(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master = inputs
    ctx.save_for_backward(x, w)


def _conv_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = _conv_backward(g.contiguous(), *ctx.saved_tensors)
    return dx, *split_gradient(dw, ctx.master)


def _save_conv_silu(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # u is saved, nobody differentiates it: no zeros of its size
    x, w, ctx.master, m = inputs
    ctx.save_for_backward(x, w, m, output[1])


def _conv_silu_autograd(ctx: FunctionCtx, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None, None
    dx, dw, dm = _conv_silu_backward(g.contiguous(), *ctx.saved_tensors)
    return dx, *split_gradient(dw, ctx.master), dm


def _save_conv_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, _, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(x, w, None if ctx.clip is None else output)


def _conv_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, dresidual = _conv_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip)
    return dx, *split_gradient(dw, ctx.master), dresidual, None, None


def _save_conv_cat_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, a, b, w_skip, ctx.master_skip, ctx.cat_t, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(x, w, a, b, w_skip, None if ctx.clip is None else output)


def _conv_cat_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    grads = _conv_cat_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.cat_t, ctx.t, ctx.clip)
    dx, dw, da, db, dw_skip = grads
    return dx, *split_gradient(dw, ctx.master), da, db, *split_gradient(dw_skip, ctx.master_skip), None, None, None


_conv.register_autograd(_conv_autograd, setup_context=_save_conv)
_conv_silu.register_autograd(_conv_silu_autograd, setup_context=_save_conv_silu)
_conv_sum.register_autograd(_conv_sum_autograd, setup_context=_save_conv_sum)
_conv_cat_sum.register_autograd(_conv_cat_sum_autograd, setup_context=_save_conv_cat_sum)
