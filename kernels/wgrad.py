"""Weight gradients of convolutions: for each tap a GEMM over pixels, dw[tap] = gᵀ · x shifted by the tap.

The pixels are split among programs, whose fp32 partial sums a second kernel adds in a fixed order: no atomics, the same
bits from every run. BM0 + BM1 channels of g and BN0 + BN1 of x per program, a box [BI, BH, BW] of pixels per step.

Behind an up-sampling, of whose result x is every fourth pixel, there are 16 taps (see `reference.up_weight`): for each phase
of g four. The product is transposed, xᵀ · g shifted the other way: the left operand, then x, must not be shifted.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    g0, g1, x0, x1, dw00, dw01, dw10, dw11, other_g0, other_g1, other_x0, other_x1, other00, other01, other10, other11,
    N, H, W, steps, scale, other_scale,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, OTHER_C: tl.constexpr, OTHER_K: tl.constexpr, OTHER_STRIDE: tl.constexpr,
    TAPS: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BM0: tl.constexpr, BM1: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
    BOXES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """g `[N, H, W, C]`, x `[N, H, W, K]` → scale·dw `[splits, TAPS, C, K]`, rows STRIDE elements apart.

    16 TAPS: what is called g is x, and x is g `[N, 2H, 2W, K]`; dw `[splits, TAPS, K, C]`.
    A program takes `steps` boxes. FLAT: they are consecutive pixels, and g is reached by a descriptor of `[N·H·W, C]`.
    If OTHER_C, programs beside these compute the gradient of another weight over the same pixels.
    """
    tiles_k: tl.constexpr = (K + BN0 + BN1 - 1) // (BN0 + BN1)
    tiles: tl.constexpr = (C + BM0 + BM1 - 1) // (BM0 + BM1) * tiles_k
    others_k: tl.constexpr = (OTHER_K + BN0 + BN1 - 1) // (BN0 + BN1)
    both: tl.constexpr = tiles + (OTHER_C + BM0 + BM1 - 1) // (BM0 + BM1) * others_k
    tap, tile = tl.program_id(0) % TAPS, tl.program_id(0) // TAPS
    split, tile = tile // both, tile % both
    c, k = tile // tiles_k * (BM0 + BM1), tile % tiles_k * (BN0 + BN1)
    if OTHER_C > 0:
        if tile >= tiles:
            c, k = (tile - tiles) // others_k * (BM0 + BM1), (tile - tiles) % others_k * (BN0 + BN1)
    if OTHER_C > 0 and BOXES:  # one loop: descriptors of one form are chosen like numbers
        if tile >= tiles:
            g0, g1, x0, x1, scale = other_g0, other_g1, other_x0, other_x1, other_scale
            dw00, dw01, dw10, dw11 = other00, other01, other10, other11
    if OTHER_C > 0 and not BOXES:
        if tile >= tiles:
            weight_tile(
                other_g0, other_g1, other_x0, other_x1, other00, other01, other10, other11, tap, c, k, split, N, H, W, steps, other_scale,
                OTHER_C, OTHER_K, TAPS, OTHER_STRIDE, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
            )  # fmt: skip
        else:
            weight_tile(
                g0, g1, x0, x1, dw00, dw01, dw10, dw11, tap, c, k, split, N, H, W, steps, scale,
                C, K, TAPS, STRIDE, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
            )  # fmt: skip
    else:
        weight_tile(
            g0, g1, x0, x1, dw00, dw01, dw10, dw11, tap, c, k, split, N, H, W, steps, scale,
            C, K, TAPS, STRIDE, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
        )  # fmt: skip


@triton.jit
def weight_tile(
    g0, g1, x0, x1, dw00, dw01, dw10, dw11, tap, c, k, split,
    N, H, W, steps, scale,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BM0: tl.constexpr, BM1: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
    BOXES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """For `wgrad_kernel`: of one tap, the channels from c and k, summed over the boxes of one split."""
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
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


class Product(NamedTuple):
    """Of g `[N, H, W, C]` and x `[N, H, W, K]`: scale · dw of a convolution's weight. With 16 taps g is `[N, 2H, 2W, C]`."""

    g: Tensor
    x: Tensor
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.g.shape[3], self.x.shape[3]


def weight_gradient(
    g: Tensor,
    x: Tensor,
    taps: int,
    scale: float = 1.0,
    rest: Tensor | None = None,
    tile: WgradTile | None = None,
    sums: Sums | None = None,
) -> Tensor:
    """scale · dw, fp32 `[taps, C, K]`, of a convolution with 9 or 1 taps: g `[N, H, W, C]`, x `[N, H, W, K]`.

    With 16 taps g is `[N, 2H, 2W, C]`. The channels of a `rest` follow those of x. With `sums`, it is there when these have run.
    """
    products = [Product(g, x, scale)] + ([] if rest is None else [Product(g, rest, scale)])
    depths = [product.shape[1] for product in products]
    dw = g.new_empty(taps, g.shape[3], sum(depths), dtype=torch.float32)
    outs = list(dw.split(depths, dim=2))
    if not _by_kernel(products, taps):
        _by_library(products, taps, outs)
    else:
        _launch(products, taps, outs, dw, tile or _tile(products[0], taps), sums)
    return dw


