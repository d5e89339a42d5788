"""Whole residual branches in eager PyTorch, of the ops of `kernels.eager`, with what those need for their derivatives."""

import torch
from torch import Tensor

from kernels import eager, reference


def saved(saves: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What the backward needs, or nothing in its place."""
    return tensors if saves else tuple(x.new_empty(0) for x in tensors)


def activated(y: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """y and MP-SiLU(scale·y), for a reader that wants it."""
    return y, y.new_empty(0) if scale is None else eager.mp_silu(y, scale)


def residual_branch_norm(
    x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, down: bool, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Also MP-SiLU(activate·y), and, if it `saves` them, n, the normalised x, its MP-SiLU s, the rms, v, the activated
    result of the first convolution, and its u."""
    n, s, rms = eager.pixel_norm_silu(x, down)
    v, u = eager.conv_silu(s, w0, None, m, saves)
    return *activated(eager.conv_sum(v, w1, None, n, t, clip), activate), *saved(saves, n, s, rms, v, u)


def residual_branch_norm_backward(
    g: Tensor, w0: Tensor, m: Tensor, w1: Tensor, n: Tensor, s: Tensor, rms: Tensor, v: Tensor, u: Tensor,
    t: float, down: bool, other: Tensor | None = None, x: Tensor | None = None, clip_x: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x, w0, m and w1. `other` is the gradient of x from another reader; x is wanted with a clip only."""
    dv, dw1, _ = eager.conv_sum_backward(g, v, w1, None, t, None)
    ds, dw0, dm = eager.conv_silu_backward(dv, s, w0, m, u)
    return eager.pixel_norm_silu_backward(g, ds, n, rms, down, eager.sum_scales(t)[0], other, x, clip_x), dw0, dm, dw1


def residual_branch_silu(
    x: Tensor, s: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """s is MP-SiLU(x). Also MP-SiLU(activate·y), and v and u, if it `saves` them."""
    v, u = eager.conv_silu(s, w0, None, m, saves)
    return *activated(eager.conv_sum(v, w1, None, x, t, clip), activate), *saved(saves, v, u)


def residual_branch_silu_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x, w0, m and w1."""
    dv, dw1, dx = eager.conv_sum_backward(g, v, w1, None, t, None)
    ds, dw0, dm = eager.conv_silu_backward(dv, s, w0, m, u)
    return eager.clip_backward(dx.add_(eager.mp_silu_backward(ds, x)), x, clip_x), dw0, dm, dw1


def residual_branch_up(
    x: Tensor, s: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """s is MP-SiLU(x). Also MP-SiLU(activate·y), and v and u, if it `saves` them."""
    v, u = eager.conv_silu_up(s, w0, None, m, saves)
    y = eager.conv_sum(v, w1, None, reference.resample(x, (1, 1), "up"), t, clip)
    return *activated(y, activate), *saved(saves, v, u)


def residual_branch_up_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x, w0, m and w1."""
    dv, dw1, dresidual = eager.conv_sum_backward(g, v, w1, None, t, None)
    ds, dw0, dm = eager.conv_silu_up_backward(dv, s, w0, m, u)
    return eager.clip_backward(_sum_2x2(dresidual).add_(eager.mp_silu_backward(ds, x)), x, clip_x), dw0, dm, dw1


def _sum_2x2(x: Tensor) -> Tensor:
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).sum((2, 4))


def residual_branch_cat(
    a: Tensor, b: Tensor, s_a: Tensor, s_b: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor,
    master1: Tensor | None, w_skip: Tensor, master_skip: Tensor | None, cat_t: float, clip: float | None, clip_a: float | None,
    activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """s_a and s_b are MP-SiLU of MP-Cat(a, b). Also MP-SiLU(activate·y), and v and u, if it `saves` them."""
    v, u = eager.conv_silu(torch.cat([s_a, s_b], dim=3), w0, None, m, saves)
    y = eager.conv_cat_sum(v, w1, None, a, b, w_skip, None, clip)
    return *activated(y, activate), *saved(saves, v, u)


def residual_branch_cat_backward(
    g: Tensor, a: Tensor, b: Tensor, w0: Tensor, m: Tensor, w1: Tensor, w_skip: Tensor, s_a: Tensor, s_b: Tensor, v: Tensor,
    u: Tensor, cat_t: float, clip_a: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of a, b, w0, m, w1 and w_skip."""
    dv, dw1, da, db, dw_skip = eager.conv_cat_sum_backward(g, v, w1, a, b, w_skip, None, None)
    ds, dw0, dm = eager.conv_silu_backward(dv, torch.cat([s_a, s_b], dim=3), w0, m, u)
    da_silu, db_silu = eager.cat_silu_backward(ds, a, b, cat_t)
    return eager.clip_backward(da.add_(da_silu), a, clip_a), db.add_(db_silu), dw0, dm, dw1, dw_skip


def attention_branch(
    x: Tensor, w_qkv: Tensor, master_qkv: Tensor | None, w_proj: Tensor, master_proj: Tensor | None,
    heads: int, t: float, clip: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Also MP-SiLU(activate·y), and qkv, the result of the attention and the logarithms of its sums, if it `saves` them."""
    qkv = eager.conv(x, w_qkv)
    v, lse = eager.cosine_attention(qkv, heads)
    y = eager.conv_sum(v, w_proj, None, x, t, clip)
    return *activated(y, activate), *saved(saves, qkv, v, lse)


def attention_branch_backward(
    g: Tensor, x: Tensor, w_qkv: Tensor, w_proj: Tensor, qkv: Tensor, v: Tensor, lse: Tensor, heads: int, t: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x, w_qkv and w_proj."""
    dv, dw_proj, dresidual = eager.conv_sum_backward(g, v, w_proj, None, t, None)
    dx, dw_qkv = eager.conv_backward(eager.cosine_attention_backward(dv, qkv, v, lse, heads), x, w_qkv)
    return dx.add_(dresidual), dw_qkv, dw_proj
