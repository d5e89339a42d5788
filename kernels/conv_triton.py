"""The convolution ops by kernels. Their signatures, outputs and meaning are those of `kernels.eager`.

Of `conv_sum`, the gradient of the residual is what its other gradients read: the output's where the clip let it pass,
times MP-Sum's factor. The branches leave the clip's derivative to those who read their results.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels import eager
from kernels.attention import cosine_attention_backward_triton, cosine_attention_triton
from kernels.convolve import Source, convolve
from kernels.jit import is_recording
from kernels.modulation import masked_gradient, modulated_silu_backward
from kernels.pixel_norm import pixel_norm_silu_backward_triton, pixel_norm_silu_triton
from kernels.pointwise import cat_silu_triton, mp_silu_triton
from kernels.reference import cat_scales
from kernels.sums import Sums
from kernels.wgrad import weight_gradient

ALIGNMENT = 16  # bytes, of every row that a descriptor reaches


def conv(x: Tensor, w: Tensor, master: Tensor | None = None) -> Tensor:
    """Any number of channels: they are padded to whole 16 bytes, which few, in the first and the last layer, cost little."""
    channels = w.shape[1]
    y, _ = convolve(_dense(_padded(x)), _padded(w, rows=True))
    return y if y.shape[3] == channels else y[..., :channels].contiguous()


def conv_backward(g: Tensor, x: Tensor, w: Tensor, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    (taps, rows, columns), g = w.shape, _dense(_padded(g))
    dw = weight_gradient(g, _dense(_padded(x)), taps)
    if dw.shape != w.shape:
        dw = dw[:, :rows, :columns].contiguous()
    if not with_dx:
        return x.new_empty(0), dw
    dx, _ = convolve(g, _padded(w, rows=True), transposed=True, training=True)
    return dx if dx.shape == x.shape else dx[..., :columns].contiguous(), dw


def conv_silu(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    v, u = convolve(_dense(x), _dense(w), "silu", m=_rows(m), with_extra=saves, training=saves)
    return v, v.new_empty(0) if u is None else u


def conv_silu_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return *conv_backward(du, x, w), dm


def conv_silu_up(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    return conv_silu(x, w, master, m, saves)


def conv_silu_up_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return convolve(du, _dense(w), transposed=True)[0], weight_gradient(du, _dense(x), w.shape[0]), dm


def conv_sum(x: Tensor, w: Tensor, master: Tensor | None, residual: Tensor, t: float, clip: float | None) -> Tensor:
    return _sum(x, w, residual, t, clip)


def _sum(x: Tensor, w: Tensor, residual: Tensor, t: float, clip: float | None, training: bool = False) -> Tensor:
    scale, scale_conv = eager.sum_scales(t)
    factors = dict(scale=scale_conv, scale_aux=scale, clip=clip)
    return convolve(_dense(x), _dense(w), aux=_dense(residual), **factors, training=training)[0]


def conv_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor | None, t: float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale, scale_conv = eager.sum_scales(t)
    g, factor = masked_gradient(g, y, scale, clip), scale_conv / scale
    dx, _ = convolve(g, _dense(w), transposed=True, scale=factor, training=True)
    return dx, weight_gradient(g, _dense(x), w.shape[0], factor), g


def conv_cat_sum(
    x: Tensor, w: Tensor, master: Tensor | None, a: Tensor, b: Tensor, w_skip: Tensor, master_skip: Tensor | None,
    cat_t: float, t: float, clip: float | None,
) -> Tensor:  # fmt: skip
    (scale, scale_conv), (scale_a, scale_b) = eager.sum_scales(t), cat_scales(a.shape[3], b.shape[3], cat_t)
    parts = w_skip.split([a.shape[3], b.shape[3]], dim=2)
    w_a, w_b = (part * (scale * s / scale_conv) for part, s in zip(parts, (scale_a, scale_b)))
    sources = [Source(_dense(a), w_a), Source(_dense(b), w_b)]
    return convolve(_dense(x), _dense(w), sources=sources, scale=scale_conv, clip=clip)[0]


def conv_cat_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, y: Tensor | None, cat_t: float,
    t: float, clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, g = conv_sum_backward(g, x, w, y, t, clip)
    return dx, dw, *_skip_backward(g, a, b, w_skip, cat_t)


def residual_branch_norm(
    x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, down: bool, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, s, rms = pixel_norm_silu_triton(x, down)
    v, u = conv_silu(s, w0, master0, m, saves)
    return _sum(v, w1, n, t, clip, training=saves), *eager.saved(saves, n, s, rms, v, u)


def residual_branch_norm_backward(
    g: Tensor, w0: Tensor, m: Tensor, w1: Tensor, n: Tensor, s: Tensor, rms: Tensor, v: Tensor, u: Tensor,
    t: float, down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scale, scale_conv = eager.sum_scales(t)
    du, dm, dw1 = _second_backward(g, w1, m, v, u, scale_conv)
    ds, dw0 = conv_backward(du, s, w0)
    return pixel_norm_silu_backward_triton(g, ds, n, rms, down, scale), dw0, dm, dw1


def residual_branch_silu(
    x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = mp_silu_triton(x)
    v, u = conv_silu(s, w0, master0, m, saves)
    return _sum(v, w1, x, t, clip, training=saves), *eager.saved(saves, s, v, u)


def residual_branch_silu_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scale, scale_conv = eager.sum_scales(t)
    du, dm, dw1 = _second_backward(g, w1, m, v, u, scale_conv)
    dw0 = weight_gradient(du, s, w0.shape[0])
    main = dict(aux=g, scale_aux=scale, act=_dense(x), clip=clip_x)
    return convolve(du, _dense(w0), "residual_silu_grad", transposed=True, **main, training=True)[0], dw0, dm, dw1


def residual_branch_up(
    x: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    t: float, clip: float | None, clip_x: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return residual_branch_silu(x, w0, master0, m, w1, master1, t, clip, clip_x, saves)  # by w0 and the sizes, convolutions up-sample


def residual_branch_up_backward(
    g: Tensor, x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, s: Tensor, v: Tensor, u: Tensor, t: float, clip_x: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return residual_branch_silu_backward(g, x, w0, m, w1, s, v, u, t, clip_x)


def residual_branch_cat(
    a: Tensor, b: Tensor, w0: Tensor, master0: Tensor | None, m: Tensor, w1: Tensor, master1: Tensor | None,
    w_skip: Tensor, master_skip: Tensor | None, cat_t: float, t: float, clip: float | None, clip_a: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = cat_silu_triton(a, b, cat_t)
    v, u = conv_silu(s, w0, master0, m, saves)
    return conv_cat_sum(v, w1, master1, a, b, w_skip, master_skip, cat_t, t, clip), *eager.saved(saves, s, v, u)


def residual_branch_cat_backward(
    g: Tensor, a: Tensor, b: Tensor, w0: Tensor, m: Tensor, w1: Tensor, w_skip: Tensor, s: Tensor, v: Tensor, u: Tensor,
    cat_t: float, t: float, clip_a: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of each source: through its part of w_skip, then with that through its part of w0."""
    scale, scale_conv = eager.sum_scales(t)
    sums = Sums()
    da, db, dw_skip = _skip_backward(g, a, b, w_skip, cat_t, scale, sums)
    du, dm, dw1 = _second_backward(g, w1, m, v, u, scale_conv, sums)
    channels = [a.shape[3], b.shape[3]]
    parts = zip((da, db), (a, b), _dense(w0).split(channels, dim=2), cat_scales(*channels, cat_t), (clip_a, None))
    da, db = (
        convolve(
            du, w, "residual_silu_grad", transposed=True, aux=d, scale_aux=1.0, act=_dense(x), scale_act=s_x, clip=clip_x,
            training=True,
        )[0]
        for d, x, w, s_x, clip_x in parts
    )  # fmt: skip
    return da, db, weight_gradient(du, s, w0.shape[0]), dm, dw1, dw_skip


