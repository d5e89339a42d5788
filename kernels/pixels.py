"""Boxes of pixels of `[N, H, W, C]`: images × rows × columns × channels, 0 outside.

By a tensor descriptor (BOXES), whose copies know the bounds, or by pointers and masks.
"""

import triton
import triton.language as tl


@triton.jit
def load_pixels(
    x, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """[BI·BH·BW, BC] of x `[N, H, W, C]`, 0 outside."""
    if BOXES:
        return x.load([n, h, w, c]).reshape(BI * BH * BW, BC)
    else:
        start, offs, mask = pixel_offsets(n, h, w, c, N, H, W, C, BI, BH, BW, BC)
        return tl.load(x + start + offs, mask, other=0.0)


@triton.jit
def store_pixels(
    y, value, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """value [BC, BI·BH·BW] into y `[N, H, W, C]`, what lies outside dropped."""
    if BOXES:
        y.store([n, h, w, c], value.to(y.dtype).T.reshape(BI, BH, BW, BC))
    else:
        start, offs, mask = pixel_offsets(n, h, w, c, N, H, W, C, BI, BH, BW, BC)
        tl.store(y + start + offs, value.to(y.dtype.element_ty).T, mask)


@triton.jit
def pixel_offsets(
    n, h, w, c, N, H, W, C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr
):
    """Of a box: a wide start, the offsets from there [BI·BH·BW, BC], and which lie inside."""
    offs_p, offs_c = tl.arange(0, BI * BH * BW), c + tl.arange(0, BC)
    image, row, column = offs_p // (BH * BW), h + offs_p // BW % BH, w + offs_p % BW
    inside = (n + image < N) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    offs = ((image * H + row) * W + column)[:, None] * C + offs_c[None, :]
    return n.to(tl.int64) * H * W * C, offs, inside[:, None] & (offs_c < C)[None, :]
