"""Cosine attention: all pixels of an image attend to each other, q, k and v normalised.

T = H·W tokens, D channels per head. |q·k|/√D ≤ √D, so that the softmax needs no running maximum. Rows of q, k and v are
normalised where they are loaded and the gradients projected where they are stored, both in fp32. Blocks of BLOCK_M
queries and BLOCK_N keys; rows and channels past the end are loaded as 0.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager, tiles
from kernels.checks import check_activation, check_heads
from kernels.jit import EPS, capability, launch
from kernels.registration import register, register_derivative
from kernels.tiles import AttentionTile

MAX_DEPTH = 128  # channels per head: beyond, exp(±√D) spans more than fp16 does
MAX_EXPONENT = 11  # e¹¹ = 59,874 is a number in fp16. No smaller, lest the smallest exp, of −2·√D + 11, become 0
MIN_BLOCK_D = 16  # of one tensor-core instruction
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def cosine_attention_kernel(
    qkv_ptr, y_ptr, lse_ptr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y = softmax(q·kᵀ/√D)·v of a block of queries, and the logarithm of each row's sum of exponentials.

    q is multiplied as it was loaded: its norm scales the logits, in the operation that also subtracts SHIFT.
    """
    block, image, head = program(T, HEADS, BLOCK_M)
    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr = qkv_ptr + (image * T * HEADS + head) * 3 * D
    q = load_rows(q_ptr, offs_m, offs_d, 3 * HEADS * D, T, D)  # [BLOCK_M, BLOCK_D]
    scale = SCALE * LOG2E / (rms(q.to(tl.float32), D) + EPS)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, T, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_normalized(q_ptr + D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(q.dtype)  # [BLOCK_N, BLOCK_D]
        v = load_normalized(q_ptr + 2 * D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(q.dtype)
        p = tl.exp2(tl.dot(q, k.T, input_precision="ieee") * scale[:, None] - SHIFT * LOG2E)  # [BLOCK_M, BLOCK_N]
        if T % BLOCK_N:
            p = tl.where(offs_n[None, :] < T, p, 0.0)
        sums += tl.sum(p, axis=1)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
    y_ptr += (image * T * HEADS + head) * D
    store_rows(y_ptr, acc / sums[:, None], offs_m, offs_d, HEADS * D, T, D)
    tl.store(lse_ptr + (image * HEADS + head) * T + offs_m, tl.log(sums) + SHIFT, offs_m < T)


@triton.jit
def program(T: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Block of tokens, image (64 bits, for offsets) and head; neighbours share an image and head, whose k and v stay in L2."""
    blocks: tl.constexpr = (T + BLOCK - 1) // BLOCK
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    return block, (rest // HEADS).to(tl.int64), rest % HEADS


@triton.jit
def load_rows(ptr, offs, offs_d, STRIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    mask = (offs[:, None] < T) & (offs_d[None, :] < D)
    return tl.load(ptr + offs[:, None] * STRIDE + offs_d[None, :], mask, other=0.0)


@triton.jit
def store_rows(ptr, x, offs, offs_d, STRIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    mask = (offs[:, None] < T) & (offs_d[None, :] < D)
    tl.store(ptr + offs[:, None] * STRIDE + offs_d[None, :], x.to(ptr.dtype.element_ty), mask)


@triton.jit
def rms(x, D: tl.constexpr):
    return tl.sqrt(tl.sum(x * x, axis=1) / D)


@triton.jit
def load_normalized(ptr, offs, offs_d, STRIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """n = x / (ε + rms(x)) of each row in fp32, and the rms."""
    x = load_rows(ptr, offs, offs_d, STRIDE, T, D).to(tl.float32)
    r = rms(x, D)
    return x * (1 / (r + EPS))[:, None], r


@triton.jit
def store_gradient(dx_ptr, x_ptr, dn, offs, offs_d, STRIDE: tl.constexpr, T: tl.constexpr, D: tl.constexpr):
    """dx = (dn − n · ⟨n,dn⟩/D · (rms+ε)/rms) / (rms+ε), spec §1.16, without the second term where x = 0."""
    tl.debug_barrier()  # or the compiler takes this load for the first and keeps fp32 rows through the loop: 30 to 90 registers
    n, r = load_normalized(x_ptr, offs, offs_d, STRIDE, T, D)
    inv = 1 / (r + EPS)
    slope = tl.sum(n * dn, axis=1) / D / tl.where(r == 0, 1.0, r * inv)
    store_rows(dx_ptr, (dn - n * slope[:, None]) * inv[:, None], offs, offs_d, STRIDE, T, D)


def cosine_attention_triton(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    y, lse = fake(qkv, heads)
    shift = max(0.0, math.sqrt(_depth(qkv, heads)) - MAX_EXPONENT)
    tile = _tile("forward", qkv, heads)
    _launch(cosine_attention_kernel, tile, tile.block_m, 2, qkv, heads, y, lse, SHIFT=shift)
    return y, lse


@triton.jit
def cosine_attention_backward_kernel(
    qkv_ptr, g_ptr, y_ptr, lse_ptr, dqkv_ptr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All gradients of one image and head, whose T ≤ BLOCK_M queries stay on the chip."""
    _, image, head = program(T, HEADS, BLOCK_M)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr = qkv_ptr + (image * T * HEADS + head) * 3 * D
    dq_ptr = dqkv_ptr + (image * T * HEADS + head) * 3 * D
    offset_y = (image * T * HEADS + head) * D
    g = load_rows(g_ptr + offset_y, offs_m, offs_d, HEADS * D, T, D)  # [BLOCK_M, BLOCK_D]
    y = load_rows(y_ptr + offset_y, offs_m, offs_d, HEADS * D, T, D)
    delta = tl.sum(g.to(tl.float32) * y.to(tl.float32), axis=1)
    lse = load_lse(lse_ptr + (image * HEADS + head) * T, offs_m, T)
    q = load_normalized(q_ptr, offs_m, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)
    if T > BLOCK_N:  # operands that come straight from memory stay out of registers: sm_90 would reload q in each step
        store_rows(dq_ptr, q, offs_m, offs_d, 3 * HEADS * D, T, D)
        tl.debug_barrier()  # what one thread has written another reads
        q = load_rows(dq_ptr, offs_m, offs_d, 3 * HEADS * D, T, D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, T, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_normalized(q_ptr + D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)  # [BLOCK_N, BLOCK_D]
        v = load_normalized(q_ptr + 2 * D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)
        p = probabilities(tl.dot(q, k.T, input_precision="ieee"), lse[:, None], SCALE)  # [BLOCK_M, BLOCK_N]
        if T % BLOCK_N:
            p = tl.where(offs_n[None, :] < T, p, 0.0)
        dv = tl.dot(g.T, p.to(g.dtype), input_precision="ieee").T
        ds = p * (tl.dot(g, v.T, input_precision="ieee") - delta[:, None])
        dk = tl.dot(q.T, ds.to(g.dtype), input_precision="ieee").T * SCALE
        dq = tl.dot(ds.to(g.dtype), k, dq, input_precision="ieee")
        store_gradient(dq_ptr + D, q_ptr + D, dk, offs_n, offs_d, 3 * HEADS * D, T, D)
        store_gradient(dq_ptr + 2 * D, q_ptr + 2 * D, dv, offs_n, offs_d, 3 * HEADS * D, T, D)
    store_gradient(dq_ptr, q_ptr, dq * SCALE, offs_m, offs_d, 3 * HEADS * D, T, D)


@triton.jit
def load_lse(ptr, offs, T: tl.constexpr):
    """In units of ln 2. Queries past the end get probabilities of 0."""
    return tl.load(ptr + offs, offs < T, other=float("inf")) * LOG2E


@triton.jit
def probabilities(products, lse, SCALE: tl.constexpr):
    """The softmax from q·k."""
    return tl.exp2(products * (SCALE * LOG2E) - lse)


@triton.jit
def cosine_attention_dq_kernel(
    qkv_ptr, g_ptr, y_ptr, lse_ptr, delta_ptr, dqkv_ptr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, and delta = ⟨g,y⟩ of each for the keys' gradients."""
    block, image, head = program(T, HEADS, BLOCK_M)
    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_ptr = qkv_ptr + (image * T * HEADS + head) * 3 * D
    offset_y = (image * T * HEADS + head) * D
    g = load_rows(g_ptr + offset_y, offs_m, offs_d, HEADS * D, T, D)  # [BLOCK_M, BLOCK_D]
    y = load_rows(y_ptr + offset_y, offs_m, offs_d, HEADS * D, T, D)
    delta = tl.sum(g.to(tl.float32) * y.to(tl.float32), axis=1)
    offset_lse = (image * HEADS + head) * T
    tl.store(delta_ptr + offset_lse + offs_m, delta, offs_m < T)
    lse = load_lse(lse_ptr + offset_lse, offs_m, T)
    q = load_normalized(q_ptr, offs_m, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, T, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = load_normalized(q_ptr + D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)  # [BLOCK_N, BLOCK_D]
        v = load_normalized(q_ptr + 2 * D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(g.dtype)
        p = probabilities(tl.dot(q, k.T, input_precision="ieee"), lse[:, None], SCALE)  # [BLOCK_M, BLOCK_N]
        if T % BLOCK_N:
            p = tl.where(offs_n[None, :] < T, p, 0.0)
        ds = p * (tl.dot(g, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(g.dtype), k, dq, input_precision="ieee")
    dq_ptr = dqkv_ptr + (image * T * HEADS + head) * 3 * D
    store_gradient(dq_ptr, q_ptr, dq * SCALE, offs_m, offs_d, 3 * HEADS * D, T, D)


@triton.jit
def cosine_attention_dkv_kernel(
    qkv_ptr, g_ptr, lse_ptr, delta_ptr, dqkv_ptr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, from transposed probabilities."""
    block, image, head = program(T, HEADS, BLOCK_N)
    offs_n, offs_d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q_ptr = qkv_ptr + (image * T * HEADS + head) * 3 * D
    g_ptr += (image * T * HEADS + head) * D
    offset_lse = (image * HEADS + head) * T
    dtype = g_ptr.dtype.element_ty
    k = load_normalized(q_ptr + D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(dtype)  # [BLOCK_N, BLOCK_D]
    v = load_normalized(q_ptr + 2 * D, offs_n, offs_d, 3 * HEADS * D, T, D)[0].to(dtype)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, T, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        q = load_normalized(q_ptr, offs_m, offs_d, 3 * HEADS * D, T, D)[0].to(dtype)  # [BLOCK_M, BLOCK_D]
        g = load_rows(g_ptr, offs_m, offs_d, HEADS * D, T, D)
        lse = load_lse(lse_ptr + offset_lse, offs_m, T)
        delta = tl.load(delta_ptr + offset_lse + offs_m, offs_m < T, other=0.0)
        p = probabilities(tl.dot(k, q.T, input_precision="ieee"), lse[None, :], SCALE)  # [BLOCK_N, BLOCK_M]
        dv = tl.dot(p.to(dtype), g, dv, input_precision="ieee")
        ds = p * (tl.dot(v, g.T, input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(dtype), q, dk, input_precision="ieee")
    dk_ptr = dqkv_ptr + (image * T * HEADS + head) * 3 * D + D
    store_gradient(dk_ptr, q_ptr + D, dk * SCALE, offs_n, offs_d, 3 * HEADS * D, T, D)
    store_gradient(dk_ptr + D, q_ptr + 2 * D, dv, offs_n, offs_d, 3 * HEADS * D, T, D)


def cosine_attention_backward_triton(g: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, heads: int) -> Tensor:
    dqkv = torch.empty_like(qkv)
    if tile := _tile("backward", qkv, heads):
        _launch(cosine_attention_backward_kernel, tile, tile.block_m, 5, qkv, heads, g, y, lse, dqkv)
        return dqkv
    delta = torch.empty_like(lse)
    dq, dkv = dqkv.unflatten(-1, (heads, 3, -1)).split([1, 2], dim=-2)  # each kernel writes one
    tile = _tile("dq", qkv, heads)
    _launch(cosine_attention_dq_kernel, tile, tile.block_m, 3, qkv, heads, g, y, lse, delta, dqkv, untouched=[dkv])
    tile = _tile("dkv", qkv, heads)
    _launch(cosine_attention_dkv_kernel, tile, tile.block_n, 4, qkv, heads, g, lse, delta, dqkv, untouched=[dq])
    return dqkv


def _launch(kernel, tile: AttentionTile, block: int, products: int, qkv: Tensor, heads: int, *tensors: Tensor, **options: Any) -> None:
    """A program for each `block` tokens of each head. `products` matrix products of T × T × D each."""
    tokens, depth = qkv.shape[1] * qkv.shape[2], _depth(qkv, heads)
    grid = (qkv.shape[0] * heads * triton.cdiv(tokens, block),)
    launch(
        kernel, grid, qkv, *tensors, flops=2 * products * qkv.shape[0] * heads * tokens**2 * depth,
        T=tokens, HEADS=heads, D=depth, SCALE=1 / math.sqrt(depth), **options,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=max(triton.next_power_of_2(depth), MIN_BLOCK_D),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _depth(qkv: Tensor, heads: int) -> int:
    return qkv.shape[-1] // (3 * heads)


def _tile(kernel: str, qkv: Tensor, heads: int) -> AttentionTile | None:
    tokens = qkv.shape[1] * qkv.shape[2]
    return tiles.attention(kernel, capability(qkv), tokens, _depth(qkv, heads), qkv.element_size())


def fake(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    n, h, w, c = qkv.shape
    return qkv.new_empty(n, h, w, c // 3), qkv.new_empty(n, heads, h * w, dtype=eager.wide(qkv.dtype))


def flops(qkv: tuple[int, ...], heads: int) -> int:
    n, h, w, c = qkv
    return 4 * n * (h * w) ** 2 * (c // 3)


def refuses(shape: tuple[int, ...], heads: int) -> str | None:
    """Why kernels cannot take a qkv of this shape, or None."""
    if (depth := shape[-1] // (3 * heads)) > MAX_DEPTH:
        return f"{depth} channels per head, the kernel takes {MAX_DEPTH}"
    if (size := math.prod(shape[1:])) >= 2**31:
        return f"{size} elements per image, offsets inside one have 32 bits"
    return None


_attention = register(
    "cosine_attention",
    eager.cosine_attention,
    fake,
    cosine_attention_triton,
    flops,
    lambda qkv, heads: refuses(qkv.shape, heads),
)
_attention_backward = register(
    "cosine_attention_backward",
    eager.cosine_attention_backward,
    lambda g, qkv, y, lse, heads: torch.empty_like(qkv),
    cosine_attention_backward_triton,
    lambda g, qkv, y, lse, heads: 2 * flops(qkv, heads),
    lambda g, qkv, y, lse, heads: refuses(qkv.shape, heads),
)


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)


register_derivative(_attention, _save, lambda ctx, g, _: (_attention_backward(g.contiguous(), *ctx.saved_tensors, ctx.heads), None))


def cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    """qkv `[N, H, W, heads·3·D]`, channels (head, q|k|v, D) → `[N, H, W, heads·D]`. |q| ≤ sqrt(D), so logits lie in ±sqrt(D)."""
    check_activation("qkv", qkv)
    check_heads("qkv", qkv.shape[-1], heads)
    return _attention(qkv, heads)[0]