def weight_gradients(first: Product, second: Product, taps: int, sums: Sums) -> list[Tensor]:
    """`weight_gradient` of two over as many pixels, in one launch where one tile suits both; there when the sums have run."""
    products = [first, second]
    tile = _tile(first, taps)
    if tile != _tile(second, taps) or not all(_by_kernel([x], taps) for x in products):
        return [weight_gradient(*product[:2], taps, product.scale, sums=sums) for product in products]
    dws = [x.g.new_empty(taps, *x.shape, dtype=torch.float32) for x in products]
    _launch(products, taps, dws, None, tile, sums)
    return dws


def _by_kernel(products: Sequence[Product], taps: int) -> bool:
    """Not by the library, where the table of tiles says so."""
    (_, height, width, _), channels = products[0].x.shape, products[0].g.shape[3]
    x, depth = products[0].x, sum(product.shape[1] for product in products)
    if conv_tiles.library(x.element_size()) or x.numel() == 0:
        return False
    return taps == 16 or not conv_tiles.by_library(capability(x), "weight gradient", taps, height, width, depth, channels)


def _by_library(products: Sequence[Product], taps: int, outs: Sequence[Tensor]) -> None:
    for product, out in zip(products, outs):
        torch.mul(library.weight_gradient(product.g, product.x, taps).float(), product.scale, out=out)


def _tile(product: Product, taps: int) -> WgradTile:
    return conv_tiles.wgrad(capability(product.x), *(reversed(product.shape) if taps == 16 else product.shape))


def _launch(
    products: Sequence[Product], taps: int, outs: Sequence[Tensor], whole: Tensor | None, tile: WgradTile, sums: Sums | None
) -> None:
    """Into `outs`, parts of `whole` or tensors of their own."""
    (n, height, width, _), up = products[0].x.shape, taps == 16
    (bi, bh, bw), flat = tile.box(height, width)
    steps = triton.cdiv(n, bi) * triton.cdiv(height, bh) * triton.cdiv(width, bw)
    forms = [x.shape[::-1] if up else x.shape for x in products]
    tiles = taps * sum(triton.cdiv(c, sum(tile.rows)) * triton.cdiv(k, sum(tile.columns)) for c, k in forms)
    per_split = triton.cdiv(steps, conv_tiles.splits(tiles, steps))
    splits = triton.cdiv(steps, per_split)
    parts = outs
    if splits > 1 and whole is not None:
        in_parts = whole.new_empty(splits * taps, *whole.shape[1:])
        parts = in_parts.split([x.shape[2] for x in outs], dim=2)
    elif splits > 1:
        parts = [out.new_empty(splits * taps, *out.shape[1:]) for out in outs]

    def operand(x: Tensor, sizes: tuple[int, int], *block: int) -> list:
        return [descriptor(x, *block, size) if size else None for size in sizes] if tile.boxes else [x, x]

    def arguments(product: Product, part: Tensor) -> list:
        left, right = (product.x, product.g) if up else product[:2]
        lefts = operand(left.flatten(0, 2), tile.rows, bi * bh * bw) if flat else operand(left, tile.rows, bi, bh, bw)
        doubled = up and tile.boxes
        rights = operand(by_rows(right), tile.columns, bi, bh, 1, bw) if doubled else operand(right, tile.columns, bi, bh, bw)
        blocks = [(1, k, m) if up else (1, m, k) for m in tile.rows for k in tile.columns]
        outputs = [descriptor(part, *block) if 0 not in block else None for block in blocks] if tile.boxes else [part] * 4
        return [*lefts, *rights, *outputs]

    first, *others = products
    launch(
        wgrad_kernel, (tiles * splits,), *arguments(first, parts[0]), *arguments(others[0], parts[1]) if others else [None] * 8,
        n, height, width, per_split, first.scale, others[0].scale if others else 1.0,
        C=forms[0][0], K=forms[0][1], STRIDE=0 if tile.boxes else parts[0].stride(1),
        OTHER_C=forms[1][0] if others else 0, OTHER_K=forms[1][1] if others else 0,
        OTHER_STRIDE=parts[1].stride(1) if others and not tile.boxes else 0, TAPS=taps, BI=bi, BH=bh, BW=bw,
        BM0=tile.rows[0], BM1=tile.rows[1], BN0=tile.columns[0], BN1=tile.columns[1],
        BOXES=tile.boxes, FLAT=flat, num_warps=tile.warps, num_stages=tile.stages,
        flops=2 * n * height * width * taps * sum(c * k for c, k in forms),
    )  # fmt: skip
    if splits > 1:
        add = sum_parts if sums is None else sums.add
        for part, out in zip(parts, outs) if whole is None else [(in_parts, whole)]:
            add(part.view(1, splits, -1), out.view(1, -1))


def by_rows(x: Tensor) -> Tensor:
    """`[N, 2H, 2W, C]` as `[N, H, 2, W, 2C]`: boxes of one phase, 0 outside of the image."""
    n, height, width, channels = x.shape
    return x.view(n, height // 2, 2, width // 2, 2 * channels)
