"""Pixel norm with MP-SiLU, optionally behind a 2×2 mean: the entry of an encoder block, one pass over memory each way.

P output pixels in all images, C channels. Saves its outputs, which their consumers save too, and one fp32 number per
pixel, the rms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_activation, check_even
from kernels.jit import EPS, launch, mp_silu, mp_silu_grad
from kernels.registration import register, register_derivative

ELEMENTS = 4096  # per program: 32 per thread, four 16-byte loads in flight
MAX_CHANNELS = 8192  # a pixel lies in the registers of one program


@triton.jit
def pixel_norm_silu_kernel(
    x_ptr, y_ptr, s_ptr, rms_ptr,
    P, width,
    C: tl.constexpr, DOWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = x / (ε + rms(x)) over the channels of each pixel (Eq. 30) and its MP-SiLU, of the 2×2 mean of x if DOWN."""
    offs_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)  # [BLOCK_P]
    offs_c = tl.arange(0, BLOCK_C)[None, :]
    mask = (offs_p[:, None] < P) & (offs_c < C)  # [BLOCK_P, BLOCK_C]
    if DOWN:
        x = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for corner in tl.static_range(4):
            offs_x = source_pixel(offs_p, width, corner)[:, None] * C + offs_c
            x += tl.load(x_ptr + offs_x, mask, other=0.0).to(tl.float32)
        x *= 0.25
    else:
        x = tl.load(x_ptr + offs_p[:, None] * C + offs_c, mask, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(x * x, axis=1) / C)  # [BLOCK_P]
    y = (x * (1 / (rms + EPS))[:, None]).to(y_ptr.dtype.element_ty)
    offs = offs_p[:, None] * C + offs_c
    tl.store(y_ptr + offs, y, mask)
    tl.store(s_ptr + offs, mp_silu(y.to(tl.float32)).to(s_ptr.dtype.element_ty), mask)
    tl.store(rms_ptr + offs_p, rms, offs_p < P)


