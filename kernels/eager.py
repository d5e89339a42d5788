"""The ops of `kernels.reference` (same names, arguments and meaning) with derivatives written by hand.

Eager PyTorch for any device: the path of tensors that no Triton kernel serves. Compared with plain autograd it passes
over memory less often, launches fewer small operations and saves fewer tensors. Once differentiable. The letters are
those of the reference; g is the gradient of an output.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from kernels import reference
from kernels.reference import EPS, SILU_SCALE, cat_scales, linear, mp_cat, mp_sum

__all__ = [
    "cat_silu", "conv", "conv_cat_sum", "conv_silu", "conv_sum", "cosine_attention", "down_pixel_norm_silu", "linear",
    "mp_cat", "mp_silu", "mp_sum", "mp_weight", "normalize", "pixel_norm_silu", "resample",
]  # fmt: skip

aten = torch.ops.aten


def normalize(x: Tensor, dim: int | Sequence[int], eps: float = EPS) -> Tensor:
    return _Normalize.apply(x, (dim,) if isinstance(dim, int) else tuple(dim), eps)


class _Normalize(Function):
    """`√count · x/d` with `d = ‖x‖ + ε·√count`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
        ctx.dims, ctx.root = dims, math.sqrt(math.prod([x.shape[i] for i in dims]))
        norm = _norm(x, dims)
        d = norm + eps * ctx.root
        ctx.save_for_backward(x, norm, d)
        return (x * (ctx.root / d)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, None, None]:
        x, norm, d = ctx.saved_tensors
        dx, _ = _project(g.to(d.dtype), x.to(d.dtype), norm * d, ctx.dims)
        return dx.mul_(ctx.root / d).to(x.dtype), None, None


def _norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The 2-norm over `dims`, kept as size 1, in fp32 (fp64 for fp64)."""
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


def _project(g: Tensor, x: Tensor, square: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`g − x·⟨x,g⟩/square` and ⟨x,g⟩. With square = ‖x‖·d, the former is d times the gradient of x/d."""
    product = g * x
    dot = product.sum(dims, keepdim=True)
    slope = dot / square.clamp_min_(torch.finfo(square.dtype).tiny)  # 0/tiny at x = 0
    return torch.addcmul(g, x, slope, value=-1, out=product), dot


def mp_weight(w: Tensor, gain: Tensor | None = None, dtype: torch.dtype = torch.float32, heads: int = 0) -> Tensor:
    if w.ndim not in (2, 4) or (w.ndim == 4 and w.shape[2] != w.shape[3]):
        raise ValueError(f"w: expected [Cout, Cin] or [Cout, Cin, k, k], got {list(w.shape)}")
    return _Weight.apply(w, gain, dtype, heads)


