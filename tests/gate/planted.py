"""Kernels that the gate must judge rightly: one that is fine, the others at fault."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    a_ptr, b_ptr, y_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    """Clean with small tiles; a tile of 256 × 256 is more than 4 warps hold."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for i in range(steps):
        a = tl.load(a_ptr + m * steps * K + i * K + k[None, :])  # [M, K]
        b = tl.load(b_ptr + (i * K + k[:, None]) * N + n)  # [K, N]
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(y_ptr + m * N + n, acc.to(y_ptr.dtype.element_ty))


@triton.jit
def two_products_kernel(a_ptr, b_ptr, y_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Two accumulators, together 1,024 columns of tensor memory at N = 512."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros([M, N], tl.float32)
    for i in range(steps):
        a = tl.load(a_ptr + m * steps * K + i * K + k[None, :])  # [M, K]
        b = tl.load(b_ptr + (i * K + k[:, None]) * N + n)  # [K, N]
        acc = tl.dot(a, b, acc)
        acc += tl.sum(tl.dot(a, b * 2), axis=0)[None, :]
    tl.store(y_ptr + m * N + n, acc.to(y_ptr.dtype.element_ty))


@triton.jit
def box_kernel(w_desc, x_desc, y_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The unit dimension of the box of w does not lead: w passes through registers."""
    acc = tl.zeros([M, N], tl.float32)
    for i in range(steps):
        w = w_desc.load([0, 0, i * K]).reshape(M, K)
        x = x_desc.load([0, i * K])  # [N, K]
        acc = tl.dot(w, x.T, acc)
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty))


@triton.jit
def spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x / tl.sum(x, axis=0))


@triton.jit
def trapping_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0)


@triton.jit
def failing_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 8), tl.arange(0, 16))
