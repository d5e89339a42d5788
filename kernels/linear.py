"""Matrix product with a prepared weight: fp16 and bf16 on tensor cores, fp32 exact. M rows, K what is summed over.

The three products, y = x·wᵀ, dx = g·w and dw = gᵀ·x, are one kernel with other strides; a factor, a summand and a cast are
its epilogue. A program sums its whole K in one order and tile, whatever M is, so that a row's result does not depend on the
others.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_floating, check_weight
from kernels.jit import launch
from kernels.registration import register, register_derivative
from kernels.weight import Weight, split_gradient, unpack

# By bytes per element. fp32 goes without tensor cores, whose TF32 would round its inputs: 16 sums per thread, and small
# enough that 768 → 20,000 channels fill a GPU at batch 1. No layer of the networks is in half precision. Not yet measured.
TILES = {
    4: dict(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3),
    2: dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=32, num_warps=4, num_stages=4),
}
MAX_CHANNELS = 65535 * 64  # of a grid's second axis, times BLOCK_N


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K, scale, shift,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[m,n] = scale · Σ_k a[m,k]·b[k,n] + shift in fp32, a taken in b's type, c contiguous."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + offs_k
        offs_a = offs_m[:, None] * stride_am + k[None, :] * stride_ak  # [BLOCK_M, BLOCK_K]
        offs_b = k[:, None] * stride_bk + offs_n[None, :] * stride_bn  # [BLOCK_K, BLOCK_N]
        a = tl.load(a_ptr + offs_a, (offs_m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + offs_b, (k[:, None] < K) & (offs_n[None, :] < N), other=0.0)
        acc = tl.dot(a.to(b_ptr.dtype.element_ty), b, acc, input_precision="ieee")
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], (acc * scale + shift).to(c_ptr.dtype.element_ty), mask)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """`scale · a @ b + shift` in `dtype`: a `[M, K]`, b `[K, N]`, of any strides."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    tile = TILES[b.element_size()]
    grid = (triton.cdiv(m, tile["BLOCK_M"]), triton.cdiv(n, tile["BLOCK_N"]))
    launch(matmul_kernel, grid, a, b, c, m, n, k, scale, shift, *a.stride(), *b.stride(), **tile, flops=2 * m * n * k)
    return c


def linear_triton(
    x: Tensor, w: Tensor, master: Tensor | None, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    y = matmul(x.reshape(-1, x.shape[-1]), w[0].T, dtype or x.dtype, scale, shift)
    return y.view(*x.shape[:-1], w.shape[1])


def linear_backward_triton(g: Tensor, x: Tensor, w: Tensor, scale: float = 1.0, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    rows, columns = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = matmul(rows, w[0], x.dtype, scale).view(x.shape) if with_dx else x.new_empty(0)
    return dx, matmul(rows.T, columns, torch.float32, scale)[None]


def _fake(x: Tensor, w: Tensor, master: Tensor | None, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[1], dtype=dtype or x.dtype)


def _fake_backward(g: Tensor, x: Tensor, w: Tensor, scale: float = 1.0, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if with_dx else 0), w.new_empty(w.shape, dtype=eager.wide(w.dtype))


def _flops(x: tuple[int, ...], w: tuple[int, ...]) -> int:
    return 2 * math.prod(x[:-1]) * w[1] * w[2]


def _refuses(w: Tensor) -> str | None:
    return None if w.numel() and max(w.shape) <= MAX_CHANNELS else f"a weight of shape {list(w.shape)}"


_linear = register(
    "linear", eager.linear, _fake, linear_triton,
    flops=lambda x, w, *_: _flops(x, w), refuses=lambda x, w, *_: _refuses(w),
)  # fmt: skip
_linear_backward = register(
    "linear_backward", eager.linear_backward, _fake_backward, linear_backward_triton,
    flops=lambda g, x, w, scale=1.0, with_dx=True: (1 + with_dx) * _flops(x, w), refuses=lambda g, x, w, *_: _refuses(w),
)  # fmt: skip


def _save(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, ctx.scale, _, _ = inputs
    ctx.save_for_backward(x, w)


def _autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    with_dx = ctx.needs_input_grad[0]  # not for labels
    dx, dw = _linear_backward(g.contiguous(), *ctx.saved_tensors, ctx.scale, with_dx)
    return dx if with_dx else None, *split_gradient(dw, ctx.master), None, None, None


register_derivative(_linear, _save, _autograd)


def linear(x: Tensor, w: Weight, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """`scale · x @ w[0].T + shift` in `dtype` (x's without one): x `[..., Cin]`, w `[1, Cout, Cin]` → `[..., Cout]`."""
    w, master = unpack(w)
    check_floating("x", x.dtype)
    if dtype is not None:
        check_floating("dtype", dtype)
    if x.ndim < 1:
        raise ValueError("x: expected [..., Cin], got []")
    check_weight("w", w, "x", x, taps=(1,))
    return _linear(x, w, master, scale, shift, dtype)
