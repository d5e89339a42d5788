"""3×3 and 1×1 convolutions with what follows them.

The meaning of each op is in `kernels.reference`, the kernels in `kernels.implicit_gemm` and `kernels.wgrad`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import conv_triton, eager
from kernels.conv_forms import (
    check_conv,
    check_modulation,
    check_residual,
    check_sources,
    doubled,
    flops,
    like,
    output,
    refuses,
    refuses_sources,
    refuses_t,
    saves_for,
)
from kernels.eager import gradient_like
from kernels.registration import register, register_derivative
from kernels.weight import Weight, split_gradient


def conv(x: Tensor, w: Weight) -> Tensor:
    """3×3 or 1×1 convolution, stride 1, zero padding: x `[N, H, W, Cin]`, w `[9 or 1, Cout, Cin]` → `[N, H, W, Cout]`.

    x may have more channels, of zeros: these have no weight.
    """
    w, master = check_conv(x, w, more=True)
    return _conv(x, w, master)


def conv_silu(x: Tensor, w: Weight, m: Tensor) -> Tensor:
    """MP-SiLU of the convolution modulated per image and channel by m `[N, Cout]`."""
    w, master = check_conv(x, w)
    check_modulation(m, x, w)
    return _conv_silu(x, w, master, m, saves_for(x, w, master, m))[0]


def conv_silu_up(x: Tensor, w: Weight, m: Tensor) -> Tensor:
    """`conv_silu` behind nearest-neighbour doubling: x `[N, H, W, Cin]`, w `[16, Cout, Cin]` → `[N, 2H, 2W, Cout]`.

    As four convolutions of x with 2×2 taps each, one for every second pixel of every second row: w is
    `mp_weight(…, up=True)`, whose taps are sums of those of the 3×3.
    """
    w, master = check_conv(x, w, "w", (16,))
    check_modulation(m, x, w)
    return _conv_silu_up(x, w, master, m, saves_for(x, w, master, m))[0]


def conv_sum(x: Tensor, w: Weight, residual: Tensor, t: float, clip: float | None = None) -> Tensor:
    """MP-Sum of `residual` `[N, H, W, Cout]` (weight ∝ 1−t) and the convolution of x (weight ∝ t), then clip.

    Where the output is at the clip, the gradient is 0.
    """
    w, master = check_conv(x, w)
    check_residual(residual, x, w)
    return _conv_sum(x, w, master, residual, t, clip)


def conv_cat_sum(x: Tensor, w: Weight, a: Tensor, b: Tensor, w_skip: Weight, clip: float | None = None) -> Tensor:
    """The convolution of x plus the 1×1 convolution `w_skip` `[1, Cout, Ca+Cb]` of a and b, one after the other, then clip.

    The weights come with the factors of MP-Sum and MP-Cat: see `kernels.reference.joined_factors`.
    """
    w, master = check_conv(x, w)
    w_skip, master_skip = check_sources(a, b, w_skip, x, w)
    return _conv_cat_sum(x, w, master, a, b, w_skip, master_skip, clip)


_conv = register("conv", eager.conv, output, conv_triton.conv, lambda x, w, *_: flops(x, w))
_conv_backward = register(
    "conv_backward", eager.conv_backward,
    lambda g, x, w, with_dx=True: (torch.empty_like(x) if with_dx else x.new_empty(0), gradient_like(w)),
    conv_triton.conv_backward, lambda g, x, w, with_dx=True: (1 + with_dx) * flops(x, w),
)  # fmt: skip
_conv_silu = register(
    "conv_silu", eager.conv_silu,
    lambda x, w, master, m, saves: (output(x, w), output(x, w) if saves else x.new_empty(0)),
    conv_triton.conv_silu, lambda x, w, *_: flops(x, w), lambda *args: refuses(args, 1),
)  # fmt: skip
_conv_silu_backward = register(
    "conv_silu_backward", eager.conv_silu_backward,
    lambda g, x, w, m, u: (torch.empty_like(x), gradient_like(w), *like(m)),
    conv_triton.conv_silu_backward, lambda g, x, w, *_: 2 * flops(x, w), lambda *args: refuses(args, 2),
)  # fmt: skip
_conv_silu_up = register(
    "conv_silu_up", eager.conv_silu_up,
    lambda x, w, master, m, saves: (doubled(x, w.shape[1]), doubled(x, w.shape[1]) if saves else x.new_empty(0)),
    conv_triton.conv_silu_up, lambda x, w, *_: flops(x, w), lambda *args: refuses(args, 1),
)  # fmt: skip
_conv_silu_up_backward = register(
    "conv_silu_up_backward", eager.conv_silu_up_backward,
    lambda g, x, w, m, u: (torch.empty_like(x), gradient_like(w), *like(m)),
    conv_triton.conv_silu_up_backward, lambda g, x, w, *_: 2 * flops(x, w), lambda *args: refuses(args, 2),
)  # fmt: skip
_conv_sum = register(
    "conv_sum", eager.conv_sum, output, conv_triton.conv_sum,
    lambda x, w, *_: flops(x, w), lambda *args: refuses(args, 1),
)  # fmt: skip
_conv_sum_backward = register(
    "conv_sum_backward", eager.conv_sum_backward,
    lambda g, x, w, *_: (torch.empty_like(x), gradient_like(w), *like(g)),
    conv_triton.conv_sum_backward, lambda g, x, w, *_: 2 * flops(x, w),
    lambda *args: refuses(args, 2) or refuses_t(args[4]),
)  # fmt: skip
_conv_cat_sum = register(
    "conv_cat_sum", eager.conv_cat_sum, output, conv_triton.conv_cat_sum,
    lambda x, w, _, a, b, w_skip, *__: flops(x, w, w_skip),
    lambda *args: refuses(args, 1, 5) or refuses_sources(*args[3:5]),
)  # fmt: skip
_conv_cat_sum_backward = register(
    "conv_cat_sum_backward", eager.conv_cat_sum_backward,
    lambda g, x, w, a, b, w_skip, *_: (torch.empty_like(x), gradient_like(w), *like(a, b), gradient_like(w_skip)),
    conv_triton.conv_cat_sum_backward, lambda g, x, w, a, b, w_skip, *_: 2 * flops(x, w, w_skip),
    lambda *args: refuses(args, 2, 5) or refuses_sources(*args[3:5]),
)  # fmt: skip
def _save_conv(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master = inputs
    ctx.save_for_backward(x, w)


def _conv_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    with_dx = ctx.needs_input_grad[0]  # not for images
    dx, dw = _conv_backward(g.contiguous(), *ctx.saved_tensors, with_dx)
    return dx if with_dx else None, *split_gradient(dw, ctx.master)


def _save_conv_silu(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, w, ctx.master, m, _ = inputs
    ctx.save_for_backward(x, w, m, output[1])


def _conv_silu_autograd(backward: Any, ctx: FunctionCtx, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None, None
    dx, dw, dm = backward(g.contiguous(), *ctx.saved_tensors)
    return dx, *split_gradient(dw, ctx.master), dm, None


def _save_conv_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, _, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(x, w, None if ctx.clip is None else output)


def _conv_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, dresidual = _conv_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip)
    return dx, *split_gradient(dw, ctx.master), dresidual, None, None


def _save_conv_cat_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, a, b, w_skip, ctx.master_skip, ctx.clip = inputs
    ctx.save_for_backward(x, w, a, b, w_skip, None if ctx.clip is None else output)


def _conv_cat_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    grads = _conv_cat_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.clip)
    dx, dw, da, db, dw_skip = grads
    return dx, *split_gradient(dw, ctx.master), da, db, *split_gradient(dw_skip, ctx.master_skip), None


register_derivative(_conv, _save_conv, _conv_autograd)
register_derivative(_conv_silu, _save_conv_silu, partial(_conv_silu_autograd, _conv_silu_backward))
register_derivative(_conv_silu_up, _save_conv_silu, partial(_conv_silu_autograd, _conv_silu_up_backward))
register_derivative(_conv_sum, _save_conv_sum, _conv_sum_autograd)
register_derivative(_conv_cat_sum, _save_conv_cat_sum, _conv_cat_sum_autograd)
