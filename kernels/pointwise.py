"""Pointwise ops that no convolution absorbs: MP-SiLU, MP-Cat with MP-SiLU, MP-Sum with clip. Each input is read once.

P pixels in all images, C channels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels import jit as device
from kernels.checks import check_activation, check_dense, check_even, check_like, check_shape
from kernels.jit import launch
from kernels.reference import cat_scales
from kernels.registration import register, register_derivative

BLOCK = 4096  # elements per program: 32 per thread, four 16-byte loads in flight


@triton.jit
def mp_silu_kernel(x_ptr, y_ptr, size, scale, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < size).to(tl.float32)
    tl.store(y_ptr + offs, device.mp_silu(x * scale).to(y_ptr.dtype.element_ty), offs < size)


def mp_silu_triton(x: Tensor, scale: float = 1.0) -> Tensor:
    y = torch.empty_like(x)
    launch(mp_silu_kernel, (triton.cdiv(x.numel(), BLOCK),), x, y, x.numel(), scale, BLOCK=BLOCK, num_warps=4)
    return y


@triton.jit
def mp_silu_backward_kernel(g_ptr, x_ptr, dx_ptr, size, scale, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < size).to(tl.float32)
    g = tl.load(g_ptr + offs, offs < size).to(tl.float32)
    tl.store(dx_ptr + offs, (g * device.mp_silu_grad(x * scale) * scale).to(dx_ptr.dtype.element_ty), offs < size)


def mp_silu_backward_triton(g: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    dx = torch.empty_like(x)
    launch(mp_silu_backward_kernel, (triton.cdiv(x.numel(), BLOCK),), g, x, dx, x.numel(), scale, BLOCK=BLOCK, num_warps=4)
    return dx


@triton.jit
def mp_sum_kernel(
    a_ptr, b_ptr, y_ptr, size,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Eq. 88, then the clip."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offs, offs < size).to(tl.float32)
    b = tl.load(b_ptr + offs, offs < size).to(tl.float32)
    y = a * SCALE_A + b * SCALE_B
    if CLIP is not None:
        y = tl.clamp(y, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), offs < size)


def mp_sum_triton(a: Tensor, b: Tensor, t: float, clip: float | None) -> Tensor:
    y, (scale_a, scale_b) = torch.empty_like(a), eager.sum_scales(t)
    grid = (triton.cdiv(a.numel(), BLOCK),)
    launch(mp_sum_kernel, grid, a, b, y, a.numel(), SCALE_A=scale_a, SCALE_B=scale_b, CLIP=clip, BLOCK=BLOCK, num_warps=4)
    return y


@triton.jit
def mp_sum_backward_kernel(
    g_ptr, y_ptr, da_ptr, db_ptr, size,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + offs, offs < size).to(tl.float32)
    if CLIP is not None:
        y = tl.load(y_ptr + offs, offs < size).to(tl.float32)
        g = tl.where(tl.abs(y) < CLIP, g, 0.0)
    tl.store(da_ptr + offs, (g * SCALE_A).to(da_ptr.dtype.element_ty), offs < size)
    tl.store(db_ptr + offs, (g * SCALE_B).to(db_ptr.dtype.element_ty), offs < size)


def mp_sum_backward_triton(g: Tensor, y: Tensor | None, t: float, clip: float | None) -> tuple[Tensor, Tensor]:
    da, db, (scale_a, scale_b) = torch.empty_like(g), torch.empty_like(g), eager.sum_scales(t)
    args = (g, y, da, db, g.numel())
    grid = (triton.cdiv(g.numel(), BLOCK),)
    launch(mp_sum_backward_kernel, grid, *args, SCALE_A=scale_a, SCALE_B=scale_b, CLIP=clip, BLOCK=BLOCK, num_warps=4)
    return da, db


@triton.jit
def cat_silu_kernel(
    a_ptr, b_ptr, y_ptr, P, blocks_a,
    CA: tl.constexpr, CB: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MP-SiLU of MP-Cat (Eq. 103): the first `blocks_a` programs read a, the others b."""
    block = tl.program_id(0)
    if block < blocks_a:
        cat_silu_source(a_ptr, y_ptr, block, P, CA, CA + CB, 0, SCALE_A, BLOCK)
    else:
        cat_silu_source(b_ptr, y_ptr, block - blocks_a, P, CB, CA + CB, CA, SCALE_B, BLOCK)


