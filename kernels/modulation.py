"""Pointwise derivatives around convolutions, where no convolution's epilogue computes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import launch, mp_silu_grad
from kernels.sums import sum_parts

BLOCK = 4096  # elements per program: 32 per thread, four 16-byte loads in flight


@triton.jit
def masked_gradient_kernel(
    g_ptr, other_ptr, y_ptr, dx_ptr, size, SCALE: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + offs, offs < size).to(tl.float32) * SCALE
    if other_ptr is not None:
        g += tl.load(other_ptr + offs, offs < size).to(tl.float32)
    if CLIP is not None:
        y = tl.load(y_ptr + offs, offs < size).to(tl.float32)
        g = tl.where(tl.abs(y) < CLIP, g, 0.0)
    tl.store(dx_ptr + offs, g.to(dx_ptr.dtype.element_ty), offs < size)


def masked_gradient(
    g: Tensor, y: Tensor | None, scale: float, clip: float | None, other: Tensor | None = None
) -> Tensor:  # fmt: skip
    """scale·g + other where |y| < clip, else 0, NaN included."""
    dx = torch.empty_like(g)
    grid = (triton.cdiv(g.numel(), BLOCK),)
    launch(masked_gradient_kernel, grid, g, other, y, dx, g.numel(), SCALE=scale, CLIP=clip, BLOCK=BLOCK, num_warps=4)
    return dx


@triton.jit
def modulated_silu_backward_kernel(
    g_ptr, u_ptr, m_ptr, du_ptr, dm_ptr, P,
    C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """With v = MP-SiLU(u·m) of P pixels per image: du, and the sums of dm over BLOCK_P pixels."""
    blocks_c: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    block, row = tl.program_id(0) % blocks_c, tl.program_id(0) // blocks_c
    parts = tl.cdiv(P, BLOCK_P)
    image, part = row // parts, row % parts
    offs_p, offs_c = part * BLOCK_P + tl.arange(0, BLOCK_P), block * BLOCK_C + tl.arange(0, BLOCK_C)
    offs = image.to(tl.int64) * P * C + offs_p[:, None] * C + offs_c[None, :]
    mask = (offs_p < P)[:, None] & (offs_c < C)[None, :]
    u = tl.load(u_ptr + offs, mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offs, mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + image * C + offs_c, offs_c < C, other=0.0).to(tl.float32)[None, :]
    dt = g * mp_silu_grad(u * m)
    tl.store(du_ptr + offs, (dt * m).to(du_ptr.dtype.element_ty), mask)
    tl.store(dm_ptr + row.to(tl.int64) * C + offs_c, tl.sum(dt * u, axis=0), offs_c < C)


def modulated_silu_backward(g: Tensor, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """du and dm of MP-SiLU(u·m): g and u `[N, H, W, C]`, m `[N, C]`."""
    n, h, w, c = u.shape
    block_c = min(256, triton.next_power_of_2(c))
    block_p = BLOCK // block_c
    sums = m.new_empty(n, triton.cdiv(h * w, block_p), c, dtype=torch.float32)
    du, dm = torch.empty_like(u), torch.empty_like(m)
    launch(
        modulated_silu_backward_kernel, (n * sums.shape[1] * triton.cdiv(c, block_c),), g, u, m, du, sums, h * w,
        C=c, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    sum_parts(sums, dm)
    return du, dm
