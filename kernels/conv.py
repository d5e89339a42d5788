"""3×3 and 1×1 convolutions with what follows them, and whole residual branches of two.

The meaning of each op is in `kernels.reference`, the kernels in `kernels.implicit_gemm` and `kernels.wgrad`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import attention, conv_triton, eager, pixel_norm
from kernels.checks import check_activation, check_even, check_heads, check_like, check_shape, check_weight
from kernels.registration import register, register_derivative
from kernels.weight import Weight, split_gradient, unpack


def conv(x: Tensor, w: Weight) -> Tensor:
    """3×3 or 1×1 convolution, stride 1, zero padding: x `[N, H, W, Cin]`, w `[9 or 1, Cout, Cin]` → `[N, H, W, Cout]`."""
    w, master = _check(x, w)
    return _conv(x, w, master)


def conv_silu(x: Tensor, w: Weight, m: Tensor) -> Tensor:
    """MP-SiLU of the convolution modulated per image and channel by m `[N, Cout]`."""
    w, master = _check(x, w)
    _check_modulation(m, x, w)
    return _conv_silu(x, w, master, m, _saves(x, w, master, m))[0]


def conv_silu_up(x: Tensor, w: Weight, m: Tensor) -> Tensor:
    """`conv_silu` behind nearest-neighbour doubling: x `[N, H, W, Cin]`, w `[16, Cout, Cin]` → `[N, 2H, 2W, Cout]`.

    As four convolutions of x with 2×2 taps each, one for every second pixel of every second row: w is
    `mp_weight(…, up=True)`, whose taps are sums of those of the 3×3.
    """
    w, master = _check(x, w, "w", (16,))
    _check_modulation(m, x, w)
    return _conv_silu_up(x, w, master, m, _saves(x, w, master, m))[0]


def conv_sum(x: Tensor, w: Weight, residual: Tensor, t: float, clip: float | None = None) -> Tensor:
    """MP-Sum of `residual` `[N, H, W, Cout]` (weight ∝ 1−t) and the convolution of x (weight ∝ t), then clip.

    Where the output is at the clip, the gradient is 0.
    """
    w, master = _check(x, w)
    _check_residual(residual, x, w)
    return _conv_sum(x, w, master, residual, t, clip)


def conv_cat_sum(
    x: Tensor, w: Weight, a: Tensor, b: Tensor, w_skip: Weight, cat_t: float, t: float, clip: float | None = None
) -> Tensor:
    """`conv_sum` whose residual is the 1×1 convolution `w_skip` `[1, Cout, Ca+Cb]` of the MP-Cat of a and b."""
    w, master = _check(x, w)
    w_skip, master_skip = _check_sources(a, b, w_skip, x, w)
    return _conv_cat_sum(x, w, master, a, b, w_skip, master_skip, cat_t, t, clip)


def residual_branch_norm(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, down: bool = False
) -> Tensor:
    """`conv_sum` of `conv_silu` behind `pixel_norm_silu` (or `down_…`): a block of the encoder, x `[N, H, W, C]`.

    As one op, because its pointwise derivatives then are parts of convolutions. The gradient of every `…_branch…` passes
    its clip: whoever reads the result stops it (`fork`, `clip_x`, `clip_a`), and is spared a pass over it.
    """
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1)
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    if down:
        check_even("x", x)
    saves = _saves(x, w0, master0, m, w1, master1)
    return _residual_branch_norm(x, w0, master0, m, w1, master1, t, clip, down, saves)[0]


def residual_branch_silu(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, clip_x: float | None = None
) -> Tensor:
    """`conv_sum` of x and `conv_silu` of MP-SiLU(x), x's gradient stopped at `clip_x`: a block of the decoder without a skip."""
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1)
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    saves = _saves(x, w0, master0, m, w1, master1)
    return _residual_branch_silu(x, w0, master0, m, w1, master1, t, clip, clip_x, saves)[0]


def residual_branch_up(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, t: float, clip: float | None = None, clip_x: float | None = None
) -> Tensor:
    """`residual_branch_silu` behind nearest-neighbour doubling of x `[N, H, W, C]`, without a doubled x: see `conv_silu_up`."""
    (w0, master0), (w1, master1) = _check_branch(x, w0, m, w1, (16,))
    check_shape("w1", w1, (w1.shape[0], x.shape[3], w0.shape[1]))
    saves = _saves(x, w0, master0, m, w1, master1)
    return _residual_branch_up(x, w0, master0, m, w1, master1, t, clip, clip_x, saves)[0]


