"""Convolution as implicit GEMM: accᵀ[channels, pixels] = Σ over taps and input channels of W · Xᵀ, and what follows it.

P output pixels, a box [BI, BH, BW] of images, rows and columns, and BN0 + BN1 channels of C per program; BLOCK_K input
channels of K per step. On Hopper and Blackwell, tensors are reached through 4-D descriptors, whose boxes are 0 outside
of the image: that is all of im2col and of the padding. On others (BOXES = False) by pointers and masks.

W lies as `[taps, C, K]`; the input gradient (TRANSPOSED) is the same loop over `[taps, K, C]` with the taps reversed. Two
accumulators make exact tiles of 192 channels. The epilogue is a loop over quarters of the pixels, so that its loads are
prefetched and its registers few.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import conv_tiles
from kernels.conv_tiles import ConvTile
from kernels.jit import capability, descriptor, launch, mp_silu, mp_silu_grad
from kernels.pixels import load_pixels, store_pixels
from kernels.wgrad import sum_parts

EPILOGUE_STAGES = 3  # a quarter's loads run two ahead


@triton.jit(do_not_specialize=["N", "H", "W", "stride_m"])  # one binary for all sizes
def conv_kernel(
    x, w0, w1, a, wa0, wa1, b, wb0, wb1, y0, y1, extra0, extra1, aux0, aux1, m_ptr, dm_ptr,
    N, H, W, stride_m, scale, scale_aux,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr,
    STRIDE_W: tl.constexpr, STRIDE_WA: tl.constexpr,
    EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BLOCK_K: tl.constexpr,
    BOXES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[N, H, W, K]` with 9 or 1 TAPS, then sources a and b with 1, if given. See `finish` for the EPILOGUEs."""
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
    tiles_c: tl.constexpr = (C + BN0 + BN1 - 1) // (BN0 + BN1)
    c, tile = tl.program_id(0) % tiles_c * (BN0 + BN1), tl.program_id(0) // tiles_c
    n, part = tile // (tiles_h * tiles_w) * BI, tile % (tiles_h * tiles_w)
    h, w = part // tiles_w * BH, part % tiles_w * BW

    acc0 = tl.zeros([BN0, BI * BH * BW], tl.float32)
    acc1 = tl.zeros([BN1 if BN1 > 0 else 1, BI * BH * BW], tl.float32)
    acc0, acc1 = accumulate(
        acc0, acc1, x, w0, w1, n, h, w, c, N, H, W,
        K, C, STRIDE_W, TAPS, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES,
    )  # fmt: skip
    if a is not None:
        acc0, acc1 = accumulate(
            acc0, acc1, a, wa0, wa1, n, h, w, c, N, H, W,
            KA, C, STRIDE_WA, 1, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES,
        )  # fmt: skip
    if b is not None:
        acc0, acc1 = accumulate(
            acc0, acc1, b, wb0, wb1, n, h, w, c, N, H, W,
            KB, C, STRIDE_WA, 1, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES,
        )  # fmt: skip
    if a is None:
        factor = scale
    else:  # in quarters it would spill, and without sources it would here
        acc0, acc1, factor = acc0 * scale, acc1 * scale, 1.0
    if BN1 > 0:  # the smaller accumulator first: fewer registers
        finish(
            acc1, y1, extra1, aux1, m_ptr, dm_ptr, n, h, w, c + BN0, part, N, H, W, stride_m, factor, scale_aux,
            C, EPILOGUE, CLIP, BI, BH, BW, BN1, BOXES, STAGES,
        )  # fmt: skip
    finish(
        acc0, y0, extra0, aux0, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, factor, scale_aux,
        C, EPILOGUE, CLIP, BI, BH, BW, BN0, BOXES, STAGES,
    )  # fmt: skip


