"""Cosine attention: all pixels of an image attend to each other, q, k and v normalised. T = H·W tokens, D channels per head."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_activation
from kernels.registration import register


def cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    """qkv `[N, H, W, heads·3·D]`, channels (head, q|k|v, D) → `[N, H, W, heads·D]`. |q| ≤ sqrt(D), so logits lie in ±sqrt(D)."""
    check_activation("qkv", qkv)
    if qkv.shape[-1] % (3 * heads):
        raise ValueError(f"qkv: {qkv.shape[-1]} channels are not a multiple of 3 × {heads} heads")
    return _attention(qkv, heads)[0]


def _fake(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    n, h, w, c = qkv.shape
    return qkv.new_empty(n, h, w, c // 3), qkv.new_empty(n, heads, h * w, dtype=eager.wide(qkv.dtype))


def _flops(qkv: tuple[int, ...], heads: int) -> int:
    n, h, w, c = qkv
    return 4 * n * (h * w) ** 2 * (c // 3)


_attention = register("cosine_attention", eager.cosine_attention, _fake, flops=_flops)
_attention_backward = register(
    "cosine_attention_backward",
    eager.cosine_attention_backward,
    lambda g, qkv, y, lse, heads: torch.empty_like(qkv),
    flops=lambda g, qkv, y, lse, heads: 2 * _flops(qkv, heads),
)


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv, *output)


_attention.register_autograd(
    lambda ctx, g, _: (_attention_backward(g.contiguous(), *ctx.saved_tensors, ctx.heads), None), setup_context=_save
)
