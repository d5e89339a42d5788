"""Convolution as implicit GEMM: accᵀ[channels, pixels] = Σ over taps and input channels of W · Xᵀ.

P output pixels, a box [BI, BH, BW] of images, rows and columns, and BN0 + BN1 channels of C per program; BLOCK_K input
channels of K per step. On Hopper and Blackwell, tensors are reached through 4-D descriptors, whose boxes are 0 outside
of the image: that is all of im2col and of the padding. On others (BOXES = False) by pointers and masks.

W lies as `[taps, C, K]`; the input gradient (TRANSPOSED) is the same loop over `[taps, K, C]` with the taps reversed. Two
accumulators make exact tiles of 192 channels. Behind an up-sampling, whose result does not exist, a 3×3 is four phases of
2×2 taps over pixels of x: one phase per program forward (UP = "output"), all for the input gradient ("gradient").

For few pixels (UP = "part") the sum is divided: one program for each row of taps, and one for sources of a single tap.
`kernels.convolve` launches it.
"""

import triton
import triton.language as tl

from kernels.epilogue import finish
from kernels.pixels import load_pixels


@triton.jit(do_not_specialize=["N", "H", "W", "stride_m"])  # one binary for all sizes
def conv_kernel(
    x, w0, w1, a, wa0, wa1, b, wb0, wb1, y0, y1, extra0, extra1, aux0, aux1, act0, act1, m_ptr, dm_ptr,
    rest_y0, rest_y1, rest_aux0, rest_aux1, rest_act0, rest_act1,
    N, H, W, stride_m, scale, scale_aux, scale_act, rest_scale_act,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, REST: tl.constexpr,
    TAPS: tl.constexpr, TAPS_A: tl.constexpr, TRANSPOSED: tl.constexpr, STRIDE_W: tl.constexpr, STRIDE_WA: tl.constexpr,
    EPILOGUE: tl.constexpr, CLIP: tl.constexpr, UP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BLOCK_K: tl.constexpr,
    BOXES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[N, H, W, K]` with 9 or 1 TAPS (4 or 16 of phases, 3 of a part), then sources a and b with TAPS_A, if given.

    See `finish` for the EPILOGUEs. The last REST of the C channels are tensors of their own: their programs come after those of the others.
    """
    PHASES: tl.constexpr = (4 if TAPS_A == 1 else 3) if UP == "part" else 4 if UP == "output" else 1
    PARTS: tl.constexpr = PHASES if UP == "part" else 1
    phase, program = tl.program_id(0) % PHASES, tl.program_id(0) // PHASES
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
    FIRST: tl.constexpr = C - REST
    tiles_first: tl.constexpr = (FIRST + BN0 + BN1 - 1) // (BN0 + BN1)
    tiles_c: tl.constexpr = tiles_first + (REST + BN0 + BN1 - 1) // (BN0 + BN1)
    c, tile = program % tiles_c * (BN0 + BN1), program // tiles_c
    n, part = tile // (tiles_h * tiles_w) * BI, tile % (tiles_h * tiles_w)
    h, w = part // tiles_w * BH, part % tiles_w * BW
    own = c  # the channel in its tensor
    if REST > 0:
        own = tl.where(program % tiles_c < tiles_first, c, c - tiles_first * (BN0 + BN1))
        c = tl.where(program % tiles_c < tiles_first, c, FIRST + own)

    acc0 = tl.zeros([BN0, BI * BH * BW], tl.float32)
    acc1 = tl.zeros([BN1 if BN1 > 0 else 1, BI * BH * BW], tl.float32)
    acc0, acc1 = accumulate(
        acc0, acc1, x, w0, w1, n, h, w, c, phase, N, H, W,
        K, C, STRIDE_W, TAPS, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES, PARTS,
    )  # fmt: skip
    if a is not None:
        acc0, acc1 = accumulate(
            acc0, acc1, a, wa0, wa1, n, h, w, c, phase, N, H, W,
            KA, C, STRIDE_WA, TAPS_A, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES, PARTS,
        )  # fmt: skip
    if b is not None:
        acc0, acc1 = accumulate(
            acc0, acc1, b, wb0, wb1, n, h, w, c, phase, N, H, W,
            KB, C, STRIDE_WA, TAPS_A, TRANSPOSED, BI, BH, BW, BN0, BN1, BLOCK_K, BOXES, PARTS,
        )  # fmt: skip
    if a is None:
        factor = scale
    else:  # in quarters it would spill, and without sources it would here
        acc0, acc1, factor = acc0 * scale, acc1 * scale, 1.0
    if REST > 0 and program % tiles_c >= tiles_first:
        finish_both(
            acc0, acc1, rest_y0, rest_y1, None, None, rest_aux0, rest_aux1, rest_act0, rest_act1, m_ptr, dm_ptr,
            n, h, w, own, part, N, H, W, stride_m, factor, scale_aux, rest_scale_act,
            REST, EPILOGUE, None, BI, BH, BW, BN0, BN1, BOXES, STAGES, phase, UP,
        )  # fmt: skip
    else:
        finish_both(
            acc0, acc1, y0, y1, extra0, extra1, aux0, aux1, act0, act1, m_ptr, dm_ptr,
            n, h, w, own, part, N, H, W, stride_m, factor, scale_aux, scale_act,
            FIRST, EPILOGUE, CLIP, BI, BH, BW, BN0, BN1, BOXES, STAGES, phase, UP,
        )  # fmt: skip


@triton.jit
def finish_both(
    acc0, acc1, y0, y1, extra0, extra1, aux0, aux1, act0, act1, m_ptr, dm_ptr,
    n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BOXES: tl.constexpr,
    STAGES: tl.constexpr, phase, UP: tl.constexpr,
):  # fmt: skip
    if BN1 > 0:  # the smaller accumulator first: fewer registers
        finish(
            acc1, y1, extra1, aux1, act1, m_ptr, dm_ptr, n, h, w, c + BN0, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN1, BOXES, STAGES, phase, UP,
        )  # fmt: skip
    finish(
        acc0, y0, extra0, aux0, act0, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
        C, EPILOGUE, CLIP, BI, BH, BW, BN0, BOXES, STAGES, phase, UP,
    )  # fmt: skip


@triton.jit
def accumulate(
    acc0, acc1, x, w0, w1, n, h, w, c, phase, N, H, W,
    K: tl.constexpr, C: tl.constexpr, STRIDE_W: tl.constexpr, TAPS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN0: tl.constexpr, BN1: tl.constexpr, BLOCK_K: tl.constexpr,
    BOXES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add one source's products: taps one after the other, each over its channels.

    4 TAPS are those of a phase; 16 those of all, x having twice the height and width; 3 those of a part. Of 4 PARTS the last
    has the sources of one tap, and nothing else.
    """
    BORDER: tl.constexpr = 1 if TAPS > 1 else 0
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    count = TAPS * steps
    if not BOXES and TAPS * steps > 9 and TAPS * steps < 36:  # of known length it is unrolled, and two of them spill
        count = tl.where(N > 0, count, 0)
    if PARTS == 4:
        count = tl.where(phase < 3, 0, count) if TAPS == 1 else tl.where(phase < 3, count, 0)
    for step in range(count):
        tap, k = step // steps, step % steps * BLOCK_K
        if TAPS == 4 or TAPS == 3:
            tap += TAPS * phase
        if TAPS == 4 or TAPS == 16:  # the row phase, the column phase, and their taps
            dh, dw = tap // 8 + tap // 2 % 2 - 1, tap // 4 % 2 + tap % 2 - 1
        else:
            dh, dw = tap // 3 - BORDER, tap % 3 - BORDER
        if TRANSPOSED:
            tap = TAPS - 1 - tap
        pixels = load_pixels(x, n, h + dh, w + dw, k, N, H, W, K, BI, BH, BW, BLOCK_K, BOXES, tap // 4, TAPS == 16).T  # [BLOCK_K, P]
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
