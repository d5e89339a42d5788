"""Whole residual branches: two convolutions, or attention between two, with what is before, between and after them.

As one op each, because its pointwise derivatives then are parts of convolutions. The gradient of every branch passes its
clip: whoever reads the result stops it (`kernels.fork`, `clip_x`, `clip_a`), and is spared a pass over it. A branch can also
return its result activated, MP-SiLU(activate·y), for the next to take: that is a number only, without a gradient.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import attention, branches_eager, branches_triton, pixel_norm
from kernels.branches_eager import saved
from kernels.checks import check_even, check_heads, check_like, check_shape, check_weight
from kernels.conv_forms import (
    check_conv,
    check_modulation,
    check_sources,
    doubled,
    flops,
    like,
    output,
    refuses,
    refuses_sources,
    saves_for,
)
from kernels.eager import gradient_like, wide
from kernels.fork import fork_backward
from kernels.pointwise import mp_silu
from kernels.reference import Branch, cat_scales
from kernels.registration import register, register_derivative
from kernels.weight import Weight, split_gradient, unpack


def residual_branch_norm(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, down: bool = False,
    activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_sum` of `conv_silu` behind `pixel_norm_silu` (or `down_…`): a block of the encoder, x `[N, H, W, C]`."""
    (w0, master0), (w1, master1) = _check_norm(x, w0, m, w1, down)
    saves = saves_for(x, w0, master0, m, w1, master1)
    return _result(_residual_branch_norm(x, w0, master0, m, w1, master1, t, clip, down, activate, saves), activate)


