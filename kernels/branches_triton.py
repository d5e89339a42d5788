"""Whole residual branches by kernels. Their signatures, outputs and meaning are those of `kernels.branches_eager`.

They leave the clip's derivative to those who read their results.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.attention import cosine_attention_backward_triton, cosine_attention_triton
from kernels.branches_eager import saved
from kernels.conv_triton import conv, conv_silu, dense, rows, skip_backward, sources
from kernels.convolve import Rest, convolve
from kernels.pixel_norm import pixel_norm_silu_backward_triton, pixel_norm_silu_triton
from kernels.pointwise import mp_silu_triton
from kernels.reference import cat_scales, sum_scales
from kernels.sums import Sums
from kernels.wgrad import Product, weight_gradients


def residual_branch_norm(
    x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, down: bool, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, s, rms = pixel_norm_silu_triton(x, down)
    v, u = conv_silu(s, w0, master0, m, saves)
    return *_sum(v, w1, n, t, clip, activate, saves), *saved(saves, n, s, rms, v, u)


def residual_branch_norm_backward(
    g: Tensor, w0: Tensor, m: Tensor, w1: Tensor, n: Tensor, s: Tensor, rms: Tensor, v: Tensor, u: Tensor,
    t: float, down: bool, other: Tensor | None = None, x: Tensor | None = None, clip_x: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scale, scale_conv = sum_scales(t)
    sums = Sums()
    du, dm = _second_backward(g, w1, m, u, scale_conv, sums)
    ds, _ = convolve(du, dense(w0), transposed=True, training=True)
    dw0, dw1 = _weight_gradients([Product(du, s)], w0, Product(g, v, scale_conv), w1, sums)
    sums.run()
    return pixel_norm_silu_backward_triton(g, ds, n, rms, down, scale, other, x, clip_x), dw0, dm, dw1


def residual_branch_silu(
    x: Tensor, s: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    v, u = conv_silu(s, w0, master0, m, saves)
    return *_sum(v, w1, x, t, clip, activate, saves), *saved(saves, v, u)


def residual_branch_silu_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scale, scale_conv = sum_scales(t)
    sums = Sums()
    du, dm = _second_backward(g, w1, m, u, scale_conv, sums)
    dw0, dw1 = _weight_gradients([Product(du, s)], w0, Product(g, v, scale_conv), w1, sums)
    sums.run()
    main = dict(aux=g, scale_aux=scale, act=dense(x), clip=clip_x)
    return convolve(du, dense(w0), "residual_silu_grad", transposed=True, **main, training=True)[0], dw0, dm, dw1


def residual_branch_up(
    x: Tensor, s: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By w0 and the sizes, convolutions up-sample. The activated result in the same epilogue would spill 200 bytes."""
    y, _, *kept = residual_branch_silu(x, s, w0, master0, m, w1, master1, t, clip, clip_x, None, saves)
    return y, y.new_empty(0) if activate is None else mp_silu_triton(y, activate), *kept


def residual_branch_up_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return residual_branch_silu_backward(g, x, w0, m, w1, s, v, u, t, clip_x)


