"""Weight preparation: raw fp32 weight → normalised, scaled, cast, laid out `[taps, Cout, Cin]`; and its derivative.

One program per row of a weight `[Cout, Cin, k, k]`, in two passes: the second finds the row in cache. L = Cin·taps is
the length of a raw row; `factors` are `reference.Factors`. `kernels.prepared` runs the same row functions over all weights
of a network.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_floating, check_like
from kernels.jit import EPS, launch
from kernels.reference import NO_FACTORS, Factors
from kernels.registration import register, register_derivative


class PreparedWeight(NamedTuple):
    """What the ops take in place of a weight: its value, and the fp32 leaf that receives its gradient.

    `master` has the value's shape and no memory of its own. Autograd would cast a gradient to the type of the value.
    """

    value: Tensor
    master: Tensor


Weight = Tensor | PreparedWeight


def unpack(w: Weight) -> tuple[Tensor, Tensor | None]:
    """The value of a weight, and the leaf for its gradient if that is another."""
    return (w, None) if isinstance(w, Tensor) else w


def split_gradient(dw: Tensor, master: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a weight's value and of its master."""
    return (dw, None) if master is None else (None, dw)


BLOCK = 2048  # elements per iteration: with 4 warps, 16 per thread, so that many rows are in flight per multiprocessor


