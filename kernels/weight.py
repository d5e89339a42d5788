"""Weight preparation: raw fp32 weight → normalised, scaled, cast, laid out `[taps, Cout, Cin]`."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.registration import register


def mp_weight(w: Tensor, gain: Tensor | None = None, dtype: torch.dtype = torch.float32, heads: int = 0) -> Tensor:
    """Raw fp32 weight `[Cout, Cin, k, k]` or `[Cout, Cin]` → prepared `[k·k, Cout, Cin]` in `dtype`. Eq. 66.

    Each row is normalised, scaled by `gain / sqrt(fan_in)` in fp32 and cast. `gain` is a learned scalar (Eq. 104)
    or None for 1. With `heads`, the rows of a qkv weight move from the checkpoint's order (head, channel, q|k|v)
    to (head, q|k|v, channel), which `cosine_attention` expects.
    """
    if w.ndim not in (2, 4) or (w.ndim == 4 and w.shape[2] != w.shape[3]):
        raise ValueError(f"w: expected [Cout, Cin] or [Cout, Cin, k, k], got {list(w.shape)}")
    if heads and w.shape[0] % (3 * heads):
        raise ValueError(f"w: {w.shape[0]} rows are not a multiple of 3 × {heads} heads")
    return _mp_weight(w, gain, dtype, heads)[0]


def _fake(w: Tensor, gain: Tensor | None, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
    rows = w.new_empty(w.shape[0], w.shape[1], w[0, 0].numel(), dtype=dtype)
    return rows.permute(2, 0, 1), w.new_empty(w.shape[0], dtype=eager.wide(w.dtype))


def _fake_backward(g: Tensor, w: Tensor, length: Tensor, gain: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(w), w.new_empty([]) if gain is None else torch.empty_like(gain)


_mp_weight = register("mp_weight", eager.mp_weight, _fake)
_mp_weight_backward = register("mp_weight_backward", eager.mp_weight_backward, _fake_backward)


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    w, gain, _, ctx.heads = inputs
    ctx.save_for_backward(w, output[1], gain)


def _backward(ctx: FunctionCtx, g: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    w, length, gain = ctx.saved_tensors
    dw, dgain = _mp_weight_backward(g, w, length, gain, ctx.heads)
    return dw, None if gain is None else dgain, None, None


_mp_weight.register_autograd(_backward, setup_context=_save)
