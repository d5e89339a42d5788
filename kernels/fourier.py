"""Random Fourier features of numbers, one for each image. N images, C channels."""

import math

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_dense, check_like, check_shape
from kernels.eager import wide
from kernels.jit import launch
from kernels.registration import register, register_derivative

BLOCK = 256  # channels per program: with one warp 8 per thread
ROOT_2 = tl.constexpr(math.sqrt(2))


@triton.jit
def mp_fourier_kernel(x_ptr, freq_ptr, phase_ptr, y_ptr, C, BLOCK: tl.constexpr):
    """√2·cos(f·x + p), Eq. 75. tl.cos reduces its argument in full."""
    blocks = tl.cdiv(C, BLOCK)
    image, offs = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + image).to(tl.float32)
    f = tl.load(freq_ptr + offs, offs < C, other=0.0).to(tl.float32)
    p = tl.load(phase_ptr + offs, offs < C, other=0.0).to(tl.float32)
    y = tl.cos(x * f + p) * ROOT_2
    tl.store(y_ptr + image.to(tl.int64) * C + offs, y.to(y_ptr.dtype.element_ty), offs < C)


def mp_fourier_triton(x: Tensor, freqs: Tensor, phases: Tensor) -> Tensor:
    channels = len(freqs)
    y = x.new_empty(len(x), channels)
    grid = (len(x) * triton.cdiv(channels, BLOCK),)
    launch(mp_fourier_kernel, grid, x, freqs, phases, y, channels, BLOCK=BLOCK, num_warps=1)
    return y


_mp_fourier = register("mp_fourier", eager.mp_fourier, lambda x, freqs, phases: x.new_empty(len(x), len(freqs)), mp_fourier_triton)


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In plain PyTorch: training asks for none of it."""
    x, freqs, phases = (t.to(wide(t.dtype)) for t in ctx.saved_tensors)
    g = g * -math.sqrt(2) * (x[:, None] * freqs + phases).sin()
    return tuple(t.to(ctx.saved_tensors[0].dtype) for t in ((g * freqs).sum(1), (g * x[:, None]).sum(0), g.sum(0)))


register_derivative(_mp_fourier, _save, _autograd)


def mp_fourier(x: Tensor, freqs: Tensor, phases: Tensor) -> Tensor:
    """`√2·cos(freqs·x + phases)`, Eq. 75, in fp32: x `[N]`, freqs and phases `[C]` → `[N, C]`."""
    for name, t in (("x", x), ("freqs", freqs), ("phases", phases)):
        check_dense(name, t)
        if t.ndim != 1:
            raise ValueError(f"{name}: expected one axis, got {list(t.shape)}")
        check_like(name, t, "x", x)
    check_shape("phases", phases, freqs.shape)
    return _mp_fourier(x, freqs, phases)