def attention_branch(
    x: Tensor, w_qkv: Tensor, master_qkv: Tensor | None, w_proj: Tensor, master_proj: Tensor | None,
    heads: int, t: float, clip: float | None, saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    qkv = conv(x, w_qkv)
    v, lse = cosine_attention_triton(qkv, heads)
    return conv_sum(v, w_proj, None, x, t, clip), *eager.saved(saves, qkv, v, lse)


def attention_branch_backward(
    g: Tensor, x: Tensor, w_qkv: Tensor, w_proj: Tensor, qkv: Tensor, v: Tensor, lse: Tensor, heads: int, t: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale, scale_conv = eager.sum_scales(t)
    dw_proj = weight_gradient(g, v, 1, scale_conv)
    dv, _ = convolve(g, _dense(w_proj), transposed=True, scale=scale_conv)
    dqkv = cosine_attention_backward_triton(dv, qkv, v, lse, heads)
    dx, _ = convolve(dqkv, _dense(w_qkv), transposed=True, aux=g, scale_aux=scale)
    return dx, weight_gradient(dqkv, _dense(x), 1), dw_proj


def _second_backward(
    g: Tensor, w: Tensor, m: Tensor, v: Tensor, u: Tensor, scale: float, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a branch's second convolution and the activation before it: du, dm and dw."""
    sums = Sums() if sums is None else sums
    du, dm = convolve(g, _dense(w), "silu_grad", transposed=True, scale=scale, aux=u, m=_rows(m), training=True, later=sums)
    dw = weight_gradient(g, v, w.shape[0], scale, sums=sums)
    sums.run()
    return du, dm, dw


def _skip_backward(
    g: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, cat_t: float, factor: float = 1.0, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `factor` times the 1×1 convolution of MP-Cat."""
    channels = [a.shape[3], b.shape[3]]
    dw_skip = eager.gradient_like(w_skip)
    parts = zip((a, b), w_skip.split(channels, dim=2), dw_skip.split(channels, dim=2), cat_scales(*channels, cat_t))
    dx = []
    for source, w, dw, scale in parts:
        weight_gradient(g, _dense(source), 1, factor * scale, out=dw, sums=sums)
        dx.append(convolve(g, w, transposed=True, scale=factor * scale)[0])
    return *dx, dw_skip


def _padded(x: Tensor, rows: bool = False) -> Tensor:
    """Zero channels after the last, up to whole 16 bytes; also zero rows of a weight."""
    step = ALIGNMENT // x.element_size()
    pad = [0, -x.shape[-1] % step] + ([0, -x.shape[-2] % step] if rows else [])
    return F.pad(x, pad) if any(pad) else x


def _rows(m: Tensor) -> Tensor:
    """Rows may lie apart: m is a part of all blocks' modulations."""
    return m if m.stride(1) == 1 else m.contiguous()


def _dense(x: Tensor) -> Tensor:
    """Contiguous at an aligned address, as PyTorch allocates but some views are not."""
    aligned = is_recording() or x.data_ptr() % ALIGNMENT == 0
    return x if aligned and x.is_contiguous() else x.contiguous() if not x.is_contiguous() else x.clone()
