"""Convolutions by the library in place of kernels, where the table of tiles says that it wins, and the epilogue after them.

For training only: the library chooses its algorithm by the batch, so that an image would depend on its neighbours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.epilogue import finish_quarter
from kernels.pixels import load_pixels

aten = torch.ops.aten
ONE = [1, 1]


def convolution(x: Tensor, w: Tensor, transposed: bool) -> Tensor:
    """u `[N, H, W, C]` of x `[N, H, W, K]` and w `[9 or 1, C, K]`, or `[9 or 1, K, C]` if transposed."""
    if w.shape[0] == 1:
        return x @ (w[0] if transposed else w[0].T)
    kernel, x = w.permute(1, 2, 0).unflatten(2, (3, 3)), x.permute(0, 3, 1, 2)
    if transposed:
        like = x.new_empty(x.shape[0], *x.shape[2:], w.shape[2]).permute(0, 3, 1, 2)
        u, _, _ = aten.convolution_backward(x, like, kernel, None, ONE, ONE, ONE, False, [0, 0], 1, [True, False, False])
    else:
        u = aten.convolution(x, kernel, None, ONE, ONE, ONE, False, [0, 0], 1)
    return u.permute(0, 2, 3, 1).contiguous()


def weight_gradient(g: Tensor, x: Tensor, taps: int) -> Tensor:
    """dw `[taps, C, K]` in the type of g `[N, H, W, C]`; x `[N, H, W, K]`."""
    if taps == 1:
        return (g.flatten(0, 2).T @ x.flatten(0, 2))[None]
    like, g, x = g.new_empty(g.shape[3], x.shape[3], 3, 3), g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)
    _, dw, _ = aten.convolution_backward(g, x, like, None, ONE, ONE, ONE, False, [0, 0], 1, [False, True, False])
    return dw.flatten(2).permute(2, 0, 1)


@triton.jit
def epilogue_kernel(
    u, y, extra, aux, act, m_ptr, dm_ptr,
    N, H, W, stride_m, scale, scale_aux, scale_act,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr, UP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What `conv_kernel` does after its loop, from memory."""
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
    tiles_c: tl.constexpr = (C + BN - 1) // BN
    c, tile = tl.program_id(0) % tiles_c * BN, tl.program_id(0) // tiles_c
    n, part = tile // (tiles_h * tiles_w) * BI, tile % (tiles_h * tiles_w)
    h, w = part // tiles_w * BH, part % tiles_w * BW
    PARTS: tl.constexpr = 4 // BI if BI < 4 else 1
    QI: tl.constexpr = BI // 4 if BI > 4 else 1
    QH: tl.constexpr = BH // PARTS
    for s in tl.static_range(4):
        acc = load_pixels(u, n + s // PARTS * QI, h + s % PARTS * QH, w, c, N, H, W, C, QI, QH, BW, BN, False)
        finish_quarter(
            acc.T.to(tl.float32), s, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, False, 0, UP,
        )  # fmt: skip