@triton.jit
def prepare_row(
    w_ptr, y_ptr, gain, factors, row, row_out, Cin, Cout,
    TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """y = factor · gain · w / (‖w‖ + ε·√L), Eq. 66, whose √L cancels against that of the rms. Returns ‖w‖."""
    start = row_offset(row, Cin * TAPS, ALIGNED)
    square = tl.zeros([BLOCK], tl.float32)
    for first in range(0, Cin * TAPS, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + start + offs, offs < Cin * TAPS, other=0.0)
        square += w * w
    length = tl.sqrt(tl.sum(square, axis=0))
    lay_out_row(w_ptr, y_ptr, length, gain, factors, row, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK, UP)
    return length


@triton.jit
def lay_out_row(
    w_ptr, y_ptr, length, gain, factors, row, row_out, Cin, Cout,
    TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr = False,
):  # fmt: skip
    """The second pass of `prepare_row`, for a row of known length ‖w‖. UP: 16 taps of four phases, see `reference.up_weight`."""
    start = row_offset(row, Cin * TAPS, ALIGNED)
    scale = gain / (length + tl.sqrt(tl.cast(Cin * TAPS, tl.float32)) * EPS)
    for first in range(0, Cin, BLOCK // taps_block(TAPS)):
        offs_w, offs_y, mask = both_layouts(first, start, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK)
        factor = factor_of(first, factors, TAPS, BLOCK)
        if UP:
            offs_c, t = first + tl.arange(0, BLOCK // 16)[:, None], tl.arange(0, 16)[None, :]
            a, b, e, f = t // 8, t // 4 % 2, t // 2 % 2, t % 2  # phases and taps of rows and columns
            mask, y = offs_c + t * 0 < Cin, tl.zeros([BLOCK // 16, 16], tl.float32)
            for i in tl.static_range(2):  # two where phase and tap differ
                for j in tl.static_range(2):
                    tap = (e * (1 + a) + i) * 3 + f * (1 + b) + j
                    part = mask & (i <= (a ^ e)) & (j <= (b ^ f))
                    y += tl.where(part, tl.load(w_ptr + start + offs_c * TAPS + tap, part, other=0.0) * scale, 0.0)
        else:
            y = tl.load(w_ptr + offs_w, mask, other=0.0) * scale
        tl.store(y_ptr + offs_y, (y * factor).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def project_row(
    g_ptr, w_ptr, dw_ptr, length, gain, factors, row, row_out, Cin, Cout,
    TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """dw = gain/d · (g − w·⟨w,g⟩/(‖w‖·d)) with d = ‖w‖ + ε·√L and g = factor · dy. Returns the row's share ⟨w,g⟩/d of the
    gain's gradient."""
    start = row_offset(row, Cin * TAPS, ALIGNED)
    product = tl.zeros([BLOCK // taps_block(TAPS), taps_block(TAPS)], tl.float32)
    for first in range(0, Cin, BLOCK // taps_block(TAPS)):
        offs_w, offs_g, mask = both_layouts(first, start, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK)
        w = tl.load(w_ptr + offs_w, mask, other=0.0)
        g = load_taps(g_ptr, offs_g, first, row_out, Cin, Cout, mask, ALIGNED, BLOCK, UP)
        product += w * g * factor_of(first, factors, TAPS, BLOCK)
    dot = tl.sum(tl.sum(product, axis=1), axis=0)
    d = length + tl.sqrt(tl.cast(Cin * TAPS, tl.float32)) * EPS
    slope = dot / tl.where(length == 0, 1.0, length * d)  # ⟨w,g⟩ = 0 where w = 0
    for first in range(0, Cin, BLOCK // taps_block(TAPS)):
        offs_w, offs_g, mask = both_layouts(first, start, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK)
        w = tl.load(w_ptr + offs_w, mask, other=0.0)
        g = load_taps(g_ptr, offs_g, first, row_out, Cin, Cout, mask, ALIGNED, BLOCK, UP) * factor_of(first, factors, TAPS, BLOCK)
        tl.store(dw_ptr + offs_w, (g - w * slope) * (gain / d), mask)
    return dot / d


@triton.jit
def load_taps(
    g_ptr, offs, first, row_out, Cin, Cout, mask, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr
):
    """The gradient of a prepared weight at `offs`. UP: of its 16 taps, those of the four phases that a tap of the 3×3 is part of."""
    if UP:
        offs_c, t = first + tl.arange(0, BLOCK // 16)[:, None], tl.arange(0, 16)[None, :]
        g = tl.zeros([BLOCK // 16, 16], tl.float32)
        for phase in tl.static_range(4):
            tap = 4 * phase + (t // 3 + 1 - phase // 2) // 2 * 2 + (t % 3 + 1 - phase % 2) // 2
            rows = (tap.to(tl.int64) * Cout + row_out) * Cin
            rows = tl.multiple_of(rows, (8, 8)) if ALIGNED else rows
            g += tl.load(g_ptr + rows + offs_c, mask, other=0.0).to(tl.float32)
        return g
    else:
        return tl.load(g_ptr + offs, mask, other=0.0).to(tl.float32)


@triton.jit
def factor_of(first, factors, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """That of each channel from `first`. Counted from there: `project_kernel` of 9 taps then keeps its 128 registers, not 144."""
    split, left, right = factors
    offs_c = tl.arange(0, BLOCK // taps_block(TAPS))[:, None]  # [channels, 1]
    return tl.where(offs_c < split - first, left, right)


@triton.jit
def row_offset(row, length, ALIGNED: tl.constexpr):
    """Where a row starts; ALIGNED promises a multiple of 8 elements, hence 16-byte accesses."""
    offset = row.to(tl.int64) * length
    return tl.multiple_of(offset, 8) if ALIGNED else offset


@triton.jit
def both_layouts(
    first, start, row_out, Cin, Cout, TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Offsets of the channels from `first` of one row: in `[Cout, Cin, taps]` and in `[taps, Cout, Cin]`."""
    offs_c = first + tl.arange(0, BLOCK // taps_block(TAPS))[:, None]  # [channels, 1]
    offs_t = tl.arange(0, taps_block(TAPS))[None, :]  # [1, taps]
    if TAPS == 1:
        rows = row_offset(row_out, Cin, ALIGNED)  # Triton 3.9 stops at a 2-D hint on what it folds to a number
    else:
        rows = (offs_t.to(tl.int64) * Cout + row_out) * Cin
        rows = tl.multiple_of(rows, (8, 8)) if ALIGNED else rows
    return start + offs_c * TAPS + offs_t, rows + offs_c, (offs_c < Cin) & (offs_t < TAPS)


@triton.constexpr_function
def taps_block(taps):
    """The next power of two."""
    return 16 if taps == 9 else 1


@triton.jit
def qkv_row(row, Cout, heads):
    """Where row (head, channel, q|k|v) of a qkv weight goes: (head, q|k|v, channel)."""
    depth = Cout // (3 * heads)
    return row // (3 * depth) * (3 * depth) + row % 3 * depth + row // 3 % depth


@triton.jit(do_not_specialize=["split"])
def mp_weight_kernel(
    w_ptr, gain_ptr, y_ptr, length_ptr, Cin, Cout, split, left, right,
    HEADS: tl.constexpr, TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    gain = 1.0 if gain_ptr is None else tl.load(gain_ptr)
    row_out = qkv_row(row, Cout, HEADS) if HEADS else row
    factors = (split, left, right)
    length = prepare_row(w_ptr, y_ptr, gain, factors, row, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK, UP)
    tl.store(length_ptr + row, length)


def mp_weight_triton(
    w: Tensor, gain: Tensor | None, dtype: torch.dtype, heads: int, up: bool, *factors: float
) -> tuple[Tensor, Tensor]:
    cout, cin = w.shape[:2]
    taps = w.shape[2:].numel()
    y, length = w.new_empty(16 if up else taps, cout, cin, dtype=dtype), w.new_empty(cout)
    args = (w.contiguous(), gain, y, length, cin, cout, *factors)
    launch(mp_weight_kernel, (cout,), *args, HEADS=heads, TAPS=taps, ALIGNED=cin % 8 == 0, BLOCK=BLOCK, UP=up, num_warps=4)
    return y, length


@triton.jit(do_not_specialize=["split"])
def mp_weight_backward_kernel(
    g_ptr, w_ptr, length_ptr, gain_ptr, dw_ptr, share_ptr, Cin, Cout, split, left, right,
    HEADS: tl.constexpr, TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    gain = 1.0 if gain_ptr is None else tl.load(gain_ptr)
    row_out = qkv_row(row, Cout, HEADS) if HEADS else row
    length, factors = tl.load(length_ptr + row), (split, left, right)
    share = project_row(g_ptr, w_ptr, dw_ptr, length, gain, factors, row, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK, UP)
    tl.store(share_ptr + row, share)


def mp_weight_backward_triton(
    g: Tensor, w: Tensor, length: Tensor, gain: Tensor | None, heads: int, *factors: float
) -> tuple[Tensor, Tensor]:
    cout, cin = w.shape[:2]
    w, shares = w.contiguous(), w.new_empty(cout)
    dw = torch.empty_like(w)
    args = (g.contiguous(), w, length, gain, dw, shares, cin, cout, *factors)
    constants = dict(HEADS=heads, TAPS=w.shape[2:].numel(), ALIGNED=cin % 8 == 0, BLOCK=BLOCK, UP=g.shape[0] == 16)
    launch(mp_weight_backward_kernel, (cout,), *args, **constants, num_warps=4)
    return dw, w.new_empty([0]) if gain is None else shares.sum().reshape(gain.shape)


def _refuses(*args: Tensor | int | torch.dtype | None) -> str | None:
    w = next(x for x in args if isinstance(x, Tensor) and x.ndim in (2, 4))
    if w.dtype != torch.float32:
        return f"a raw weight of {w.dtype}, the kernel takes fp32"
    taps = w.shape[2:].numel()
    return None if taps in (1, 9) else f"{taps} taps, the kernel takes 1 and 9"


def _fake(w: Tensor, gain: Tensor | None, dtype: torch.dtype, heads: int, up: bool, *factors: float) -> tuple[Tensor, Tensor]:
    return w.new_empty(16 if up else w.shape[2:].numel(), *w.shape[:2], dtype=dtype), w.new_empty(w.shape[0], dtype=eager.wide(w.dtype))


def _fake_backward(
    g: Tensor, w: Tensor, length: Tensor, gain: Tensor | None, heads: int, *factors: float
) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape), w.new_empty([0] if gain is None else gain.shape)


_mp_weight = register("mp_weight", eager.mp_weight, _fake, mp_weight_triton, refuses=_refuses)
_mp_weight_backward = register(
    "mp_weight_backward", eager.mp_weight_backward, _fake_backward, mp_weight_backward_triton, refuses=_refuses
)


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    w, gain, _, ctx.heads, _, *ctx.factors = inputs
    ctx.save_for_backward(w, output[1], gain)


def _autograd(ctx: FunctionCtx, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 8
    w, length, gain = ctx.saved_tensors
    dw, dgain = _mp_weight_backward(g, w, length, gain, ctx.heads, *ctx.factors)
    return dw, None if gain is None else dgain, *(None,) * 6


register_derivative(_mp_weight, _save, _autograd)


def mp_weight(
    w: Tensor,
    gain: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    heads: int = 0,
    up: bool = False,
    factors: Factors = NO_FACTORS,
) -> Tensor:
    """Raw fp32 weight `[Cout, Cin, k, k]` or `[Cout, Cin]` → prepared `[k·k, Cout, Cin]` in `dtype`. Eq. 66.

    Each row is normalised, scaled by `gain / sqrt(fan_in)` in fp32 and cast. `gain` is a learned scalar (Eq. 104)
    or None for 1. With `heads`, the rows of a qkv weight move from the checkpoint's order (head, channel, q|k|v)
    to (head, q|k|v, channel), which `cosine_attention` expects. `up` makes of a 3×3 weight the sums `[16, Cout, Cin]` that
    convolve behind an up-sampling: see `conv_silu_up`. `factors` are multiplied before the cast.
    """
    if w.ndim not in (2, 4) or (w.ndim == 4 and w.shape[2] != w.shape[3]) or 0 in w.shape[1:]:
        raise ValueError(f"w: expected [Cout, Cin] or [Cout, Cin, k, k], got {list(w.shape)}")
    if up and w.shape[2:] != (3, 3):
        raise ValueError(f"w: expected [Cout, Cin, 3, 3] behind an up-sampling, got {list(w.shape)}")
    check_floating("w", w.dtype)
    check_floating("dtype", dtype)
    if gain is not None:
        if gain.numel() != 1:
            raise ValueError(f"gain: expected one number, got {list(gain.shape)}")
        check_like("gain", gain, "w", w)
    if heads and w.shape[0] % (3 * heads):
        raise ValueError(f"w: {w.shape[0]} rows are not a multiple of 3 × {heads} heads")
    if not 0 <= factors.split <= w.shape[1]:
        raise ValueError(f"factors: expected a split of 0 to {w.shape[1]} input channels, got {factors.split}")
    return _mp_weight(w, gain, dtype, heads, up, *factors)[0]
