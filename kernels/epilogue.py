"""What follows a convolution in its kernel: from an accumulator [channels, pixels] to memory.

A loop over quarters of the pixels, so that its loads are prefetched and its registers few.
"""

import triton
import triton.language as tl

from kernels.jit import mp_silu, mp_silu_grad
from kernels.pixels import load_pixels, load_repeated, store_pixels


@triton.jit
def finish(
    acc, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr, STAGES: tl.constexpr,
    phase, UP: tl.constexpr,
):  # fmt: skip
    """From the accumulator [BN, P] to memory. With u = scale·acc, by EPILOGUE:

    sum: y = u + scale_aux·aux, clipped, the latter two if given; extra = MP-SiLU(scale_act·y) if given.
    silu: y = MP-SiLU(u·m); extra = u if given.
    residual_silu_grad: y = u·MP-SiLU′(scale_act·act)·scale_act + scale_aux·aux, 0 where act was clipped.
    silu_grad: y = du and dm of the silu above for the gradient u of its result, aux being its u. dm by parts, one for
    each quarter.

    UP = "output": y and extra have twice the height and width, and this is one `phase` of theirs; "gradient": aux has, and
    is summed over 2 × 2; "residual": aux has half of them, and is repeated; "part": y is one of `[parts, N, H, W, C]`, which
    another pass adds.
    """
    q0, q1, q2, q3 = quarters(acc, BN, BI * BH * BW)
    if aux is None and extra is None:  # nothing to prefetch, and registers for four quarters at once
        finish_quarter(
            q0, 0, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES, phase, UP,
        )  # fmt: skip
        finish_quarter(
            q1, 1, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES, phase, UP,
        )  # fmt: skip
        finish_quarter(
            q2, 2, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES, phase, UP,
        )  # fmt: skip
        finish_quarter(
            q3, 3, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES, phase, UP,
        )  # fmt: skip
    else:
        for s in tl.range(0, 4, num_stages=STAGES):
            quarter = tl.where(s < 2, tl.where(s < 1, q0, q1), tl.where(s < 3, q2, q3))
            finish_quarter(
                quarter, s, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
                C, EPILOGUE, CLIP, BI, BH, BW, BN, BOXES, phase, UP,
            )  # fmt: skip


@triton.jit
def finish_quarter(
    acc, s, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr,
    phase, UP: tl.constexpr,
):  # fmt: skip
    """Quarter s of the pixels, [BN, P/4]: whole rows of one image, or whole images."""
    QUARTERS: tl.constexpr = 4 // BI if BI < 4 else 1  # of one image
    QI: tl.constexpr = BI // 4 if BI > 4 else 1
    QH: tl.constexpr = BH // QUARTERS
    u = acc * scale
    image, row = n + s // QUARTERS * QI, h + s % QUARTERS * QH
    if EPILOGUE == "silu":
        if extra is not None:
            store_pixels(extra, u, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES, phase, UP)
        value = mp_silu(modulated(u, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN))
    elif EPILOGUE == "sum":
        value = u
        if aux is not None and UP == "residual":
            value += load_repeated(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32) * scale_aux
        elif aux is not None:
            value += load_pixels(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32) * scale_aux
        if CLIP is not None:
            value = tl.clamp(value, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
    elif EPILOGUE == "residual_silu_grad":
        before = load_pixels(act, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32)
        value = u * mp_silu_grad(before * scale_act) * scale_act
        for p in tl.static_range(4 if UP == "gradient" else 1):
            main = load_pixels(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES, p, UP == "gradient")
            value += main.T.to(tl.float32) * scale_aux
        if CLIP is not None:
            value = tl.where(tl.abs(before) < CLIP, value, 0.0)
    else:
        before = load_pixels(aux, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES).T.to(tl.float32)
        dt = u * mp_silu_grad(modulated(before, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN))
        parts = QUARTERS * tl.cdiv(H, BH) * tl.cdiv(W, BW)
        store_sums(dm_ptr, dt * before, image, part * QUARTERS + s % QUARTERS, parts, c, N, C, QI, QH * BW, BN)
        value = modulated(dt, m_ptr, image, c, N, stride_m, C, QI, QH * BW, BN)
    store_pixels(y, value, image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES, phase, UP)
    if EPILOGUE == "sum" and extra is not None:  # last: one result's registers at a time
        tl.static_assert(UP != "output")
        rounded = value.to(extra.dtype if BOXES else extra.dtype.element_ty).to(tl.float32)
        store_pixels(extra, mp_silu(rounded * scale_act), image, row, w, c, N, H, W, C, QI, QH, BW, BN, BOXES)


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


@triton.jit
def epilogue_kernel(
    u, y, extra, aux, act, m_ptr, dm_ptr,
    N, H, W, stride_m, scale, scale_aux, scale_act,
    C: tl.constexpr, EPILOGUE: tl.constexpr, CLIP: tl.constexpr, UP: tl.constexpr,
    BI: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What `conv_kernel` does after its loop, for an accumulator in memory, the sum of the PARTS of u `[PARTS, N, H, W, C]`."""
    tiles_h, tiles_w = tl.cdiv(H, BH), tl.cdiv(W, BW)
    tiles_c: tl.constexpr = (C + BN - 1) // BN
    c, tile = tl.program_id(0) % tiles_c * BN, tl.program_id(0) // tiles_c
    n, part = tile // (tiles_h * tiles_w) * BI, tile % (tiles_h * tiles_w)
    h, w = part // tiles_w * BH, part % tiles_w * BW
    QUARTERS: tl.constexpr = 4 // BI if BI < 4 else 1  # of one image
    QI: tl.constexpr = BI // 4 if BI > 4 else 1
    QH: tl.constexpr = BH // QUARTERS
    size = tl.cast(N, tl.int64) * H * W * C
    for s in tl.static_range(4):
        image, row = n + s // QUARTERS * QI, h + s % QUARTERS * QH
        acc = load_pixels(u, image, row, w, c, N, H, W, C, QI, QH, BW, BN, False).to(tl.float32)
        for p in tl.static_range(1, PARTS):
            acc += load_pixels(u + p * size, image, row, w, c, N, H, W, C, QI, QH, BW, BN, False)
        finish_quarter(
            acc.T, s, y, extra, aux, act, m_ptr, dm_ptr, n, h, w, c, part, N, H, W, stride_m, scale, scale_aux, scale_act,
            C, EPILOGUE, CLIP, BI, BH, BW, BN, False, 0, UP,
        )  # fmt: skip