@triton.jit
def source_pixel(offs_p, width, corner: tl.constexpr):
    """Index of one of the four pixels under each pixel of a half-sized image of `width` columns."""
    rows, columns = offs_p // width, offs_p % width
    return (2 * rows + corner // 2) * (2 * width) + 2 * columns + corner % 2


def pixel_norm_silu_triton(x: Tensor, down: bool) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(shape_after(x, down), dtype=x.dtype, device=x.device)
    s, rms = torch.empty_like(y), torch.empty(y.shape[:3], dtype=torch.float32, device=x.device)
    _launch(pixel_norm_silu_kernel, y, down, x, y, s, rms)
    return y, s, rms


@triton.jit
def pixel_norm_silu_backward_kernel(
    gy_ptr, gs_ptr, y_ptr, rms_ptr, other_ptr, x_ptr, dx_ptr,
    P, width, scale,
    CLIP: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = (g − y · ⟨y,g⟩/C · (rms+ε)/rms) / (rms+ε), spec §1.16, with g = scale·gy + silu′(y)·gs; a quarter to each pixel if DOWN.

    To which the gradient `other` of x is added, and all is 0 where |x| ≥ CLIP, if these are given.
    """
    offs_p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)  # [BLOCK_P]
    offs_c = tl.arange(0, BLOCK_C)[None, :]
    mask = (offs_p[:, None] < P) & (offs_c < C)  # [BLOCK_P, BLOCK_C]
    offs = offs_p[:, None] * C + offs_c
    y = tl.load(y_ptr + offs, mask, other=0.0).to(tl.float32)
    g = tl.load(gs_ptr + offs, mask, other=0.0).to(tl.float32) * mp_silu_grad(y)
    g += tl.load(gy_ptr + offs, mask, other=0.0).to(tl.float32) * scale
    rms = tl.load(rms_ptr + offs_p, offs_p < P, other=1.0)
    inv = 1 / (rms + EPS)
    slope = tl.sum(y * g, axis=1) / C / tl.where(rms == 0, 1.0, rms * inv)  # 0 where x = 0
    dx = (g - y * slope[:, None]) * inv[:, None]
    if DOWN:
        for corner in tl.static_range(4):
            offs_x = source_pixel(offs_p, width, corner)[:, None] * C + offs_c
            add_and_clip(dx * 0.25, other_ptr, x_ptr, dx_ptr, offs_x, mask, CLIP)
    else:
        add_and_clip(dx, other_ptr, x_ptr, dx_ptr, offs, mask, CLIP)


@triton.jit
def add_and_clip(dx, other_ptr, x_ptr, dx_ptr, offs, mask, CLIP: tl.constexpr):
    if other_ptr is not None:
        dx += tl.load(other_ptr + offs, mask, other=0.0).to(tl.float32)
    if CLIP is not None:
        x = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
        dx = tl.where(tl.abs(x) < CLIP, dx, 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask)


def pixel_norm_silu_backward_triton(
    gy: Tensor, gs: Tensor, y: Tensor, rms: Tensor, down: bool, scale: float = 1.0,
    other: Tensor | None = None, x: Tensor | None = None, clip: float | None = None,
) -> Tensor:  # fmt: skip
    n, h, w, c = y.shape
    dx = y.new_empty(n, 2 * h, 2 * w, c) if down else torch.empty_like(y)
    _launch(pixel_norm_silu_backward_kernel, y, down, gy, gs, y, rms, other, x, dx, scale=scale, CLIP=clip)
    return dx


def _launch(kernel, half: Tensor, down: bool, *tensors: Tensor | None, **options: float | None) -> None:
    """Over the pixels of `half`, which has the size of the outputs."""
    n, h, w, c = half.shape
    block_c = triton.next_power_of_2(c)
    block_p = max(ELEMENTS // block_c, 1)
    grid = (triton.cdiv(n * h * w, block_p),)
    launch(kernel, grid, *tensors, n * h * w, w, **options, C=c, DOWN=down, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4)


def shape_after(x: Tensor, down: bool) -> tuple[int, ...]:
    n, h, w, c = x.shape
    return (n, h // 2, w // 2, c) if down else (n, h, w, c)


def _fake(x: Tensor, down: bool) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(shape_after(x, down))
    return y, torch.empty_like(y), x.new_empty(y.shape[:3], dtype=torch.float32)


def _fake_backward(gy: Tensor, gs: Tensor, y: Tensor, rms: Tensor, down: bool, *_: Tensor | float | None) -> Tensor:
    n, h, w, c = y.shape
    return y.new_empty(n, 2 * h, 2 * w, c) if down else torch.empty_like(y)


def refuses(x: Tensor, *_: Tensor | float | None) -> str | None:
    return f"{x.shape[-1]} channels, the kernel takes {MAX_CHANNELS}" if x.shape[-1] > MAX_CHANNELS else None


_norm = register("pixel_norm_silu", eager.pixel_norm_silu, _fake, pixel_norm_silu_triton, refuses=refuses)
_norm_backward = register(
    "pixel_norm_silu_backward", eager.pixel_norm_silu_backward, _fake_backward, pixel_norm_silu_backward_triton, refuses=refuses
)


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    y, _, rms = output
    ctx.down = inputs[1]
    ctx.save_for_backward(y, rms)


def _autograd(ctx: FunctionCtx, gy: Tensor | None, gs: Tensor | None, _: None) -> tuple[Tensor, None]:
    y, rms = ctx.saved_tensors
    gy, gs = (torch.zeros_like(y) if g is None else g.contiguous() for g in (gy, gs))
    return _norm_backward(gy, gs, y, rms, ctx.down), None


register_derivative(_norm, _save, _autograd)


def pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise each pixel of x `[N, H, W, C]` over its channels (Eq. 30): the normalised x and its MP-SiLU."""
    check_activation("x", x)
    return _norm(x, False)[:2]


def down_pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """`pixel_norm_silu` behind a 2×2 mean: `[N, H, W, C]`, H and W even → two tensors `[N, H/2, W/2, C]`."""
    check_activation("x", x)
    check_even("x", x)
    return _norm(x, True)[:2]