def residual_branch_cat(
    a: Tensor, b: Tensor, s_a: Tensor, s_b: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor,
    master1: Tensor | None, w_skip: Tensor, master_skip: Tensor | None, cat_t: float, clip: float | None, clip_a: float | None,
    activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    first, second = sources(s_a, s_b, w0)
    v, u = convolve(*first, "silu", sources=[second], m=rows(m), with_extra=saves, split=not saves)
    y, extra = convolve(dense(v), dense(w1), sources=sources(a, b, w_skip), clip=clip, **_activation(activate), split=not saves)
    return y, _or_nothing(extra, y), *saved(saves, v, _or_nothing(u, v))


def residual_branch_cat_backward(
    g: Tensor, a: Tensor, b: Tensor, w0: Tensor, m: Tensor, w1: Tensor, w_skip: Tensor, s_a: Tensor, s_b: Tensor, v: Tensor,
    u: Tensor, cat_t: float, clip_a: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of each source: through its part of w_skip, then with that through its part of w0."""
    sums = Sums()
    da, db, dw_skip = skip_backward(g, a, b, w_skip, sums)
    du, dm = _second_backward(g, w1, m, u, 1.0, sums)
    channels = [a.shape[3], b.shape[3]]
    scale_a, scale_b = cat_scales(*channels, cat_t)
    main = dict(aux=da, scale_aux=1.0, act=dense(a), scale_act=scale_a, clip=clip_a)
    rest = Rest(channels[1], db, dense(b), scale_b)
    da, db = convolve(du, dense(w0), "residual_silu_grad", transposed=True, **main, rest=rest, training=True)
    products = [Product(du, dense(s_a)), Product(du, dense(s_b))]
    dw0, dw1 = _weight_gradients(products, w0, Product(g, v), w1, sums)
    sums.run()
    return da, db, dw0, dm, dw1, dw_skip


def attention_branch(
    x: Tensor, w_qkv: Tensor, master_qkv: Tensor | None, w_proj: Tensor, master_proj: Tensor | None,
    heads: int, t: float, clip: float | None, activate: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = conv(x, w_qkv)
    v, lse = cosine_attention_triton(qkv, heads)
    return *_sum(v, w_proj, x, t, clip, activate, False), *saved(saves, qkv, v, lse)


def attention_branch_backward(
    g: Tensor, x: Tensor, w_qkv: Tensor, w_proj: Tensor, qkv: Tensor, v: Tensor, lse: Tensor, heads: int, t: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (scale, scale_conv), sums = sum_scales(t), Sums()
    dv, _ = convolve(g, dense(w_proj), transposed=True, scale=scale_conv)
    dqkv = cosine_attention_backward_triton(dv, qkv, v, lse, heads)
    dx, _ = convolve(dqkv, dense(w_qkv), transposed=True, aux=g, scale_aux=scale)
    dw_qkv, dw_proj = weight_gradients([[Product(dqkv, dense(x))], [Product(g, v, scale_conv)]], 1, sums=sums)
    sums.run()
    return dx, dw_qkv, dw_proj


def _second_backward(g: Tensor, w: Tensor, m: Tensor, u: Tensor, scale: float, sums: Sums) -> tuple[Tensor, Tensor]:
    """Of a branch's second convolution and the activation before it: du, and dm when the sums have run."""
    return convolve(g, dense(w), "silu_grad", transposed=True, scale=scale, aux=u, m=rows(m), training=True, later=sums)


def _weight_gradients(products0: Sequence[Product], w0: Tensor, product1: Product, w1: Tensor, sums: Sums) -> Sequence[Tensor]:
    """Of both convolutions, when the sums have run."""
    taps0, taps1 = w0.shape[0], w1.shape[0]
    if taps0 == taps1:
        return weight_gradients([products0, [product1]], taps0, sums=sums)
    return [weight_gradients([products], taps, sums=sums)[0] for products, taps in ((products0, taps0), ([product1], taps1))]


def _sum(
    x: Tensor, w: Tensor, residual: Tensor, t: float, clip: float | None, activate: float | None, training: bool
) -> tuple[Tensor, Tensor]:
    """`conv_sum`, and MP-SiLU(activate·y). In training, which is that of a whole branch, the table may name the library."""
    scale, scale_conv = sum_scales(t)
    factors = dict(scale=scale_conv, scale_aux=scale, clip=clip, **_activation(activate))
    y, extra = convolve(dense(x), dense(w), aux=dense(residual), **factors, training=training, split=not training)
    return y, _or_nothing(extra, y)


def _activation(scale: float | None) -> dict[str, Any]:
    """Of an epilogue, for a reader that wants MP-SiLU(scale·y)."""
    return {} if scale is None else {"with_extra": True, "scale_act": scale}


def _or_nothing(extra: Tensor | None, y: Tensor) -> Tensor:
    return y.new_empty(0) if extra is None else extra