@triton.jit
def accumulate(
    acc0, acc1, x, w0, w1, n, h, w, c, N, H, W,
    K: tl.constexpr, C: tl.constexpr, STRIDE_W: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BLOCK_K: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Add one source's products: taps one after the other, each over its channels."""
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for step in range(TAPS * steps):
        tap, k = step // steps, step % steps * BLOCK_K
        dh, dw = tap // 3 - (TAPS // 9), tap % 3 - (TAPS // 9)
        pixels = load_pixels(x, n, h + dh, w + dw, k, N, H, W, K, BI, BH, BW, BLOCK_K, BOXES).T  # [BLOCK_K, P]
        if TRANSPOSED:
            tap = TAPS - 1 - tap
        rows = load_weight(w0, tap, c, k, C, K, STRIDE_W, TRANSPOSED, BN0, BLOCK_K, BOXES)  # [BN0, BLOCK_K]
        acc0 = tl.dot(rows, pixels, acc0, input_precision="ieee")
        if BN1 > 0:
            rows1 = load_weight(w1, tap, c + BN0, k, C, K, STRIDE_W, TRANSPOSED, BN1, BLOCK_K, BOXES)
            acc1 = tl.dot(rows1, pixels, acc1, input_precision="ieee")
    return acc0, acc1


@triton.jit
def load_weight(
    w, tap, c, k,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BN: tl.constexpr, BLOCK_K: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """[BN, BLOCK_K] of a tap, rows STRIDE elements apart. By pointers it comes transposed from memory, where it must."""
    if BOXES:
        if TRANSPOSED:
            return w.load([tap, k, c]).reshape(BLOCK_K, BN).T
        else:
            return w.load([tap, c, k]).reshape(BN, BLOCK_K)
    else:
        offs_c, offs_k = (c + tl.arange(0, BN))[:, None], (k + tl.arange(0, BLOCK_K))[None, :]
        if TRANSPOSED:
            offs = (tap * K + offs_k) * STRIDE + offs_c
        else:
            offs = (tap * C + offs_c) * STRIDE + offs_k
        return tl.load(w + offs, (offs_c < C) & (offs_k < K), other=0.0)


@triton.jit
def finish(
    acc, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the accumulator [BN, P] to memory. With u = scale·acc, by EPILOGUE:

    sum: y = u + scale_aux·aux, clipped, the latter two if given; extra = MP-SiLU(y) if given.
    silu: y = MP-SiLU(u·m); extra = u if given.
    silu_grad: y = du and dm of the silu above for the gradient u of its result, aux being its u. dm by parts, one for
    each quarter.
    """
    q0, q1, q2, q3 = quarters(acc, BN, BI * BH * BW)
    if aux is None:  # nothing to prefetch
        finish_quarter(
            q0, 0, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES,
        )  # fmt: skip
        finish_quarter(
            q1, 1, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES,
        )  # fmt: skip
        finish_quarter(
            q2, 2, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES,
        )  # fmt: skip
        finish_quarter(
            q3, 3, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES,
        )  # fmt: skip
    else:
        for s in tl.range(0, 4, num_stages=STAGES):
            quarter = tl.where(s < 2, tl.where(s < 1, q0, q1), tl.where(s < 3, q2, q3))
            finish_quarter(
                quarter, s, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
                C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES,
            )  # fmt: skip


@triton.jit
def finish_quarter(
    acc, s, y, extra, aux, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """Quarter s of the pixels, [BN, P/4]: whole rows of one image, or whole images."""
    PARTS: tl.constexpr = 4 // BI if BI < 4 else 1  # quarters of one image
    QI: tl.constexpr = BI // 4 if BI > 4 else 1
    QH: tl.constexpr = BH // PARTS
    u = acc * scale
    image, row = n + s // PARTS * QI, h + s % PARTS * QH
    if EPILOGUE == "silu":
        if extra is not None:
            store_pixels(extra, u, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES)
        value = mp_silu(modulated(u, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN))
    elif EPILOGUE == "sum":
        value = u
        if aux is not None:
            value += load_pixels(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32) * scale_aux
        if CLIP is not None:
            value = tl.clamp(value, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
        if extra is not None:
            rounded = value.to(extra.dtype if BOXES else extra.dtype.element_ty).to(tl.float32)
            store_pixels(extra, mp_silu(rounded), image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES)
    else:
        before = load_pixels(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32)
        dt = u * mp_silu_grad(modulated(before, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN))
        parts = PARTS * tl.cdiv(H, BH) * tl.cdiv(W, BW)
        store_sums(dm_ptr, dt * before, image, part * PARTS + s % PARTS, parts, c, N, C, QI, QH * BW, BN)
        value = modulated(dt, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN)
    store_pixels(y, value, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES)


@triton.jit
def quarters(acc, BN: tl.constexpr, P: tl.constexpr):
    """The four quarters of the columns, in order."""
    left, right = tl.split(acc.reshape(BN, 2, P // 2).permute(0, 2, 1))
    q0, q1 = tl.split(left.reshape(BN, 2, P // 4).permute(0, 2, 1))
    q2, q3 = tl.split(right.reshape(BN, 2, P // 4).permute(0, 2, 1))
    return q0, q1, q2, q3


@triton.jit
def modulated(u, m_ptr, n, c, N, stride, C: tl.constexpr, QI: tl.constexpr, PIXELS: tl.constexpr, BN: tl.constexpr):
    """u [BN, QI·PIXELS] of QI images times m `[N, C]`, rows `stride` elements apart."""
    offs_c = c + tl.arange(0, BN)
    if QI == 1:
        m = tl.load(m_ptr + n * stride + offs_c, (offs_c < C) & (n + offs_c * 0 < N), other=0.0)
        return u * m.to(tl.float32)[:, None]
    else:
        offs_n = n + tl.arange(0, QI)[None, :]
        m = tl.load(m_ptr + offs_n * stride + offs_c[:, None], (offs_c[:, None] < C) & (offs_n < N), other=0.0)
        return (u.reshape(BN, QI, PIXELS) * m.to(tl.float32)[:, :, None]).reshape(BN, QI * PIXELS)


@triton.jit
def store_sums(
    dm_ptr, value, n, part, parts, c, N, C: tl.constexpr, QI: tl.constexpr, PIXELS: tl.constexpr, BN: tl.constexpr
):
    """Sums over the pixels of each image into `[N, parts, C]`."""
    offs_c = c + tl.arange(0, BN)
    if QI == 1:
        sums = tl.sum(value, axis=1)
        tl.store(dm_ptr + (n * parts + part) * C + offs_c, sums, (offs_c < C) & (n + offs_c * 0 < N))
    else:
        sums = tl.sum(value.reshape(BN, QI, PIXELS), axis=2)
        offs_n = n + tl.arange(0, QI)[None, :]
        tl.store(dm_ptr + (offs_n * parts + part) * C + offs_c[:, None], sums, (offs_c[:, None] < C) & (offs_n < N))


class Source(NamedTuple):
    """A tensor `[N, H, W, K]` and its weight `[1, C, K]`, whose rows may lie apart."""

    x: Tensor
    w: Tensor


def convolve(
    x: Tensor,
    w: Tensor,
    epilogue: str = "sum",
    *,
    transposed: bool = False,
    sources: Sequence[Source] = (),
    scale: float = 1.0,
    aux: Tensor | None = None,
    scale_aux: float = 0.0,
    clip: float | None = None,
    with_extra: bool = False,
    m: Tensor | None = None,
    tile: ConvTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y and extra, or y and dm, of an epilogue (see `finish`).

    x `[N, H, W, K]`, w `[9 or 1, C, K]` (for the input gradient `transposed`, `[9 or 1, K, C]`), m `[N, C]`, aux
    `[N, H, W, C]`. The 1×1 convolutions of up to two `sources` are added before the scale.
    """
    (n, height, width, depth), channels = x.shape, w.shape[2 if transposed else 1]
    y = x.new_empty(n, height, width, channels)
    extra = torch.empty_like(y) if with_extra else None
    tile = tile or conv_tiles.conv(capability(x), n * height * width, channels)
    bi, bh, bw = tile.box(height, width)
    tiles_image = triton.cdiv(height, bh) * triton.cdiv(width, bw)
    sums = None
    if epilogue == "silu_grad":
        sums = m.new_empty(n, max(4 // bi, 1) * tiles_image, channels, dtype=torch.float32)

    a, b = (*sources, None, None)[:2]
    views = _Views(tile, (bi, bh, bw))
    launch(
        conv_kernel, (triton.cdiv(n, bi) * tiles_image * triton.cdiv(channels, sum(tile.channels)),),
        views.input(x), *views.weight(w, transposed),
        *(views.input(a.x), *views.weight(a.w)) if a else (None,) * 3,
        *(views.input(b.x), *views.weight(b.w)) if b else (None,) * 3,
        *views.output(y), *views.output(extra), *views.output(aux), m, sums,
        n, height, width, 0 if m is None else m.stride(0), scale, scale_aux,
        K=depth, KA=a.x.shape[3] if a else 0, KB=b.x.shape[3] if b else 0, C=channels, TAPS=w.shape[0],
        TRANSPOSED=transposed, STRIDE_W=views.stride(w), STRIDE_WA=views.stride(a.w) if a else 0,
        EPILOGUE=epilogue, CLIP=clip,
        BI=bi, BH=bh, BW=bw, BN0=tile.channels[0], BN1=tile.channels[1], BLOCK_K=tile.block_k,
        BOXES=tile.boxes, STAGES=EPILOGUE_STAGES, num_warps=tile.warps, num_stages=tile.stages,
        flops=2 * n * height * width * channels * (w.shape[0] * depth + sum(source.x.shape[3] for source in sources)),
    )  # fmt: skip
    if sums is None:
        return y, extra
    dm = m.new_empty(m.shape)
    sum_parts(sums, dm)
    return y, dm


class _Views(NamedTuple):
    """How the kernel reaches tensors: descriptors with the boxes of a tile, or the tensors themselves."""

    tile: ConvTile
    box: tuple[int, int, int]

    def input(self, x: Tensor) -> Any:
        return descriptor(x, *self.box, self.tile.block_k) if self.tile.boxes else x

    def weight(self, w: Tensor, transposed: bool = False) -> list:
        """For each accumulator, like `output`."""
        depth = self.tile.block_k
        return self._each(w, *((1, depth, c) if transposed else (1, c, depth) for c in self.tile.channels))

    def stride(self, w: Tensor) -> int:
        """Of a weight's rows, where the kernel must know it."""
        return 0 if self.tile.boxes else w.stride(1)

    def output(self, y: Tensor | None) -> list:
        """In quarters."""
        bi, bh, bw = self.box
        return self._each(y, *((max(bi // 4, 1), bh // max(4 // bi, 1), bw, c) for c in self.tile.channels))

    def _each(self, x: Tensor | None, *sizes: tuple[int, ...]) -> list:
        if x is None or not self.tile.boxes:
            return [x, x]
        return [descriptor(x, *size) if 0 not in size else None for size in sizes]
