"""The convolution ops by kernels. Their signatures, outputs and meaning are those of `kernels.eager`.

Of `conv_sum`, the gradient of the residual is what its other gradients read: the output's where the clip let it pass,
times MP-Sum's factor.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.convolve import Rest, Source, convolve
from kernels.jit import is_recording
from kernels.modulation import masked_gradient, modulated_silu_backward
from kernels.reference import sum_scales
from kernels.sums import Sums
from kernels.wgrad import Product, weight_gradient, weight_gradients

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
    v, u = convolve(dense(x), dense(w), "silu", m=rows(m), with_extra=saves, training=saves, split=not saves)
    return v, v.new_empty(0) if u is None else u


def conv_silu_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return *conv_backward(du, x, w), dm


def conv_silu_up(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    return conv_silu(x, w, master, m, saves)


def conv_silu_up_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = modulated_silu_backward(g, u, m.contiguous())
    return convolve(du, dense(w), transposed=True)[0], weight_gradient(du, dense(x), w.shape[0]), dm


def conv_sum(x: Tensor, w: Tensor, master: Tensor | None, residual: Tensor, t: float, clip: float | None) -> Tensor:
    scale, scale_conv = sum_scales(t)
    return convolve(dense(x), dense(w), aux=dense(residual), scale=scale_conv, scale_aux=scale, clip=clip)[0]


def conv_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor | None, t: float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale, scale_conv = sum_scales(t)
    g, factor = masked_gradient(g, y, scale, clip), scale_conv / scale
    dx, _ = convolve(g, dense(w), transposed=True, scale=factor, training=True)
    return dx, weight_gradient(g, dense(x), w.shape[0], factor), g


def conv_cat_sum(
    x: Tensor, w: Tensor, master: Tensor | None, a: Tensor, b: Tensor, w_skip: Tensor, master_skip: Tensor | None,
    clip: float | None,
) -> Tensor:  # fmt: skip
    return convolve(dense(x), dense(w), sources=sources(a, b, w_skip), clip=clip)[0]


def sources(a: Tensor, b: Tensor, w: Tensor) -> list[Source]:
    """With the parts of the weight that is theirs together."""
    w_a, w_b = dense(w).split([a.shape[3], b.shape[3]], dim=2)
    return [Source(dense(a), w_a), Source(dense(b), w_b)]


def conv_cat_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, y: Tensor | None, clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = dense(g) if clip is None else masked_gradient(g, y, 1.0, clip)
    dx, _ = convolve(g, dense(w), transposed=True, training=True)
    return dx, weight_gradient(g, dense(x), w.shape[0]), *skip_backward(g, a, b, w_skip)


def skip_backward(
    g: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, sums: Sums | None = None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of the 1×1 convolution of both sources."""
    (dw_skip,) = weight_gradients([[Product(g, dense(a)), Product(g, dense(b))]], 1, sums=sums)
    da, db = convolve(g, dense(w_skip), transposed=True, rest=Rest(b.shape[3]))
    return da, db, dw_skip


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
