"""Weight gradients of convolutions: for each tap a GEMM over pixels, dw[tap] = gᵀ · x shifted by the tap.

The pixels are split among programs, whose fp32 partial sums a second kernel adds in a fixed order: no atomics, the same
bits from every run. BM0 + BM1 channels of g and BN0 + BN1 of x per program, a box [BI, BH, BW] of pixels per step.

Behind an up-sampling, of whose result x is every fourth pixel, there are 16 taps (see `reference.up_weight`): for each phase
of g four. The product is transposed, xᵀ · g shifted the other way: the left operand, then x, must not be shifted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import conv_tiles, library
from kernels.conv_tiles import WgradTile
from kernels.jit import capability, descriptor, launch
from kernels.pixels import load_pixels
from kernels.sums import Sums, sum_parts


@triton.jit(do_not_specialize=["N", "H", "W", "steps"])  # one binary for all sizes
def wgrad_kernel(
    g0, g1, x0, x1, dw00, dw01, dw10, dw11,
    N, H, W, steps, scale,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BM0: tl.constexpr, BM1: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
    BOXES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """g `[N, H, W, C]`, x `[N, H, W, K]` → scale·dw `[splits, TAPS, C, K]`, rows STRIDE elements apart.

    16 TAPS: what is called g is x, and x is g `[N, 2H, 2W, K]`; dw `[splits, TAPS, K, C]`.
    A program takes `steps` boxes. FLAT: they are consecutive pixels, and g is reached by a descriptor of `[N·H·W, C]`.
    """
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
    tiles_c: tl.constexpr = (C + BM0 + BM1 - 1) // (BM0 + BM1)
    tiles_k: tl.constexpr = (K + BN0 + BN1 - 1) // (BN0 + BN1)
    tap, tile = tl.program_id(0) % TAPS, tl.program_id(0) // TAPS
    k, c = tile % tiles_k * (BN0 + BN1), tile // tiles_k % tiles_c * (BM0 + BM1)
    split = tile // (tiles_k * tiles_c)
    UP: tl.constexpr = TAPS == 16
    if UP:
        dh, dw = 1 - tap // 8 - tap // 2 % 2, 1 - tap // 4 % 2 - tap % 2
    else:
        dh, dw = tap // 3 - (TAPS // 9), tap % 3 - (TAPS // 9)

    acc00 = tl.zeros([BM0, BN0], tl.float32)
    acc01 = tl.zeros([BM0, BN1 if BN1 > 0 else 1], tl.float32)
    acc10 = tl.zeros([BM1 if BM1 > 0 else 1, BN0], tl.float32)
    acc11 = tl.zeros([BM1 if BM1 > 0 else 1, BN1 if BN1 > 0 else 1], tl.float32)
    boxes = tl.cdiv(N, BI) * tiles_h * tiles_w
    for box in range(split * steps, tl.minimum((split + 1) * steps, boxes)):
        n, h, w = box // (tiles_h * tiles_w) * BI, box // tiles_w % tiles_h * BH, box % tiles_w * BW
        g = load_gradient(g0, n, h, w, c, N, H, W, C, BI, BH, BW, BM0, BOXES, FLAT)  # [BM0, pixels]
        x = load_pixels(x0, n, h + dh, w + dw, k, N, H, W, K, BI, BH, BW, BN0, BOXES, tap // 4, UP)  # [pixels, BN0]
        acc00 = tl.dot(g, x, acc00, input_precision="ieee")
        if BM1 > 0:
            g_rest = load_gradient(g1, n, h, w, c + BM0, N, H, W, C, BI, BH, BW, BM1, BOXES, FLAT)
            acc10 = tl.dot(g_rest, x, acc10, input_precision="ieee")
        if BN1 > 0:
            x_rest = load_pixels(x1, n, h + dh, w + dw, k + BN0, N, H, W, K, BI, BH, BW, BN1, BOXES, tap // 4, UP)
            acc01 = tl.dot(g, x_rest, acc01, input_precision="ieee")
            if BM1 > 0:
                acc11 = tl.dot(g_rest, x_rest, acc11, input_precision="ieee")

    part = split * TAPS + tap
    store_tile(dw00, acc00 * scale, part, c, k, C, K, STRIDE, BM0, BN0, BOXES, UP)
    if BN1 > 0:
        store_tile(dw01, acc01 * scale, part, c, k + BN0, C, K, STRIDE, BM0, BN1, BOXES, UP)
    if BM1 > 0:
        store_tile(dw10, acc10 * scale, part, c + BM0, k, C, K, STRIDE, BM1, BN0, BOXES, UP)
        if BN1 > 0:
            store_tile(dw11, acc11 * scale, part, c + BM0, k + BN0, C, K, STRIDE, BM1, BN1, BOXES, UP)


@triton.jit
def load_gradient(
    g, n, h, w, c, N, H, W,
    C: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr,
    BOXES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """[BM, BI·BH·BW] of g. By pointers it comes transposed from memory."""
    if BOXES:
        if FLAT:
            return g.load([(n * H + h) * W + w, c]).T
        else:
            return g.load([n, h, w, c]).reshape(BI * BH * BW, BM).T
    else:
        offs_p, offs_c = tl.arange(0, BI * BH * BW)[None, :], c + tl.arange(0, BM)[:, None]
        image, row, column = offs_p // (BH * BW), h + offs_p // BW % BH, w + offs_p % BW
        offs = ((image * H + row) * W + column) * C + offs_c
        mask = (n + image < N) & (row < H) & (column < W) & (offs_c < C)
        return tl.load(g + n.to(tl.int64) * H * W * C + offs, mask, other=0.0)


@triton.jit
def store_tile(
    dw, value, part, c, k,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    if BOXES:
        if TRANSPOSED:
            dw.store([part, k, c], value.T.reshape(1, BN, BM))
        else:
            dw.store([part, c, k], value.reshape(1, BM, BN))
    else:
        offs_c, offs_k = c + tl.arange(0, BM)[:, None], k + tl.arange(0, BN)[None, :]
        if TRANSPOSED:
            offs = part.to(tl.int64) * K * STRIDE + offs_k * STRIDE + offs_c
        else:
            offs = part.to(tl.int64) * C * STRIDE + offs_c * STRIDE + offs_k
        tl.store(dw + offs, value, (offs_c < C) & (offs_k < K))


def weight_gradient(
    g: Tensor,
    x: Tensor,
    taps: int,
    scale: float = 1.0,
    out: Tensor | None = None,
    tile: WgradTile | None = None,
    sums: Sums | None = None,
) -> Tensor:
    """scale · dw, fp32 `[taps, C, K]`, of a convolution with 9 or 1 taps: g `[N, H, W, C]`, x `[N, H, W, K]`.

    Into `out`, if given: `[taps, C, K]`, whose rows may lie apart. With `sums`, it is there when these have run.
    With 16 taps g is `[N, 2H, 2W, C]`.
    """
    (n, height, width, depth), channels, up = x.shape, g.shape[3], taps == 16
    if conv_tiles.library(x.element_size()) or (
        not up and conv_tiles.by_library(capability(x), "weight gradient", taps, height, width, depth, channels)
    ):
        dw = library.weight_gradient(g, x, taps).float() * scale
        return dw.contiguous() if out is None else out.copy_(dw)
    dw = g.new_empty(taps, channels, depth, dtype=torch.float32) if out is None else out
    if x.numel() == 0:
        return dw.zero_()
    left, right = (x, g) if up else (g, x)
    tile = tile or conv_tiles.wgrad(capability(x), left.shape[3], right.shape[3])
    (bi, bh, bw), flat = tile.box(height, width)
    steps = triton.cdiv(n, bi) * triton.cdiv(height, bh) * triton.cdiv(width, bw)
    tiles = taps * triton.cdiv(left.shape[3], sum(tile.rows)) * triton.cdiv(right.shape[3], sum(tile.columns))
    per_split = triton.cdiv(steps, conv_tiles.splits(tiles, steps))
    splits = triton.cdiv(steps, per_split)
    parts = dw if splits == 1 else dw.new_empty(splits * taps, channels, depth)

    def sources(tensor: Tensor, sizes: tuple[int, int], *block: int) -> list:
        return [descriptor(tensor, *block, size) if size else None for size in sizes] if tile.boxes else [tensor, tensor]

    lefts = sources(left.flatten(0, 2), tile.rows, bi * bh * bw) if flat else sources(left, tile.rows, bi, bh, bw)
    rights = sources(by_rows(right), tile.columns, bi, bh, 1, bw) if up and tile.boxes else sources(right, tile.columns, bi, bh, bw)
    blocks = [(1, k, m) if up else (1, m, k) for m in tile.rows for k in tile.columns]
    outputs = [descriptor(parts, *block) if 0 not in block else None for block in blocks] if tile.boxes else [parts] * 4
    launch(
        wgrad_kernel, (tiles * splits,), *lefts, *rights, *outputs, n, height, width, per_split, scale,
        C=left.shape[3], K=right.shape[3], TAPS=taps, STRIDE=0 if tile.boxes else parts.stride(1), BI=bi, BH=bh, BW=bw,
        BM0=tile.rows[0], BM1=tile.rows[1], BN0=tile.columns[0], BN1=tile.columns[1],
        BOXES=tile.boxes, FLAT=flat, num_warps=tile.warps, num_stages=tile.stages,
        flops=2 * n * height * width * taps * channels * depth,
    )  # fmt: skip
    if splits > 1:
        add = sum_parts if sums is None else sums.add
        add(*(parts.view(1, splits, -1), dw.view(1, -1)) if dw.is_contiguous() else (parts.transpose(0, 1), dw[0]))
    return dw


def by_rows(x: Tensor) -> Tensor:
    """`[N, 2H, 2W, C]` as `[N, H, 2, W, 2C]`: boxes of one phase, 0 outside of the image."""
    n, height, width, channels = x.shape
    return x.view(n, height // 2, 2, width // 2, 2 * channels)