class _Weight(Function):
    """`gain · w/d` by rows with `d = ‖w‖ + ε·√fan_in`: the √fan_in of Eq. 66 cancels against that of the RMS."""

    @staticmethod
    def forward(ctx: FunctionCtx, w: Tensor, gain: Tensor | None, dtype: torch.dtype, heads: int) -> Tensor:
        rows = w.flatten(1)
        norm = _norm(rows, (1,))
        d = norm + EPS * math.sqrt(rows.shape[1])
        ctx.heads = heads
        ctx.save_for_backward(w, norm, d, gain)
        rows = (rows / d if gain is None else rows * (gain / d)).to(dtype)
        if heads:
            rows = rows.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)
        return rows.view(w.shape[0], w.shape[1], -1).permute(2, 0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        w, norm, d, gain = ctx.saved_tensors
        g = g.permute(1, 2, 0)
        if ctx.heads:
            g = g.unflatten(0, (ctx.heads, 3, -1)).transpose(1, 2).flatten(0, 2)
        # ∂w = gain/d · (g − w·⟨w,g⟩/(‖w‖·d)),  ∂gain = Σ ⟨w,g⟩/d
        dw, dot = _project(g.reshape(w.shape[0], -1).to(d.dtype), w.flatten(1), norm * d, (1,))
        if gain is None:
            return dw.div_(d).view_as(w), None, None, None
        return dw.mul_(gain / d).view_as(w), (dot / d).sum().view_as(gain), None, None


def conv(x: Tensor, w: Tensor) -> Tensor:
    return reference.conv(x, w).contiguous()


def _conv_backward(
    g: Tensor, x: Tensor, w: Tensor, needed: Sequence[bool], scale: float = 1
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `conv` by x and (times `scale`) by w, None unless `needed`."""
    if w.shape[0] == 1:
        dx = g @ w[0] if needed[0] else None
        return dx, (g.flatten(0, 2).T @ x.flatten(0, 2)).mul_(scale)[None] if needed[1] else None
    kernel, one = w.permute(1, 2, 0).unflatten(2, (3, 3)), [1, 1]
    g, x, mask = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), [needed[0], needed[1], False]
    dx, dk, _ = aten.convolution_backward(g, x, kernel, None, one, one, one, False, [0, 0], 1, mask)
    dx = dx.permute(0, 2, 3, 1) if needed[0] else None
    return dx, dk.flatten(2).mul_(scale).permute(2, 0, 1) if needed[1] else None


def mp_silu(x: Tensor) -> Tensor:
    return _SiLU.apply(x)


class _SiLU(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x).mul_(SILU_SCALE)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return aten.silu_backward(g, x).mul_(SILU_SCALE)


def cat_silu(a: Tensor, b: Tensor, t: float) -> Tensor:
    return _CatSiLU.apply(a, b, cat_scales(a.shape[-1], b.shape[-1], t))


class _CatSiLU(Function):
    """Saves only a and b, which `conv_cat_sum` saves too."""

    @staticmethod
    def forward(ctx: FunctionCtx, a: Tensor, b: Tensor, scales: tuple[float, float]) -> Tensor:
        ctx.scales = scales
        ctx.save_for_backward(a, b)
        y = torch.cat([_scaled(x, scale) for x, scale in zip((a, b), scales)], dim=-1)
        return F.silu(y, inplace=True).mul_(SILU_SCALE)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        sources = ctx.saved_tensors
        parts = zip(g.split([x.shape[-1] for x in sources], dim=-1), sources, ctx.scales)
        da, db = [aten.silu_backward(g, _scaled(x, scale)).mul_(SILU_SCALE * scale) for g, x, scale in parts]
        return da, db, None


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale  # 1: sources of equal width


def pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    x = normalize(x, dim=-1)
    return x, mp_silu(x)


def down_pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    return pixel_norm_silu(resample(x, (1, 1), "down"))


def conv_silu(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    return mp_silu(conv(x, w) * m[:, None, None])  # one function for all of it: no faster


def conv_sum(x: Tensor, w: Tensor, residual: Tensor, t: float, clip: float | None = None) -> Tensor:
    return _ConvSum.apply(x, w, residual, _sum_scales(t), clip)


class _ConvSum(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, w: Tensor, residual: Tensor, scales: tuple[float, float], clip: float | None
    ) -> Tensor:
        w = w * scales[1]  # smaller than the output
        y = conv(x, w).add_(residual, alpha=scales[0])
        ctx.scales, ctx.clip = scales, clip
        ctx.save_for_backward(x, w, None if clip is None else y)
        return y if clip is None else y.clamp(-clip, clip)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, y = ctx.saved_tensors
        g = _clip_backward(g, y, ctx.clip)
        return *_conv_backward(g, x, w, ctx.needs_input_grad, ctx.scales[1]), g * ctx.scales[0], None, None


def _sum_scales(t: float) -> tuple[float, float]:
    """The two factors of MP-Sum, Eq. 88."""
    scale = 1 / math.hypot(1 - t, t)
    return (1 - t) * scale, t * scale


def _clip_backward(g: Tensor, y: Tensor | None, clip: float | None) -> Tensor:
    """g where |y| ≤ clip, else 0."""
    if clip is None:
        return g
    eps = torch.finfo(torch.promote_types(y.dtype, torch.float32)).eps  # of the type that is compared
    beyond = clip + 0.7 * clip * eps  # rounds to the next number: hardtanh excludes its bounds
    return aten.hardtanh_backward(g, y, -beyond, beyond)


def conv_cat_sum(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, cat_t: float, t: float, clip: float | None = None
) -> Tensor:
    scale, scale_conv = _sum_scales(t)
    scale_a, scale_b = cat_scales(a.shape[-1], b.shape[-1], cat_t)
    return _ConvCatSum.apply(x, w, a, b, w_skip, (scale_conv, scale * scale_a, scale * scale_b), clip)


class _ConvCatSum(Function):
    """All factors scale the weights, and the 1×1 convolutions accumulate into the output of the 3×3."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor,
        scales: tuple[float, float, float], clip: float | None,
    ) -> Tensor:  # fmt: skip
        w_a, w_b = w_skip[0].split([a.shape[-1], b.shape[-1]], dim=-1)
        w, w_a, w_b = [weight * scale for weight, scale in zip((w, w_a, w_b), scales)]
        y = conv(x, w)
        rows = y.flatten(0, 2)
        for source, weight in ((a, w_a), (b, w_b)):
            torch.addmm(rows, source.flatten(0, 2), weight.T, out=rows)
        ctx.scales, ctx.clip = scales, clip
        ctx.save_for_backward(x, w, a, b, w_a, w_b, None if clip is None else y)
        return y if clip is None else y.clamp(-clip, clip)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, a, b, w_a, w_b, y = ctx.saved_tensors
        g = _clip_backward(g, y, ctx.clip)
        columns = g.flatten(0, 2).T
        dw_skip = [(columns @ source.flatten(0, 2)).mul_(scale) for source, scale in zip((a, b), ctx.scales[1:])]
        dx, dw = _conv_backward(g, x, w, ctx.needs_input_grad, ctx.scales[0])
        return dx, dw, g @ w_a, g @ w_b, torch.cat(dw_skip, dim=-1)[None], None, None


def cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    if qkv.shape[-1] % (3 * heads):
        raise ValueError(f"qkv: {qkv.shape[-1]} channels are not a multiple of 3 × {heads} heads")
    return _Attention.apply(qkv, heads)


class _Attention(Function):
    """Inside: n, the normalised q, k and v, `[3, N·heads, H·W, D]`, and p, the attention, `[N·heads, H·W, H·W]`."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv: Tensor, heads: int) -> Tensor:
        x = qkv.unflatten(-1, (heads, 3, -1)).flatten(1, 2).permute(3, 0, 2, 1, 4)  # [3, N, heads, H·W, D]
        root = math.sqrt(x.shape[-1])
        norm = _norm(x, (-1,))
        d = norm + EPS * root
        n = torch.mul(x, root / d, out=x.new_empty(x.shape)).flatten(1, 2)  # out: contiguous in this order
        q, k, v = n
        p = torch.bmm(q, k.mT).mul_(1 / root).softmax(-1)
        ctx.save_for_backward(n, p, norm, d)
        y = torch.bmm(p, v).unflatten(0, x.shape[1:3])
        return y.transpose(1, 2).reshape(*qkv.shape[:3], qkv.shape[3] // 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, None]:
        n, p, norm, d = ctx.saved_tensors
        (q, k, v), (_, images, heads, pixels, _), root = n, norm.shape, math.sqrt(n.shape[-1])
        height, width, channels = g.shape[1:]
        g = g.reshape(images, pixels, heads, n.shape[-1]).transpose(1, 2).flatten(0, 1)
        # logits: p·(∂p − ⟨p,∂p⟩) / √D;  x: (∂n − n·⟨n,∂n⟩/(‖n‖·√D)) · √D/d
        dlogits = aten._softmax_backward_data(torch.bmm(g, v.mT), p, -1, p.dtype).mul_(1 / root)
        dn = torch.empty_like(n)
        for out, left, right in zip(dn, (dlogits, dlogits.mT, p.mT), (k, q, g)):
            torch.bmm(left, right, out=out)
        scale = root / d
        dn, n = [y.unflatten(1, (images, heads)).to(d.dtype) for y in (dn, n)]
        dx, _ = _project(dn, n, norm * scale * root, (-1,))
        dqkv = dx.mul_(scale).to(q.dtype).permute(1, 3, 2, 0, 4)  # [N, H·W, heads, 3, D]
        return dqkv.reshape(images, height, width, 3 * channels), None


def resample(x: Tensor, filter: Sequence[float] = (1, 1), mode: str = "keep") -> Tensor:
    if mode == "up" and tuple(filter) == (1, 1):
        return F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="nearest").permute(0, 2, 3, 1).contiguous()
    return reference.resample(x, filter, mode)