def residual_branch_cat(
    a: Tensor, b: Tensor, w0: Weight, m: Tensor, w1: Weight, w_skip: Weight, cat_t: float, t: float,
    clip: float | None = None, clip_a: float | None = None,
) -> Tensor:  # fmt: skip
    """`conv_cat_sum` of `conv_silu` of `cat_silu`, a's gradient stopped at `clip_a`: a block of the decoder with a skip."""
    (w0, master0), (w1, master1) = unpack(w0), unpack(w1)
    w_skip, master_skip = _check_sources(a, b, w_skip, a, w1)
    check_shape("w0", w0, (*w0.shape[:2], a.shape[3] + b.shape[3]))
    check_weight("w0", w0, "w_skip", w_skip)
    check_weight("w1", w1, "w0", w0.mT)
    _check_modulation(m, a, w0)
    saves = _saves(a, b, w0, master0, m, w1, master1, w_skip, master_skip)
    weights = w0, master0, m, w1, master1, w_skip, master_skip
    return _residual_branch_cat(a, b, *weights, cat_t, t, clip, clip_a, saves)[0]


def attention_branch(x: Tensor, w_qkv: Weight, w_proj: Weight, heads: int, t: float, clip: float | None = None) -> Tensor:
    """`conv_sum` of x with cosine attention between two 1×1 convolutions of it: w_qkv's rows are (head, q|k|v, D)."""
    w_qkv, master_qkv = _check(x, w_qkv, "w_qkv")
    w_proj, master_proj = unpack(w_proj)
    channels = x.shape[3]
    check_heads("w_qkv", w_qkv.shape[1], heads)
    check_shape("w_qkv", w_qkv, (1, 3 * channels, channels))
    check_shape("w_proj", w_proj, (1, channels, channels))
    check_like("w_proj", w_proj, "x", x)
    saves = _saves(x, w_qkv, master_qkv, w_proj, master_proj)
    return _attention_branch(x, w_qkv, master_qkv, w_proj, master_proj, heads, t, clip, saves)[0]


def _saves(*tensors: Tensor | None) -> bool:
    """Will there be a backward?"""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def _check(x: Tensor, w: Weight, name: str = "w", taps: tuple[int, ...] = (1, 9)) -> tuple[Tensor, Tensor | None]:
    w, master = unpack(w)
    check_activation("x", x)
    check_weight(name, w, "x", x, taps)
    return w, master


def _check_modulation(m: Tensor, x: Tensor, w: Tensor) -> None:
    check_shape("m", m, (x.shape[0], w.shape[1]))
    check_like("m", m, "x", x)


def _check_residual(residual: Tensor, x: Tensor, w: Tensor) -> None:
    check_activation("residual", residual)
    check_shape("residual", residual, (*x.shape[:3], w.shape[1]))
    check_like("residual", residual, "x", x)


