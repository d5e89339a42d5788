"""Boxes of pixels of `[N, H, W, C]`: images × rows × columns × channels, 0 outside.

By a tensor descriptor (BOXES), whose copies know the bounds, or by pointers and masks. Of a tensor of twice the height
and width, `[N, 2H, 2W, C]` (DOUBLED), they take one of its four phases: every second pixel of every second row.
"""

import triton
import triton.language as tl


@triton.jit
def load_pixels(
    x, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BOXES: tl.constexpr,
    phase=0, DOUBLED: tl.constexpr = False,
):  # fmt: skip
    """[BI·BH·BW, BC] of x `[N, H, W, C]`, 0 outside. DOUBLED: by a descriptor of `[N, H, 2, W, 2C]`, whose channels past C
    are those of another phase."""
    if BOXES and DOUBLED:
        return x.load([n, h, phase // 2, w, phase % 2 * C + c]).reshape(BI * BH * BW, BC)
    elif BOXES:
        return x.load([n, h, w, c]).reshape(BI * BH * BW, BC)
    else:
        start, offs, mask = pixel_offsets(n, h, w, c, N, H, W, C, BI, BH, BW, BC, phase, DOUBLED)
        return tl.load(x + start + offs, mask, other=0.0)


@triton.jit
def load_repeated(
    x, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """[BI·BH·BW, BC] of x `[N, H/2, W/2, C]` with its pixels repeated 2 × 2 times. w and BW are even; BH may be 1."""
    ROWS: tl.constexpr = BH // 2 if BH > 1 else 1
    half = load_pixels(x, n, h // 2, w // 2, c, N, H // 2, W // 2, C, BI, ROWS, BW // 2, BC, BOXES)
    half = half.reshape(BI * ROWS, 1, BW // 2, 1, BC).broadcast_to(BI * ROWS, BH // ROWS, BW // 2, 2, BC)
    return half.reshape(BI * BH * BW, BC)


@triton.jit
def store_pixels(
    y, value, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, BOXES: tl.constexpr,
    phase=0, UP: tl.constexpr = None,
):  # fmt: skip
    """value [BC, BI·BH·BW] into y `[N, H, W, C]`, what lies outside dropped. UP = "output": into a phase of a tensor of twice
    the height and width, by a descriptor of `[N, H, 2W, 2, C]`, where W must be a multiple of BW; "part": into one of
    `[parts, N, H, W, C]`."""
    if BOXES and UP == "output":
        y.store([n, h, phase // 2 * W + w, phase % 2, c], value.to(y.dtype).T.reshape(BI, BH, BW, 1, BC))
    elif BOXES and UP == "part":
        y.store([phase, n, h, w, c], value.to(y.dtype).T.reshape(1, BI, BH, BW, BC))
    elif BOXES:
        y.store([n, h, w, c], value.to(y.dtype).T.reshape(BI, BH, BW, BC))
    else:
        start, offs, mask = pixel_offsets(n, h, w, c, N, H, W, C, BI, BH, BW, BC, phase, UP == "output")
        if UP == "part":
            start += phase.to(tl.int64) * N * H * W * C
        tl.store(y + start + offs, value.to(y.dtype.element_ty).T, mask)


@triton.jit
def pixel_offsets(
    n, h, w, c, N, H, W, C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
    phase, DOUBLED: tl.constexpr,
):  # fmt: skip
    """Of a box: a wide start, the offsets from there [BI·BH·BW, BC], and which lie inside."""
    offs_p, offs_c = tl.arange(0, BI * BH * BW), c + tl.arange(0, BC)
    image, row, column = offs_p // (BH * BW), h + offs_p // BW % BH, w + offs_p % BW
    inside = (n + image < N) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    if DOUBLED:
        H, W, row, column = 2 * H, 2 * W, 2 * row + phase // 2, 2 * column + phase % 2
    offs = ((image * H + row) * W + column)[:, None] * C + offs_c[None, :]
    return n.to(tl.int64) * H * W * C, offs, inside[:, None] & (offs_c < C)[None, :]
