"""The convolution ops by kernels. Their signatures, outputs and meaning are those of `kernels.eager`.

Of `conv_sum`, the gradient of the residual is what its other gradients read: the output's where the clip let it pass,
times MP-Sum's factor.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.convolve import Source, convolve
from kernels.eager import gradient_like, sum_scales
from kernels.jit import is_recording
from kernels.modulation import masked_gradient, modulated_silu_backward
from kernels.reference import cat_scales
from kernels.sums import Sums
from kernels.wgrad import weight_gradient

ALIGNMENT = 16  # bytes, of every row that a descriptor reaches


def conv(x: Tensor, w: Tensor, master: Tensor | None = None) -> Tensor:
    """Any number of channels: they are padded to whole 16 bytes, which few, in the first and the last layer, cost little."""
    channels = w.shape[1]
    x = dense(_padded(x))
    y, _ = convolve(x, _padded_weight(w, x.shape[3]))
    return y if y.shape[3] == channels else y[..., :channels].contiguous()


def conv_backward(g: Tensor, x: Tensor, w: Tensor, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    (taps, rows, columns), g = w.shape, dense(_padded(g))
    padded = _padded(x)
    dw = weight_gradient(g, dense(padded), taps)
    if dw.shape != w.shape:
        dw = dw[:, :rows, :columns].contiguous()
    if not with_dx:
        return x.new_empty(0), dw
    dx, _ = convolve(g, _padded_weight(w, padded.shape[3]), transposed=True, training=True)
    return dx if dx.shape == x.shape else dx[..., : x.shape[3]].contiguous(), dw


def conv_silu(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    v, u = convolve(dense(x), dense(w), "silu", m=rows(m), with_extra=saves, training=saves)
    return v, v.new_empty(0) if u is None else u


def conv_silu_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return *conv_backward(du, x, w), dm


def conv_silu_up(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    return conv_silu(x, w, master, m, saves)


def conv_silu_up_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return convolve(du, dense(w), transposed=True)[0], weight_gradient(du, dense(x), w.shape[0]), dm


def conv_sum(
    x: Tensor, w: Tensor, master: Tensor | None, residual: Tensor, t: float, clip: float | None, training: bool = False
) -> Tensor:
    """In `training`, which is that of a whole branch, the table may name the library."""
    scale, scale_conv = sum_scales(t)
    factors = dict(scale=scale_conv, scale_aux=scale, clip=clip)
    return convolve(dense(x), dense(w), aux=dense(residual), **factors, training=training)[0]


def conv_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor | None, t: float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale, scale_conv = sum_scales(t)
    g, factor = masked_gradient(g, y, scale, clip), scale_conv / scale
    dx, _ = convolve(g, dense(w), transposed=True, scale=factor, training=True)
    return dx, weight_gradient(g, dense(x), w.shape[0], factor), g


def conv_cat_sum(
    x: Tensor, w: Tensor, master: Tensor | None, a: Tensor, b: Tensor, w_skip: Tensor, master_skip: Tensor | None,
    cat_t: float, t: float, clip: float | None,
) -> Tensor:  # fmt: skip
    (scale, scale_conv), (scale_a, scale_b) = sum_scales(t), cat_scales(a.shape[3], b.shape[3], cat_t)
    parts = w_skip.split([a.shape[3], b.shape[3]], dim=2)
    w_a, w_b = (part * (scale * s / scale_conv) for part, s in zip(parts, (scale_a, scale_b)))
    sources = [Source(dense(a), w_a), Source(dense(b), w_b)]
    return convolve(dense(x), dense(w), sources=sources, scale=scale_conv, clip=clip)[0]


def conv_cat_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, y: Tensor | None, cat_t: float,
    t: float, clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw, g = conv_sum_backward(g, x, w, y, t, clip)
    return dx, dw, *skip_backward(g, a, b, w_skip, cat_t)


def skip_backward(
    g: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, cat_t: float, factor: float = 1.0, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `factor` times the 1×1 convolution of MP-Cat."""
    channels = [a.shape[3], b.shape[3]]
    dw_skip = gradient_like(w_skip)
    parts = zip((a, b), w_skip.split(channels, dim=2), dw_skip.split(channels, dim=2), cat_scales(*channels, cat_t))
    dx = []
    for source, w, dw, scale in parts:
        weight_gradient(g, dense(source), 1, factor * scale, out=dw, sums=sums)
        dx.append(convolve(g, w, transposed=True, scale=factor * scale)[0])
    return *dx, dw_skip


def _padded(x: Tensor) -> Tensor:
    """Zero channels after the last, up to whole 16 bytes."""
    more = -x.shape[-1] % (ALIGNMENT // x.element_size())
    return F.pad(x, (0, more)) if more else x


def _padded_weight(w: Tensor, columns: int) -> Tensor:
    """Zero columns and rows, for x of so many channels and y of whole 16 bytes."""
    pad = [0, columns - w.shape[2], 0, -w.shape[1] % (ALIGNMENT // w.element_size())]
    return F.pad(w, pad) if any(pad) else w


def rows(m: Tensor) -> Tensor:
    """Rows may lie apart: m is a part of all blocks' modulations."""
    return m if m.stride(1) == 1 else m.contiguous()


def dense(x: Tensor) -> Tensor:
    """Contiguous at an aligned address, as PyTorch allocates but some views are not."""
    aligned = is_recording() or x.data_ptr() % ALIGNMENT == 0
    return x if aligned and x.is_contiguous() else x.contiguous() if not x.is_contiguous() else x.clone()