@triton.jit
def cat_silu_source(
    x_ptr, y_ptr, block, P, CX: tl.constexpr, C: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    offs, offs_y, mask = both_offsets(block, P, CX, C, START, BLOCK)
    x = tl.load(x_ptr + offs, mask).to(tl.float32)
    tl.store(y_ptr + offs_y, device.mp_silu(x * SCALE).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def both_offsets(block, P, CX: tl.constexpr, C: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr):
    """Elements of a source `[P, CX]`, and where they lie in the channels from START of `[P, C]`."""
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offs, offs // CX * C + START + offs % CX, offs < tl.cast(P, tl.int64) * CX


def cat_silu_triton(a: Tensor, b: Tensor, t: float) -> Tensor:
    y = a.new_empty(*a.shape[:3], a.shape[3] + b.shape[3])
    _launch_cat(cat_silu_kernel, t, a, b, a, b, y)
    return y


@triton.jit
def cat_silu_backward_kernel(
    g_ptr, a_ptr, b_ptr, da_ptr, db_ptr, P, blocks_a,
    CA: tl.constexpr, CB: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < blocks_a:
        cat_silu_backward_source(g_ptr, a_ptr, da_ptr, block, P, CA, CA + CB, 0, SCALE_A, BLOCK)
    else:
        cat_silu_backward_source(g_ptr, b_ptr, db_ptr, block - blocks_a, P, CB, CA + CB, CA, SCALE_B, BLOCK)


@triton.jit
def cat_silu_backward_source(
    g_ptr, x_ptr, dx_ptr, block, P,
    CX: tl.constexpr, C: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs, offs_g, mask = both_offsets(block, P, CX, C, START, BLOCK)
    x = tl.load(x_ptr + offs, mask).to(tl.float32) * SCALE
    g = tl.load(g_ptr + offs_g, mask).to(tl.float32) * SCALE
    tl.store(dx_ptr + offs, (g * device.mp_silu_grad(x)).to(dx_ptr.dtype.element_ty), mask)


def cat_silu_backward_triton(g: Tensor, a: Tensor, b: Tensor, t: float) -> tuple[Tensor, Tensor]:
    da, db = torch.empty_like(a), torch.empty_like(b)
    _launch_cat(cat_silu_backward_kernel, t, a, b, g, a, b, da, db)
    return da, db


def _launch_cat(kernel, t: float, a: Tensor, b: Tensor, *tensors: Tensor) -> None:
    """First the programs of a, then those of b."""
    (*_, ca), (*_, cb) = a.shape, b.shape
    scale_a, scale_b = cat_scales(ca, cb, t)
    blocks_a, blocks_b = triton.cdiv(a.numel(), BLOCK), triton.cdiv(b.numel(), BLOCK)
    launch(
        kernel, (blocks_a + blocks_b,), *tensors, a.numel() // ca, blocks_a,
        CA=ca, CB=cb, SCALE_A=scale_a, SCALE_B=scale_b, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _fake_pair(g: Tensor, *_: Tensor | float | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(g)


_mp_silu = register("mp_silu", eager.mp_silu, lambda x, scale=1.0: torch.empty_like(x), mp_silu_triton)
_mp_silu_backward = register(
    "mp_silu_backward", eager.mp_silu_backward, lambda g, x, scale=1.0: torch.empty_like(x), mp_silu_backward_triton
)
_mp_sum = register("mp_sum", eager.mp_sum, lambda a, *_: torch.empty_like(a), mp_sum_triton)
_mp_sum_backward = register("mp_sum_backward", eager.mp_sum_backward, _fake_pair, mp_sum_backward_triton)
_cat_silu = register(
    "cat_silu", eager.cat_silu, lambda a, b, t: a.new_empty(*a.shape[:3], a.shape[3] + b.shape[3]), cat_silu_triton
)
_cat_silu_backward = register(
    "cat_silu_backward",
    eager.cat_silu_backward,
    lambda g, a, b, t: (torch.empty_like(a), torch.empty_like(b)),
    cat_silu_backward_triton,
)


def _save_mp_silu(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def _save_mp_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    *_, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(None if ctx.clip is None else output)


def _mp_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_mp_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip), None, None


def _save_cat_silu(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    a, b, ctx.t = inputs
    ctx.save_for_backward(a, b)


register_derivative(_mp_silu, _save_mp_silu, lambda ctx, g: (_mp_silu_backward(g.contiguous(), *ctx.saved_tensors, ctx.scale), None))
register_derivative(_mp_sum, _save_mp_sum, _mp_sum_autograd)
register_derivative(_cat_silu, _save_cat_silu, lambda ctx, g: (*_cat_silu_backward(g.contiguous(), *ctx.saved_tensors, ctx.t), None))


def mp_silu(x: Tensor, scale: float = 1.0) -> Tensor:
    """`silu(scale·x) / 0.596`: unit-variance scale·x gives unit mean square. Eq. 81. Any shape."""
    check_dense("x", x)
    return _mp_silu(x, scale)


def mp_sum(a: Tensor, b: Tensor, t: float, clip: float | None = None) -> Tensor:
    """`((1−t)·a + t·b) / sqrt((1−t)² + t²)`, Eq. 88, clamped to ±clip if given (where the gradient is 0). Any shape."""
    check_dense("a", a)
    check_dense("b", b)
    check_shape("b", b, a.shape)
    check_like("b", b, "a", a)
    return _mp_sum(a, b, t, clip)


def cat_silu(a: Tensor, b: Tensor, t: float) -> Tensor:
    """MP-SiLU of MP-Cat: `[N, H, W, Ca]`, `[N, H, W, Cb]` → `[N, H, W, Ca+Cb]`."""
    check_activation("a", a)
    check_activation("b", b)
    check_shape("b", b, (*a.shape[:3], b.shape[3]))
    check_like("b", b, "a", a)
    return _cat_silu(a, b, t)


def resample(x: Tensor, filter: Sequence[float] = (1, 1), mode: str = "keep") -> Tensor:
    """Halve ("down", H and W even) or double ("up") H and W with a separable even-length filter, or "keep" them."""
    check_activation("x", x)
    if mode == "down":
        check_even("x", x)
    return eager.resample(x, filter, mode).contiguous()