def residual_branch_norm_fork(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, down: bool = False,
    clip_x: float | None = None, activate: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`residual_branch_norm`, and x for another reader, like `fork(x, clip_x)`, whose sum of gradients costs no pass over them."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        y = residual_branch_norm(x, w0, m, w1, t, clip, down, activate)
        return (y, x.detach()) if activate is None else (*y, x.detach())
    (w0, master0), (w1, master1) = _check_norm(x, w0, m, w1, down)
    y, s, x = _NormFork.apply(x, w0, master0, m, w1, master1, t, clip, down, activate, clip_x)
    return (y, x) if activate is None else (y, s, x)


def residual_branch_silu(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, clip_x: float | None = None,
    s: Tensor | None = None, activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_sum` of x and `conv_silu` of s, MP-SiLU(x), x's gradient stopped at `clip_x`: a block of the decoder without a skip."""
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1)
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    saves = saves_for(x, w0, master0, m, w1, master1)
    weights = w0, master0, m, w1, master1
    return _result(_residual_branch_silu(x, _activated("s", s, x), *weights, t, clip, clip_x, activate, saves), activate)


def residual_branch_up(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, clip_x: float | None = None,
    s: Tensor | None = None, activate: float | None = None,
) -> Branch:  # fmt: skip
    """`residual_branch_silu` behind nearest-neighbour doubling of x `[N, H, W, C]`, without a doubled x: see `conv_silu_up`."""
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1, (16,))
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    saves = saves_for(x, w0, master0, m, w1, master1)
    weights = w0, master0, m, w1, master1
    return _result(_residual_branch_up(x, _activated("s", s, x), *weights, t, clip, clip_x, activate, saves), activate)


def residual_branch_cat(
    a: Tensor, b: Tensor, w0: Weight, m: Tensor, w1: Weight, w_skip: Weight, cat_t: float,
    clip: float | None = None, clip_a: float | None = None, s_a: Tensor | None = None, s_b: Tensor | None = None,
    activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_cat_sum` of `conv_silu` of `cat_silu`, a's gradient stopped at `clip_a`: a block of the decoder with a skip.

    No tensor is concatenated: s_a and s_b are MP-SiLU of the two parts of MP-Cat(a, b).
    w1 and w_skip come with the factors of MP-Sum and MP-Cat: see `kernels.reference.joined_factors`.
    """
    (w0, master0), (w1, master1) = unpack(w0), unpack(w1)
    w_skip, master_skip = check_sources(a, b, w_skip, a, w1)
    check_shape("w0", w0, (*w0.shape[:2], a.shape[3] + b.shape[3]))
    check_weight("w0", w0, "w_skip", w_skip)
    check_weight("w1", w1, "w0", w0.mT)
    check_modulation(m, a, w0)
    saves = saves_for(a, b, w0, master0, m, w1, master1, w_skip, master_skip)
    weights = w0, master0, m, w1, master1, w_skip, master_skip
    scale_a, scale_b = cat_scales(a.shape[3], b.shape[3], cat_t)
    s_a, s_b = _activated("s_a", s_a, a, scale_a), _activated("s_b", s_b, b, scale_b)
    return _result(_residual_branch_cat(a, b, s_a, s_b, *weights, cat_t, clip, clip_a, activate, saves), activate)


def attention_branch(
    x: Tensor, w_qkv: Weight, w_proj: Weight, heads: int, t: float, clip: float | None = None, activate: float | None = None
) -> Branch:
    """`conv_sum` of x with cosine attention between two 1×1 convolutions of it: w_qkv's rows are (head, q|k|v, D)."""
    w_qkv, master_qkv = check_conv(x, w_qkv, "w_qkv")
    w_proj, master_proj = unpack(w_proj)
    channels = x.shape[3]
    check_heads("w_qkv", w_qkv.shape[1], heads)
    check_shape("w_qkv", w_qkv, (1, 3 * channels, channels))
    check_shape("w_proj", w_proj, (1, channels, channels))
    check_like("w_proj", w_proj, "x", x)
    saves = saves_for(x, w_qkv, master_qkv, w_proj, master_proj)
    outputs = _attention_branch(x, w_qkv, master_qkv, w_proj, master_proj, heads, t, clip, activate, saves)
    return _result(outputs, activate)


def _result(outputs: Sequence[Tensor], activate: float | None) -> Branch:
    y, s, *_ = outputs
    return y if activate is None else (y, s.detach())


def _activated(name: str, s: Tensor | None, x: Tensor, scale: float = 1.0) -> Tensor:
    """The activated x that was given, which autograd does not look at: x's gradient is complete without."""
    if s is None:
        return mp_silu(x.detach(), scale)
    check_shape(name, s, x.shape)
    check_like(name, s, "x", x)
    return s.detach()


def flops_up(x: tuple[int, ...], w0: tuple[int, ...], w1: tuple[int, ...]) -> int:
    return flops(x, w0) + 4 * flops(x, w1)


def _check_branch(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, taps: tuple[int, ...] = (1, 9)
) -> tuple[tuple[Tensor, Tensor | None], ...]:
    w0, master0 = check_conv(x, w0, "w0", taps)
    check_modulation(m, x, w0)
    w1, master1 = unpack(w1)
    check_weight("w1", w1, "w0", w0.mT)
    return (w0, master0), (w1, master1)


def _check_norm(x: Tensor, w0: Weight, m: Tensor, w1: Weight, down: bool) -> tuple[tuple[Tensor, Tensor | None], ...]:
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1)
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    if down:
        check_even("x", x)
    return (w0, master0), (w1, master1)


_residual_branch_norm = register(
    "residual_branch_norm", branches_eager.residual_branch_norm,
    lambda x, w0, master0, m, w1, master1, t, clip, down, activate, saves: _norm_outputs(x, w0, w1, down, activate, saves),
    branches_triton.residual_branch_norm,
    lambda x, w0, master0, m, w1, master1, t, clip, down, *_: flops(x, w0, w1) // (4 if down else 1),
    lambda *args: refuses(args, 1, 4) or pixel_norm.refuses(args[0]),
)  # fmt: skip
_residual_branch_norm_backward = register(
    "residual_branch_norm_backward", branches_eager.residual_branch_norm_backward,
    lambda g, w0, m, w1, n, s, rms, v, u, t, down, *_: (
        doubled(n, n.shape[3]) if down else torch.empty_like(n), gradient_like(w0), *like(m), gradient_like(w1),
    ),
    branches_triton.residual_branch_norm_backward, lambda g, w0, m, w1, *_: 2 * flops(g, w0, w1),
    lambda *args: refuses(args, 1, 3) or pixel_norm.refuses(args[4]),
)  # fmt: skip
_residual_branch_silu = register(
    "residual_branch_silu", branches_eager.residual_branch_silu,
    lambda x, s, w0, master0, m, w1, *rest: _branch_outputs(output(x, w1), output(x, w0), *rest[-2:]),
    branches_triton.residual_branch_silu, lambda x, s, w0, master0, m, w1, *_: flops(x, w0, w1), lambda *args: refuses(args, 2, 5),
)  # fmt: skip
_residual_branch_silu_backward = register(
    "residual_branch_silu_backward", branches_eager.residual_branch_silu_backward,
    lambda g, x, w0, m, w1, *_: (torch.empty_like(x), gradient_like(w0), *like(m), gradient_like(w1)),
    branches_triton.residual_branch_silu_backward, lambda g, x, w0, m, w1, *_: 2 * flops(x, w0, w1),
    lambda *args: refuses(args, 2, 4),
)  # fmt: skip
_residual_branch_up = register(
    "residual_branch_up", branches_eager.residual_branch_up,
    lambda x, s, w0, master0, m, w1, *rest: _branch_outputs(doubled(x, x.shape[3]), doubled(x, w0.shape[1]), *rest[-2:]),
    branches_triton.residual_branch_up, lambda x, s, w0, master0, m, w1, *_: flops_up(x, w0, w1), lambda *args: refuses(args, 2, 5),
)  # fmt: skip
_residual_branch_up_backward = register(
    "residual_branch_up_backward", branches_eager.residual_branch_up_backward,
    lambda g, x, w0, m, w1, *_: (torch.empty_like(x), gradient_like(w0), *like(m), gradient_like(w1)),
    branches_triton.residual_branch_up_backward, lambda g, x, w0, m, w1, *_: 2 * flops_up(x, w0, w1),
    lambda *args: refuses(args, 2, 4),
)  # fmt: skip
_residual_branch_cat = register(
    "residual_branch_cat", branches_eager.residual_branch_cat,
    lambda a, b, s_a, s_b, w0, master0, m, w1, *rest: _branch_outputs(output(a, w1), output(a, w0), *rest[-2:]),
    branches_triton.residual_branch_cat,
    lambda a, b, s_a, s_b, w0, master0, m, w1, master1, w_skip, *_: flops(a, w0, w1, w_skip),
    lambda *args: refuses(args, 4, 7, 9) or refuses_sources(*args[:2]),
)  # fmt: skip
_residual_branch_cat_backward = register(
    "residual_branch_cat_backward", branches_eager.residual_branch_cat_backward,
    lambda g, a, b, w0, m, w1, w_skip, *_: (*like(a, b), gradient_like(w0), *like(m), gradient_like(w1), gradient_like(w_skip)),
    branches_triton.residual_branch_cat_backward,
    lambda g, a, b, w0, m, w1, w_skip, *_: 2 * flops(a, w0, w1, w_skip),
    lambda *args: refuses(args, 3, 5, 6) or refuses_sources(*args[1:3]),
)  # fmt: skip


_attention_branch = register(
    "attention_branch", branches_eager.attention_branch,
    lambda x, w_qkv, master_qkv, w_proj, master_proj, heads, t, clip, activate, saves: (
        *_activated_output(output(x, w_proj), activate), *_attention_outputs(x, w_qkv, heads, saves),
    ),
    branches_triton.attention_branch,
    lambda x, w_qkv, master_qkv, w_proj, master_proj, heads, *_: _attention_flops(x, w_qkv, w_proj, heads),
    lambda *args: refuses(args, 1, 3) or _refuses_attention(args[0], args[1], args[5]),
)  # fmt: skip
_attention_branch_backward = register(
    "attention_branch_backward", branches_eager.attention_branch_backward,
    lambda g, x, w_qkv, w_proj, *_: (torch.empty_like(x), gradient_like(w_qkv), gradient_like(w_proj)),
    branches_triton.attention_branch_backward,
    lambda g, x, w_qkv, w_proj, qkv, v, lse, heads, t: 2 * _attention_flops(x, w_qkv, w_proj, heads),
    lambda *args: refuses(args, 2, 3) or _refuses_attention(args[1], args[2], args[7]),
)  # fmt: skip


def _attention_outputs(x: Tensor, w_qkv: Tensor, heads: int, saves: bool) -> list[Tensor]:
    """qkv, v and the logarithms of the sums."""
    qkv = output(x, w_qkv)
    return list(saved(saves, qkv, *attention.fake(qkv, heads)))


def _attention_flops(x: tuple[int, ...], w_qkv: tuple[int, ...], w_proj: tuple[int, ...], heads: int) -> int:
    return flops(x, w_qkv, w_proj) + attention.flops((*x[:3], w_qkv[1]), heads)


def _refuses_attention(x: Tensor, w_qkv: Tensor, heads: int) -> str | None:
    return attention.refuses((*x.shape[:3], w_qkv.shape[1]), heads)


def _activated_output(y: Tensor, activate: float | None) -> tuple[Tensor, Tensor]:
    return y, y.new_empty(0) if activate is None else torch.empty_like(y)


def _branch_outputs(y: Tensor, v: Tensor, activate: float | None, saves: bool) -> tuple[Tensor, ...]:
    """y, the activated y, v and u."""
    return *_activated_output(y, activate), *saved(saves, v, torch.empty_like(v))


def _norm_outputs(x: Tensor, w0: Tensor, w1: Tensor, down: bool, activate: float | None, saves: bool) -> tuple[Tensor, ...]:
    """y, the activated y, n, s, rms, v and u."""
    n = x.new_empty(pixel_norm.shape_after(x, down))
    rms = x.new_empty(n.shape[:3], dtype=wide(x.dtype))
    y = _activated_output(output(n, w1), activate)
    return *y, *saved(saves, n, torch.empty_like(n), rms, *(output(n, w0) for _ in range(2)))


def _save_residual_branch_norm(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, w0, ctx.master0, m, w1, ctx.master1, ctx.t, _, ctx.down, *_ = inputs
    ctx.save_for_backward(w0, m, w1, *output[2:])


def _residual_branch_norm_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw0, dm, dw1 = _residual_branch_norm_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.down)
    return dx, *split_gradient(dw0, ctx.master0), dm, *split_gradient(dw1, ctx.master1), *(None,) * 5


class _NormFork(torch.autograd.Function):
    """Not an op of the dispatcher: one of its outputs is its input."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
        t: float, clip: float | None, down: bool, activate: float | None, clip_x: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.masters, ctx.constants, ctx.clip_x = (master0, master1), (t, down), clip_x
        y, s, *saved = _residual_branch_norm(x, w0, master0, m, w1, master1, t, clip, down, activate, True)
        ctx.save_for_backward(w0, m, w1, *saved, None if clip_x is None else x)
        ctx.mark_non_differentiable(s)
        return y, s, x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor | None, _: None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, x = ctx.saved_tensors
        other = other if other is None else other.contiguous()
        if g is None:
            return (other if other is None or x is None else fork_backward(other, None, x, ctx.clip_x), *(None,) * 10)
        dx, dw0, dm, dw1 = _residual_branch_norm_backward(g.contiguous(), *saved, *ctx.constants, other, x, ctx.clip_x)
        dw0, dw1 = (split_gradient(dw, master) for dw, master in zip((dw0, dw1), ctx.masters))
        return dx, *dw0, dm, *dw1, *(None,) * 5


def _save_residual_branch_silu(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, s, w0, ctx.master0, m, w1, ctx.master1, ctx.t, _, ctx.clip_x, *_ = inputs
    ctx.save_for_backward(x, w0, m, w1, s, *output[2:])


def _branch_autograd(backward: Any, ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw0, dm, dw1 = backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip_x)
    return dx, None, *split_gradient(dw0, ctx.master0), dm, *split_gradient(dw1, ctx.master1), *(None,) * 5


def _save_residual_branch_cat(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    a, b, s_a, s_b, w0, ctx.master0, m, w1, ctx.master1, w_skip, ctx.master_skip, cat_t, _, clip_a, *_ = inputs
    ctx.constants = cat_t, clip_a
    ctx.save_for_backward(a, b, w0, m, w1, w_skip, s_a, s_b, *output[2:])


def _residual_branch_cat_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grads = _residual_branch_cat_backward(g.contiguous(), *ctx.saved_tensors, *ctx.constants)
    da, db, dw0, dm, dw1, dw_skip = grads
    dw0, dw1, dw_skip = (split_gradient(*pair) for pair in zip((dw0, dw1, dw_skip), (ctx.master0, ctx.master1, ctx.master_skip)))
    return da, db, None, None, *dw0, dm, *dw1, *dw_skip, *(None,) * 5


def _save_attention_branch(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, w_qkv, ctx.master_qkv, w_proj, ctx.master_proj, ctx.heads, ctx.t, *_ = inputs
    ctx.save_for_backward(x, w_qkv, w_proj, *output[2:])


def _attention_branch_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw_qkv, dw_proj = _attention_branch_backward(g.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.t)
    return dx, *split_gradient(dw_qkv, ctx.master_qkv), *split_gradient(dw_proj, ctx.master_proj), *(None,) * 5


register_derivative(_residual_branch_norm, _save_residual_branch_norm, _residual_branch_norm_autograd)
register_derivative(_residual_branch_cat, _save_residual_branch_cat, _residual_branch_cat_autograd)
register_derivative(_attention_branch, _save_attention_branch, _attention_branch_autograd)
register_derivative(_residual_branch_silu, _save_residual_branch_silu, partial(_branch_autograd, _residual_branch_silu_backward))
register_derivative(_residual_branch_up, _save_residual_branch_silu, partial(_branch_autograd, _residual_branch_up_backward))