def _check_sources(a: Tensor, b: Tensor, w_skip: Weight, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
    w_skip, master = unpack(w_skip)
    for name, source in (("a", a), ("b", b)):
        check_activation(name, source)
        check_shape(name, source, (*x.shape[:3], source.shape[3]))
        check_like(name, source, "x", x)
    check_shape("w_skip", w_skip, (1, w.shape[1], a.shape[3] + b.shape[3]))
    check_like("w_skip", w_skip, "x", x)
    return w_skip, master


def _check_branch(
    x: Tensor, w0: Weight, m: Tensor, w1: Weight, taps: tuple[int, ...] = (1, 9)
) -> tuple[tuple[Tensor, Tensor | None], ...]:
    w0, master0 = _check(x, w0, "w0", taps)
    _check_modulation(m, x, w0)
    w1, master1 = unpack(w1)
    check_weight("w1", w1, "w0", w0.mT)
    return (w0, master0), (w1, master1)


def _output(x: Tensor, w: Tensor, *_: Tensor | float | None) -> Tensor:
    return x.new_empty(*x.shape[:3], w.shape[1])


def _doubled(x: Tensor, channels: int) -> Tensor:
    n, height, width, _ = x.shape
    return x.new_empty(n, 2 * height, 2 * width, channels)


def _flops_up(x: tuple[int, ...], w0: tuple[int, ...], w1: tuple[int, ...]) -> int:
    return _flops(x, w0) + 4 * _flops(x, w1)


def _flops(x: tuple[int, ...], *weights: tuple[int, ...]) -> int:
    """Of convolutions at the pixels of x."""
    return sum(2 * x[0] * x[1] * x[2] * w[0] * w[1] * w[2] for w in weights)


def _refuses(args: tuple, *weights: int) -> str | None:
    """Why kernels cannot take the weights at these positions, or None."""
    for w in (args[i] for i in weights):
        if w.shape[1] % 8 or w.shape[2] % 8:
            return f"a weight of {list(w.shape)}, kernels take multiples of 8 channels"
    return None


def _refuses_sources(*sources: Tensor) -> str | None:
    return next((f"a source of {x.shape[3]} channels, kernels take multiples of 8" for x in sources if x.shape[3] % 8), None)


def _refuses_t(t: float, end: float) -> str | None:
    """Factors are taken relative to one of MP-Sum's, which is 0 at one end of t."""
    return f"t = {t:g}, kernels sum two sources" if t == end else None


def _like(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs of the forms of `tensors`: gradients of activations and modulations, dense."""
    return tuple(x.new_empty(x.shape) for x in tensors)


_grad = eager.gradient_like
_conv = register("conv", eager.conv, _output, conv_triton.conv, lambda x, w, *_: _flops(x, w))
_conv_backward = register(
    "conv_backward", eager.conv_backward,
    lambda g, x, w, with_dx=True: (torch.empty_like(x) if with_dx else x.new_empty(0), _grad(w)),
    conv_triton.conv_backward, lambda g, x, w, with_dx=True: (1 + with_dx) * _flops(x, w),
)  # fmt: skip
_conv_silu = register(
    "conv_silu", eager.conv_silu,
    lambda x, w, master, m, saves: (_output(x, w), _output(x, w) if saves else x.new_empty(0)),
    conv_triton.conv_silu, lambda x, w, *_: _flops(x, w), lambda *args: _refuses(args, 1),
)  # fmt: skip
_conv_silu_backward = register(
    "conv_silu_backward", eager.conv_silu_backward,
    lambda g, x, w, m, u: (torch.empty_like(x), _grad(w), *_like(m)),
    conv_triton.conv_silu_backward, lambda g, x, w, *_: 2 * _flops(x, w), lambda *args: _refuses(args, 2),
)  # fmt: skip
_conv_silu_up = register(
    "conv_silu_up", eager.conv_silu_up,
    lambda x, w, master, m, saves: (_doubled(x, w.shape[1]), _doubled(x, w.shape[1]) if saves else x.new_empty(0)),
    conv_triton.conv_silu_up, lambda x, w, *_: _flops(x, w), lambda *args: _refuses(args, 1),
)  # fmt: skip
_conv_silu_up_backward = register(
    "conv_silu_up_backward", eager.conv_silu_up_backward,
    lambda g, x, w, m, u: (torch.empty_like(x), _grad(w), *_like(m)),
    conv_triton.conv_silu_up_backward, lambda g, x, w, *_: 2 * _flops(x, w), lambda *args: _refuses(args, 2),
)  # fmt: skip
_conv_sum = register(
    "conv_sum", eager.conv_sum, _output, conv_triton.conv_sum,
    lambda x, w, *_: _flops(x, w), lambda *args: _refuses(args, 1),
)  # fmt: skip
_conv_sum_backward = register(
    "conv_sum_backward", eager.conv_sum_backward,
    lambda g, x, w, *_: (torch.empty_like(x), _grad(w), *_like(g)),
    conv_triton.conv_sum_backward, lambda g, x, w, *_: 2 * _flops(x, w),
    lambda *args: _refuses(args, 2) or _refuses_t(args[4], 1),
)  # fmt: skip
_conv_cat_sum = register(
    "conv_cat_sum", eager.conv_cat_sum, _output, conv_triton.conv_cat_sum,
    lambda x, w, _, a, b, w_skip, *__: _flops(x, w, w_skip),
    lambda *args: _refuses(args, 1, 5) or _refuses_sources(*args[3:5]) or _refuses_t(args[8], 0),
)  # fmt: skip
_conv_cat_sum_backward = register(
    "conv_cat_sum_backward", eager.conv_cat_sum_backward,
    lambda g, x, w, a, b, w_skip, *_: (torch.empty_like(x), _grad(w), *_like(a, b), _grad(w_skip)),
    conv_triton.conv_cat_sum_backward, lambda g, x, w, a, b, w_skip, *_: 2 * _flops(x, w, w_skip),
    lambda *args: _refuses(args, 2, 5) or _refuses_sources(*args[3:5]) or _refuses_t(args[8], 1),
)  # fmt: skip
_residual_branch_norm = register(
    "residual_branch_norm", eager.residual_branch_norm,
    lambda x, w0, master0, m, w1, master1, t, clip, down, saves: _norm_outputs(x, w0, w1, down, saves),
    conv_triton.residual_branch_norm,
    lambda x, w0, master0, m, w1, master1, t, clip, down, saves: _flops(x, w0, w1) // (4 if down else 1),
    lambda *args: _refuses(args, 1, 4) or pixel_norm.refuses(args[0]),
)  # fmt: skip
_residual_branch_norm_backward = register(
    "residual_branch_norm_backward", eager.residual_branch_norm_backward,
    lambda g, w0, m, w1, n, s, rms, v, u, t, down: (
        n.new_empty(n.shape[0], *(size * (2 if down else 1) for size in n.shape[1:3]), n.shape[3]), _grad(w0), *_like(m), _grad(w1),
    ),
    conv_triton.residual_branch_norm_backward, lambda g, w0, m, w1, *_: 2 * _flops(g, w0, w1),
    lambda *args: _refuses(args, 1, 3) or pixel_norm.refuses(args[4]),
)  # fmt: skip
_residual_branch_silu = register(
    "residual_branch_silu", eager.residual_branch_silu,
    lambda x, w0, master0, m, w1, *rest: _branch_outputs(x, w0, w1, rest[-1], x.shape[3]),
    conv_triton.residual_branch_silu, lambda x, w0, master0, m, w1, *_: _flops(x, w0, w1), lambda *args: _refuses(args, 1, 4),
)  # fmt: skip
_residual_branch_silu_backward = register(
    "residual_branch_silu_backward", eager.residual_branch_silu_backward,
    lambda g, x, w0, m, w1, *_: (torch.empty_like(x), _grad(w0), *_like(m), _grad(w1)),
    conv_triton.residual_branch_silu_backward, lambda g, x, w0, m, w1, *_: 2 * _flops(x, w0, w1),
    lambda *args: _refuses(args, 2, 4),
)  # fmt: skip
_residual_branch_up = register(
    "residual_branch_up", eager.residual_branch_up,
    lambda x, w0, master0, m, w1, *rest: (
        _doubled(x, x.shape[3]), *eager.saved(rest[-1], *_like(x), *[_doubled(x, w0.shape[1]) for _ in range(2)]),
    ),
    conv_triton.residual_branch_up, lambda x, w0, master0, m, w1, *_: _flops_up(x, w0, w1), lambda *args: _refuses(args, 1, 4),
)  # fmt: skip
_residual_branch_up_backward = register(
    "residual_branch_up_backward", eager.residual_branch_up_backward,
    lambda g, x, w0, m, w1, *_: (torch.empty_like(x), _grad(w0), *_like(m), _grad(w1)),
    conv_triton.residual_branch_up_backward, lambda g, x, w0, m, w1, *_: 2 * _flops_up(x, w0, w1),
    lambda *args: _refuses(args, 2, 4),
)  # fmt: skip
_residual_branch_cat = register(
    "residual_branch_cat", eager.residual_branch_cat,
    lambda a, b, w0, master0, m, w1, *rest: _branch_outputs(a, w0, w1, rest[-1], a.shape[3] + b.shape[3]),
    conv_triton.residual_branch_cat,
    lambda a, b, w0, master0, m, w1, master1, w_skip, *_: _flops(a, w0, w1, w_skip),
    lambda *args: _refuses(args, 2, 5, 7) or _refuses_sources(*args[:2]) or _refuses_t(args[10], 0),
)  # fmt: skip
_residual_branch_cat_backward = register(
    "residual_branch_cat_backward", eager.residual_branch_cat_backward,
    lambda g, a, b, w0, m, w1, w_skip, *_: (*_like(a, b), _grad(w0), *_like(m), _grad(w1), _grad(w_skip)),
    conv_triton.residual_branch_cat_backward,
    lambda g, a, b, w0, m, w1, w_skip, *_: 2 * _flops(a, w0, w1, w_skip),
    lambda *args: _refuses(args, 3, 5, 6) or _refuses_sources(*args[1:3]),
)  # fmt: skip


_attention_branch = register(
    "attention_branch", eager.attention_branch,
    lambda x, w_qkv, master_qkv, w_proj, master_proj, heads, t, clip, saves: (
        _output(x, w_proj), *_attention_outputs(x, w_qkv, heads, saves),
    ),
    conv_triton.attention_branch,
    lambda x, w_qkv, master_qkv, w_proj, master_proj, heads, *_: _attention_flops(x, w_qkv, w_proj, heads),
    lambda *args: _refuses(args, 1, 3) or _refuses_attention(args[0], args[1], args[5]),
)  # fmt: skip
_attention_branch_backward = register(
    "attention_branch_backward", eager.attention_branch_backward,
    lambda g, x, w_qkv, w_proj, *_: (torch.empty_like(x), _grad(w_qkv), _grad(w_proj)),
    conv_triton.attention_branch_backward,
    lambda g, x, w_qkv, w_proj, qkv, v, lse, heads, t: 2 * _attention_flops(x, w_qkv, w_proj, heads),
    lambda *args: _refuses(args, 2, 3) or _refuses_attention(args[1], args[2], args[7]),
)  # fmt: skip


def _attention_outputs(x: Tensor, w_qkv: Tensor, heads: int, saves: bool) -> list[Tensor]:
    """qkv, v and the logarithms of the sums."""
    qkv = _output(x, w_qkv)
    return list(eager.saved(saves, qkv, *attention.fake(qkv, heads)))


def _attention_flops(x: tuple[int, ...], w_qkv: tuple[int, ...], w_proj: tuple[int, ...], heads: int) -> int:
    return _flops(x, w_qkv, w_proj) + attention.flops((*x[:3], w_qkv[1]), heads)


def _refuses_attention(x: Tensor, w_qkv: Tensor, heads: int) -> str | None:
    return attention.refuses((*x.shape[:3], w_qkv.shape[1]), heads)


def _branch_outputs(x: Tensor, w0: Tensor, w1: Tensor, saves: bool, activated: int) -> tuple[Tensor, ...]:
    """y, s of that many `activated` channels, v and u."""
    s = x.new_empty(*x.shape[:3], activated)
    return _output(x, w1), *eager.saved(saves, s, *(_output(x, w0) for _ in range(2)))


def _norm_outputs(x: Tensor, w0: Tensor, w1: Tensor, down: bool, saves: bool) -> tuple[Tensor, ...]:
    """y, n, s, rms, v and u."""
    n = x.new_empty(pixel_norm.shape_after(x, down))
    rms = x.new_empty(n.shape[:3], dtype=eager.wide(x.dtype))
    return _output(n, w1), *eager.saved(saves, n, torch.empty_like(n), rms, *(_output(n, w0) for _ in range(2)))


def _save_conv(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master = inputs
    ctx.save_for_backward(x, w)


def _conv_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    with_dx = ctx.needs_input_grad[0]  # not for images
    dx, dw = _conv_backward(g.contiguous(), *ctx.saved_tensors, with_dx)
    return dx if with_dx else None, *split_gradient(dw, ctx.master)


def _save_conv_silu(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, w, ctx.master, m, _ = inputs
    ctx.save_for_backward(x, w, m, output[1])


def _conv_silu_autograd(backward: Any, ctx: FunctionCtx, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None, None
    dx, dw, dm = backward(g.contiguous(), *ctx.saved_tensors)
    return dx, *split_gradient(dw, ctx.master), dm, None


def _save_conv_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, _, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(x, w, None if ctx.clip is None else output)


def _conv_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, dresidual = _conv_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip)
    return dx, *split_gradient(dw, ctx.master), dresidual, None, None


def _save_conv_cat_sum(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    x, w, ctx.master, a, b, w_skip, ctx.master_skip, ctx.cat_t, ctx.t, ctx.clip = inputs
    ctx.save_for_backward(x, w, a, b, w_skip, None if ctx.clip is None else output)


def _conv_cat_sum_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    grads = _conv_cat_sum_backward(g.contiguous(), *ctx.saved_tensors, ctx.cat_t, ctx.t, ctx.clip)
    dx, dw, da, db, dw_skip = grads
    return dx, *split_gradient(dw, ctx.master), da, db, *split_gradient(dw_skip, ctx.master_skip), None, None, None


def _save_residual_branch_norm(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, w0, ctx.master0, m, w1, ctx.master1, ctx.t, _, ctx.down, _ = inputs
    ctx.save_for_backward(w0, m, w1, *output[1:])


def _residual_branch_norm_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw0, dm, dw1 = _residual_branch_norm_backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.down)
    return dx, *split_gradient(dw0, ctx.master0), dm, *split_gradient(dw1, ctx.master1), None, None, None, None


def _save_residual_branch_silu(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, w0, ctx.master0, m, w1, ctx.master1, ctx.t, _, ctx.clip_x, _ = inputs
    ctx.save_for_backward(x, w0, m, w1, *output[1:])


def _branch_autograd(backward: Any, ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw0, dm, dw1 = backward(g.contiguous(), *ctx.saved_tensors, ctx.t, ctx.clip_x)
    return dx, *split_gradient(dw0, ctx.master0), dm, *split_gradient(dw1, ctx.master1), None, None, None, None


def _save_residual_branch_cat(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    a, b, w0, ctx.master0, m, w1, ctx.master1, w_skip, ctx.master_skip, cat_t, t, _, clip_a, _ = inputs
    ctx.constants = cat_t, t, clip_a
    ctx.save_for_backward(a, b, w0, m, w1, w_skip, *output[1:])


def _residual_branch_cat_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grads = _residual_branch_cat_backward(g.contiguous(), *ctx.saved_tensors, *ctx.constants)
    da, db, dw0, dm, dw1, dw_skip = grads
    dw0, dw1, dw_skip = (split_gradient(*pair) for pair in zip((dw0, dw1, dw_skip), (ctx.master0, ctx.master1, ctx.master_skip)))
    return da, db, *dw0, dm, *dw1, *dw_skip, *(None,) * 5


def _save_attention_branch(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, w_qkv, ctx.master_qkv, w_proj, ctx.master_proj, ctx.heads, ctx.t, *_ = inputs
    ctx.save_for_backward(x, w_qkv, w_proj, *output[1:])


def _attention_branch_autograd(ctx: FunctionCtx, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dx, dw_qkv, dw_proj = _attention_branch_backward(g.contiguous(), *ctx.saved_tensors, ctx.heads, ctx.t)
    return dx, *split_gradient(dw_qkv, ctx.master_qkv), *split_gradient(dw_proj, ctx.master_proj), None, None, None, None


register_derivative(_conv, _save_conv, _conv_autograd)
register_derivative(_conv_silu, _save_conv_silu, partial(_conv_silu_autograd, _conv_silu_backward))
register_derivative(_conv_silu_up, _save_conv_silu, partial(_conv_silu_autograd, _conv_silu_up_backward))
register_derivative(_conv_sum, _save_conv_sum, _conv_sum_autograd)
register_derivative(_conv_cat_sum, _save_conv_cat_sum, _conv_cat_sum_autograd)
register_derivative(_residual_branch_norm, _save_residual_branch_norm, _residual_branch_norm_autograd)
register_derivative(_residual_branch_cat, _save_residual_branch_cat, _residual_branch_cat_autograd)
register_derivative(_attention_branch, _save_attention_branch, _attention_branch_autograd)
register_derivative(_residual_branch_silu, _save_residual_branch_silu, partial(_branch_autograd, _residual_branch_silu_backward))
register_derivative(_residual_branch_up, _save_residual_branch_silu, partial(_branch_autograd, _residual_branch_up_backward))
