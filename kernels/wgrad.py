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
from kernels.conv_tiles import Row, WgradTile
from kernels.jit import capability, descriptor, launch
from kernels.pixels import load_pixels
from kernels.sums import Sums, sum_parts

PRODUCTS = 3  # of a launch


@triton.jit(do_not_specialize=["N", "H", "W", "steps"])  # one binary for all sizes
def wgrad_kernel(
    g0, g1, x0, x1, dw00, dw01, dw10, dw11,
    g0_2, g1_2, x0_2, x1_2, dw00_2, dw01_2, dw10_2, dw11_2,
    g0_3, g1_3, x0_3, x1_3, dw00_3, dw01_3, dw10_3, dw11_3,
    N, H, W, steps, scale, scale_2, scale_3,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    C_2: tl.constexpr, K_2: tl.constexpr, STRIDE_2: tl.constexpr,
    C_3: tl.constexpr, K_3: tl.constexpr, STRIDE_3: tl.constexpr,
    TAPS: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
    BM0: tl.constexpr, BM1: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr,
    BOXES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """g `[N, H, W, C]`, x `[N, H, W, K]` → scale·dw `[splits, TAPS, C, K]`, rows STRIDE elements apart.

    16 TAPS: what is called g is x, and x is g `[N, 2H, 2W, K]`; dw `[splits, TAPS, K, C]`.
    A program takes `steps` boxes. FLAT: they are consecutive pixels, and g is reached by a descriptor of `[N·H·W, C]`.
    If C_2 and C_3 are not 0, programs beside these compute a second and a third gradient over the same pixels.
    """
    BM: tl.constexpr = BM0 + BM1
    BN: tl.constexpr = BN0 + BN1
    tiles_k: tl.constexpr = (K + BN - 1) // BN
    tiles_k2: tl.constexpr = (K_2 + BN - 1) // BN
    tiles_k3: tl.constexpr = (K_3 + BN - 1) // BN
    start_2: tl.constexpr = (C + BM - 1) // BM * tiles_k
    start_3: tl.constexpr = start_2 + (C_2 + BM - 1) // BM * tiles_k2
    tiles: tl.constexpr = start_3 + (C_3 + BM - 1) // BM * tiles_k3
    tap, tile = tl.program_id(0) % TAPS, tl.program_id(0) // TAPS
    split, tile = tile // tiles, tile % tiles
    c, k = tile // tiles_k * BM, tile % tiles_k * BN
    if C_2 > 0:
        if tile >= start_2:
            c, k = (tile - start_2) // tiles_k2 * BM, (tile - start_2) % tiles_k2 * BN
    if C_3 > 0:
        if tile >= start_3:
            c, k = (tile - start_3) // tiles_k3 * BM, (tile - start_3) % tiles_k3 * BN
    if BOXES:  # one loop: descriptors of one form are chosen like numbers
        if C_2 > 0:
            if tile >= start_2:
                g0, g1, x0, x1, scale = g0_2, g1_2, x0_2, x1_2, scale_2
                dw00, dw01, dw10, dw11 = dw00_2, dw01_2, dw10_2, dw11_2
        if C_3 > 0:
            if tile >= start_3:
                g0, g1, x0, x1, scale = g0_3, g1_3, x0_3, x1_3, scale_3
                dw00, dw01, dw10, dw11 = dw00_3, dw01_3, dw10_3, dw11_3
        weight_tile(
            g0, g1, x0, x1, dw00, dw01, dw10, dw11, tap, c, k, split, N, H, W, steps, scale,
            C, K, TAPS, STRIDE, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
        )  # fmt: skip
    elif C_3 > 0 and tile >= start_3:
        weight_tile(
            g0_3, g1_3, x0_3, x1_3, dw00_3, dw01_3, dw10_3, dw11_3, tap, c, k, split, N, H, W, steps, scale_3,
            C_3, K_3, TAPS, STRIDE_3, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
        )  # fmt: skip
    elif C_2 > 0 and tile >= start_2:
        weight_tile(
            g0_2, g1_2, x0_2, x1_2, dw00_2, dw01_2, dw10_2, dw11_2, tap, c, k, split, N, H, W, steps, scale_2,
            C_2, K_2, TAPS, STRIDE_2, BI, BH, BW, BM0, BM1, BN0, BN1, BOXES, FLAT,
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
    g: Tensor, x: Tensor, taps: int, scale: float = 1.0, tile: WgradTile | None = None, sums: Sums | None = None
) -> Tensor:
    """scale · dw, fp32 `[taps, C, K]`, of a convolution with 9, 1 or 16 taps. With `sums`, it is there when these have run."""
    return weight_gradients([[Product(g, x, scale)]], taps, tile, sums)[0]


def weight_gradients(
    weights: Sequence[Sequence[Product]], taps: int, tile: WgradTile | None = None, sums: Sums | None = None
) -> list[Tensor]:
    """`weight_gradient` of several over as many pixels: `[taps, C, ΣK]` of the products of each, side by side.

    Three products together take one launch, if the lists of tiles have one for all weights.
    """
    groups = [weights] if _together(weights, taps) else [[products] for products in weights]
    return [dw for group in groups for dw in joint_gradients(group, taps, tile, sums)]


def joint_gradients(
    weights: Sequence[Sequence[Product]], taps: int, tile: WgradTile | None = None, sums: Sums | None = None
) -> list[Tensor]:
    """Of weights in one launch, by the tile that the first one's row of the table names, or by the library."""
    dws = [products[0].g.new_empty(taps, products[0].shape[0], _depth(products), dtype=torch.float32) for products in weights]
    if _by_kernel(weights[0], taps, tile):
        _launch(weights, dws, taps, tile or conv_tiles.wgrad(_row(weights[0], taps)), sums)
    else:
        for product, out in zip(weights[0], _parts(weights[0], dws[0])):
            torch.mul(library.weight_gradient(product.g, product.x, taps).float(), product.scale, out=out)
    return dws


def _together(weights: Sequence[Sequence[Product]], taps: int) -> bool:
    """By the lists alone: rows that were measured must not part what is quicker in one launch."""
    tiles = {conv_tiles.listed_wgrad(_row(products, taps)) for products in weights}
    return len(tiles) == 1 and all(_by_kernel(products, taps) for products in weights)


def _depth(products: Sequence[Product]) -> int:
    return sum(product.shape[1] for product in products)


def _parts(products: Sequence[Product], dw: Tensor) -> Sequence[Tensor]:
    """Of each product."""
    return dw.split([product.shape[1] for product in products], dim=2)


def _by_kernel(products: Sequence[Product], taps: int, tile: WgradTile | None = None) -> bool:
    """Not by the library, where the table of tiles says so and no tile is given."""
    x = products[0].x
    if conv_tiles.library(x.element_size()) or x.numel() == 0:
        return False
    whole = _row(products, taps)._replace(depth=_depth(products))
    return tile is not None or taps == 16 or whole not in conv_tiles.LIBRARY


def _row(products: Sequence[Product], taps: int) -> Row:
    """Of the first product, since no tile reaches into another. With 16 taps it is transposed."""
    x, (channels, depth) = products[0].x, products[0].shape
    sizes = (channels, depth) if taps == 16 else (depth, channels)
    return conv_tiles.row(capability(x), "weight gradient", taps, *x.shape[1:3], *sizes)


def _launch(weights: Sequence[Sequence[Product]], dws: Sequence[Tensor], taps: int, tile: WgradTile, sums: Sums | None) -> None:
    (n, height, width, _), up = weights[0][0].x.shape, taps == 16
    (bi, bh, bw), flat = tile.box(height, width)
    products = [x for products in weights for x in products]
    assert len(products) <= (1 if up else PRODUCTS)
    forms = [x.shape[::-1] if up else x.shape for x in products]
    steps = triton.cdiv(n, bi) * triton.cdiv(height, bh) * triton.cdiv(width, bw)
    tiles = taps * sum(triton.cdiv(c, sum(tile.rows)) * triton.cdiv(k, sum(tile.columns)) for c, k in forms)
    per_split = triton.cdiv(steps, conv_tiles.splits(tile, tiles, steps))
    splits = triton.cdiv(steps, per_split)
    wholes = dws if splits == 1 else [dw.new_empty(splits * taps, *dw.shape[1:]) for dw in dws]
    parts = [part for products, whole in zip(weights, wholes) for part in _parts(products, whole)]

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

    missing = PRODUCTS - len(products)
    tensors = [x for pair in zip(products, parts) for x in arguments(*pair)]
    constants = {"TAPS": taps, "BI": bi, "BH": bh, "BW": bw, "BOXES": tile.boxes, "FLAT": flat}
    for i, ((c, k), stride) in enumerate(zip([*forms, *[(0, 0)] * missing], [*(x.stride(1) for x in parts), *[0] * missing]), 1):
        suffix = "" if i == 1 else f"_{i}"
        constants |= {f"C{suffix}": c, f"K{suffix}": k, f"STRIDE{suffix}": 0 if tile.boxes else stride}
    launch(
        wgrad_kernel, (tiles * splits,), *tensors, *[None] * (8 * missing), n, height, width, per_split,
        *(x.scale for x in products), *[1.0] * missing, **constants,
        BM0=tile.rows[0], BM1=tile.rows[1], BN0=tile.columns[0], BN1=tile.columns[1],
        num_warps=tile.warps, num_stages=tile.stages, flops=2 * n * height * width * taps * sum(c * k for c, k in forms),
    )  # fmt: skip
    if splits > 1:
        add = sum_parts if sums is None else sums.add
        for whole, dw in zip(wholes, dws):
            add(whole.view(1, splits, -1), dw.view(1, -1))


def by_rows(x: Tensor) -> Tensor:
    """`[N, 2H, 2W, C]` as `[N, H, 2, W, 2C]`: boxes of one phase, 0 outside of the image."""
    n, height, width, channels = x.shape
    return x.view(n, height // 2, 2, width // 2, 2 * channels)
