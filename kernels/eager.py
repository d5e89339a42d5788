"""The ops and their derivatives in eager PyTorch, written by hand: the path of every device that no kernel serves.

Each function computes what an op `edm2::name` returns, the tensors that its derivative needs included; autograd does
not see inside. The meaning is that of `kernels.reference`; the letters are those there, g is the gradient of an output
and d… that of an input. Gradients of weights are fp32 at least; a `master` is the leaf that receives one in place of
the weight, for autograd only.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import library, reference
from kernels.reference import EPS, NO_FACTORS, SILU_SCALE, Factors, cat_scales, sum_scales

aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute sums in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The 2-norm over `dims`, kept as size 1, in a wide type."""
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=wide(x.dtype))


def project(g: Tensor, x: Tensor, square: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`g − x·⟨x,g⟩/square` and ⟨x,g⟩. With square = ‖x‖·d, the former is d times the gradient of x/d."""
    product = g * x
    dot = product.sum(dims, keepdim=True)
    slope = dot / square.clamp_min(torch.finfo(square.dtype).tiny)  # 0/tiny at x = 0
    return torch.addcmul(g, x, slope, value=-1, out=product), dot


def mp_weight(
    w: Tensor, gain: Tensor | None, dtype: torch.dtype, heads: int, up: bool, split: int, left: float, right: float
) -> tuple[Tensor, Tensor]:
    """`gain · w/d` by rows with `d = ‖w‖ + ε·√fan_in` (the √fan_in of Eq. 66 cancels against that of the RMS), times
    `Factors(split, left, right)`; also ‖w‖ `[Cout]`."""
    rows, taps, factors = w.flatten(1), w.shape[2:].numel(), Factors(split, left, right)
    length = norm(rows, (1,))
    d = length + EPS * math.sqrt(rows.shape[1])
    scale = 1 / d if gain is None else gain / d
    if factors != NO_FACTORS:
        scale = scale * factors.columns(w)
    y = w.new_empty(taps, *w.shape[:2], dtype=wide(w.dtype) if up else dtype)
    out, rows = y, w.reshape(*w.shape[:2], taps).permute(2, 0, 1)
    if heads:
        parts = (heads, w.shape[0] // (3 * heads), 3)
        rows, scale = (x.unflatten(-2, parts).transpose(-3, -2) for x in (rows, scale))  # [taps, heads, 3, D, Cin]
        out = y.view(rows.shape)
    torch.mul(rows, scale, out=out)
    return reference.up_weight(y).to(dtype) if up else y, length.squeeze(1)


def mp_weight_backward(
    g: Tensor, w: Tensor, length: Tensor, gain: Tensor | None, heads: int, split: int, left: float, right: float
) -> tuple[Tensor, Tensor]:
    """dw = gain/d · (g − w·⟨w,g⟩/(‖w‖·d)) and dgain = Σ ⟨w,g⟩/d (nothing without a gain), g being times the factors."""
    factors = Factors(split, left, right)
    g = (up_weight_backward(g) if g.shape[0] == 16 else g).permute(1, 2, 0)
    if heads:
        g = g.unflatten(0, (heads, 3, w.shape[0] // (3 * heads))).transpose(1, 2).flatten(0, 2)
    if factors != NO_FACTORS:
        g = g * factors.columns(w)[:, None]
    length = length.unsqueeze(1)
    d = length + EPS * math.sqrt(w.shape[1:].numel())
    dw, dot = project(g.reshape(w.flatten(1).shape).to(d.dtype), w.flatten(1), length * d, (1,))
    if gain is None:
        return dw.div_(d).view_as(w), w.new_empty([0])
    return dw.mul_(gain / d).view_as(w), (dot / d).sum().reshape(gain.shape)


def up_weight_backward(g: Tensor) -> Tensor:
    """`[16, Cout, Cin]` → `[9, Cout, Cin]`: every tap of a 3×3 is part of one of each phase."""
    g = g.to(wide(g.dtype)).unflatten(0, (2, 2, 2, 2))  # [row phase, column phase, row tap, column tap, Cout, Cin]
    rows = [g[0, :, 0] + g[1, :, 0], g[0, :, 1] + g[1, :, 0], g[0, :, 1] + g[1, :, 1]]
    return torch.stack([r[0, i] + r[1, j] for r in rows for i, j in ((0, 0), (1, 0), (1, 1))])


def linear(
    x: Tensor, w: Tensor, master: Tensor | None, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    y = F.linear(x, w[0])
    y = y if scale == 1 else y.mul_(scale)
    return (y if shift == 0 else y.add_(shift)).to(dtype or x.dtype)


def linear_backward(g: Tensor, x: Tensor, w: Tensor, scale: float = 1.0, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    """dx (empty if it is not wanted) and dw."""
    g = g.to(x.dtype) if scale == 1 else g.to(x.dtype) * scale
    dw = g.flatten(0, -2).T @ x.flatten(0, -2)
    return g @ w[0] if with_dx else x.new_empty(0), dw.to(wide(w.dtype))[None]


def conv(x: Tensor, w: Tensor, master: Tensor | None = None) -> Tensor:
    return library.convolution(x[..., : w.shape[2]], w)


def conv_backward(g: Tensor, x: Tensor, w: Tensor, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    """dx (empty if it is not wanted) and dw."""
    more = x.shape[3] - w.shape[2]
    dx, dw = _conv_backward(g, x[..., : w.shape[2]], w, with_dx=with_dx)
    return F.pad(dx, (0, more)) if with_dx and more else dx, dw


def _conv_backward(g: Tensor, x: Tensor, w: Tensor, scale: float = 1, with_dx: bool = True) -> tuple[Tensor, Tensor]:
    """dx and `scale` · dw."""
    dx = library.convolution(g, w, transposed=True) if with_dx else g.new_empty(0)
    return dx, library.weight_gradient(g, x, w.shape[0]).to(wide(w.dtype)).mul_(scale).contiguous()


def gradient_like(w: Tensor) -> Tensor:
    """Memory for the gradient of a weight: fp32 at least."""
    return w.new_empty(w.shape, dtype=wide(w.dtype))


def conv_silu(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    """Also u, the convolution before its modulation, if it `saves` that for the derivative."""
    u = conv(x, w)
    return F.silu(u * m[:, None, None], inplace=True).mul_(SILU_SCALE), u if saves else u.new_empty(0)


def conv_silu_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    du, dm = _modulated_backward(g, u, m)
    return *_conv_backward(du, x, w), dm


def conv_silu_up(x: Tensor, w: Tensor, master: Tensor | None, m: Tensor, saves: bool) -> tuple[Tensor, Tensor]:
    return conv_silu(x, w, master, m, saves)


def conv_silu_up_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return conv_silu_backward(g, x, w, m, u)


def _modulated_backward(g: Tensor, u: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    m = m[:, None, None]
    g = aten.silu_backward(g, u * m).mul_(SILU_SCALE)
    dm = (g * u).sum((1, 2), dtype=wide(m.dtype)).to(m.dtype)
    return g.mul_(m), dm


def conv_sum(
    x: Tensor, w: Tensor, master: Tensor | None, residual: Tensor, t: float, clip: float | None
) -> Tensor:
    scale, scale_conv = sum_scales(t)
    y = conv(x, w * scale_conv).add_(residual, alpha=scale)  # the weight is smaller than the output
    return y if clip is None else y.clamp_(-clip, clip)


def conv_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor | None, t: float, clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scale, scale_conv = sum_scales(t)
    g = clip_backward(g, y, clip)
    return *_conv_backward(g, x, w * scale_conv, scale_conv), g * scale


def clip_backward(g: Tensor, y: Tensor | None, clip: float | None) -> Tensor:
    """g where |y| < clip, else 0, NaN included. y, the clipped output, need not be given without a clip."""
    return g if clip is None else torch.where(y.abs() < clip, g, 0)


def conv_cat_sum(
    x: Tensor, w: Tensor, master: Tensor | None, a: Tensor, b: Tensor, w_skip: Tensor, master_skip: Tensor | None,
    clip: float | None,
) -> Tensor:  # fmt: skip
    """The 1×1 convolutions accumulate into the output of the 3×3."""
    y = conv(x, w)
    rows = y.flatten(0, 2)
    for source, weight in zip((a, b), _parts(w_skip, a, b)):
        torch.addmm(rows, source.flatten(0, 2), weight.T, out=rows)
    return y if clip is None else y.clamp_(-clip, clip)


def conv_cat_sum_backward(
    g: Tensor, x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, y: Tensor | None, clip: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = clip_backward(g, y, clip)
    columns, (w_a, w_b) = g.flatten(0, 2).T, _parts(w_skip, a, b)
    dw_skip = [(columns @ source.flatten(0, 2)).to(wide(g.dtype)) for source in (a, b)]
    return *_conv_backward(g, x, w), g @ w_a, g @ w_b, torch.cat(dw_skip, dim=-1)[None]


def _parts(w_skip: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Each source's columns of w_skip."""
    return w_skip[0].split((a.shape[-1], b.shape[-1]), dim=-1)


def fork_backward(g: Tensor, other: Tensor | None, x: Tensor, clip: float) -> Tensor:
    return clip_backward(g if other is None else g + other, x, clip)


def mp_fourier(x: Tensor, freqs: Tensor, phases: Tensor) -> Tensor:
    return torch.outer(x, freqs).add_(phases).cos_().mul_(math.sqrt(2))


def precondition_input(x: Tensor, sigma: Tensor, sigma_data: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    *_, c_in = noise_scales(sigma, sigma_data)
    n, c, height, width = x.shape
    y = x.new_zeros(n, height, width, reference.input_channels(c), dtype=dtype)
    y[..., :c] = (c_in * x).permute(0, 2, 3, 1)
    y[..., c] = 1
    return y, sigma.log() / 4


def precondition_input_dx(g: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """g `[N, C, H, W]`, of the image's channels only."""
    *_, c_in = noise_scales(sigma, sigma_data)
    return (c_in * g).to(sigma.dtype)


def precondition_input_dsigma(g: Tensor | None, g_noise: Tensor | None, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """c_in′ = −σ·c_in³ and c_noise′ = 1/(4σ)."""
    s = sigma.to(wide(sigma.dtype))
    dsigma = torch.zeros_like(s)
    if g is not None:
        *_, c_in = noise_scales(s, sigma_data)
        dsigma = dsigma - s * c_in.flatten() ** 3 * (g * x.to(s.dtype)).sum((1, 2, 3))
    if g_noise is not None:
        dsigma = dsigma + g_noise / (4 * s)
    return dsigma.to(sigma.dtype)


def precondition_output(f: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    c_skip, c_out, _ = noise_scales(sigma, sigma_data)
    return (c_skip * x).addcmul_(c_out, f[..., : x.shape[1]].permute(0, 3, 1, 2).to(x.dtype))


def precondition_output_backward(g: Tensor, sigma: Tensor, sigma_data: float, channels: int, dtype: torch.dtype) -> Tensor:
    """The gradient of f, 0 in its channels beyond those of g."""
    _, c_out, _ = noise_scales(sigma, sigma_data)
    n, c, height, width = g.shape
    df = g.new_zeros(n, height, width, channels, dtype=dtype)
    df[..., :c] = (c_out * g).permute(0, 2, 3, 1)
    return df


def precondition_output_dx(g: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    c_skip, _, _ = noise_scales(sigma, sigma_data)
    return c_skip * g


def precondition_output_dsigma(g: Tensor, f: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """c_skip′ = −2σ·c_in²·c_skip and c_out′ = σ_data·c_in − σ²·σ_data·c_in³ (of ±∞ NaN, as by autograd)."""
    s, g = sigma.to(wide(sigma.dtype)), g.to(wide(g.dtype))
    c_skip, _, c_in = (c.flatten() for c in noise_scales(s, sigma_data))
    of_skip, of_out = (g * x).sum((1, 2, 3)), (g * f[..., : x.shape[1]].permute(0, 3, 1, 2)).sum((1, 2, 3))
    of_out = sigma_data * c_in * of_out
    return (of_out - (s * c_in) ** 2 * of_out - 2 * s * c_in**2 * c_skip * of_skip).to(sigma.dtype)


def uncertainty_loss(denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float) -> Tensor:
    return reference.uncertainty_loss(denoised, images, sigma, logvar, sigma_data)


def uncertainty_loss_backward(
    g: Tensor, denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float
) -> tuple[Tensor, Tensor]:
    """Those of `denoised` and `logvar`: 2g·λ/exp(u)·(D − y), and Σg − λ/exp(u)·Σg·(D − y)²."""
    g, d, s, u = (x.to(wide(x.dtype)) for x in (g, denoised, sigma, logvar))
    e = u.exp()
    weight = (s**2 + sigma_data**2) / (s * sigma_data) ** 2 / e
    g, error = g.flatten(1), (d - images).flatten(1)
    du = g.sum(1) - (g * error**2).sum(1) * (weight / e * e)  # of an infinite u NaN, as by autograd
    return (g * weight[:, None] * (2 * error)).view_as(denoised).to(denoised.dtype), du.to(logvar.dtype)


def uncertainty_loss_dsigma(
    g: Tensor, denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float
) -> Tensor:
    """λ′ = 2σ/p − (σ² + σ_data²)·2σ·σ_data²/p² with p = (σ·σ_data)² (of ±∞ NaN, as by autograd)."""
    g, denoised, s, u = (x.to(wide(x.dtype)) for x in (g, denoised, sigma, logvar))
    square = (g * (denoised - images) ** 2).flatten(1).sum(1) / u.exp()
    p = (s * sigma_data) ** 2
    return (square / p * 2 * s - square * ((s**2 + sigma_data**2) / p / p) * 2 * s * sigma_data**2).to(sigma.dtype)


def noise_scales(sigma: Tensor, sigma_data: float) -> tuple[Tensor, ...]:
    """c_skip, c_out and c_in `[N, 1, 1, 1]`."""
    return tuple(c[:, None, None, None] for c in reference.noise_scales(sigma, sigma_data))


def mp_silu(x: Tensor, scale: float = 1.0) -> Tensor:
    return F.silu(_scaled(x, scale)).mul_(SILU_SCALE)


def mp_silu_backward(g: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    return aten.silu_backward(g, _scaled(x, scale)).mul_(SILU_SCALE * scale)


def mp_sum(a: Tensor, b: Tensor, t: float, clip: float | None) -> Tensor:
    return reference.mp_sum(a, b, t, clip)


def mp_sum_backward(g: Tensor, y: Tensor | None, t: float, clip: float | None) -> tuple[Tensor, Tensor]:
    g = clip_backward(g, y, clip)
    scale_a, scale_b = sum_scales(t)
    return g * scale_a, g * scale_b


def cat_silu(a: Tensor, b: Tensor, t: float) -> Tensor:
    scales = cat_scales(a.shape[-1], b.shape[-1], t)
    y = torch.cat([_scaled(x, scale) for x, scale in zip((a, b), scales)], dim=-1)
    return F.silu(y, inplace=True).mul_(SILU_SCALE)


def cat_silu_backward(g: Tensor, a: Tensor, b: Tensor, t: float) -> tuple[Tensor, Tensor]:
    scales = cat_scales(a.shape[-1], b.shape[-1], t)
    parts = zip(g.split([a.shape[-1], b.shape[-1]], dim=-1), (a, b), scales)
    da, db = [aten.silu_backward(g, _scaled(x, scale)).mul_(SILU_SCALE * scale) for g, x, scale in parts]
    return da, db


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale  # 1: sources of equal width


def pixel_norm_silu(x: Tensor, down: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Also the rms of each pixel `[N, H, W]`."""
    if down:
        x = reference.resample(x, (1, 1), "down")
    root = math.sqrt(x.shape[-1])
    rms = norm(x, (-1,)) / root
    y = (x * (1 / (rms + EPS))).to(x.dtype).contiguous()
    return y, mp_silu(y), rms.squeeze(-1)


def pixel_norm_silu_backward(
    gy: Tensor, gs: Tensor, y: Tensor, rms: Tensor, down: bool, scale: float = 1.0,
    other: Tensor | None = None, x: Tensor | None = None, clip: float | None = None,
) -> Tensor:  # fmt: skip
    """(g − y · ⟨y,g⟩/C · (rms+ε)/rms) / (rms+ε) with g = scale·gy + silu′(y)·gs; plus `other`, and 0 where |x| ≥ clip."""
    rms = rms.unsqueeze(-1)
    d = rms + EPS
    g = torch.add(gy if scale == 1 else gy * scale, aten.silu_backward(gs, y), alpha=SILU_SCALE)
    dx, _ = project(g.to(rms.dtype), y.to(rms.dtype), rms / d * y.shape[-1], (-1,))
    dx = dx.mul_((0.25 if down else 1) / d).to(y.dtype)
    dx = resample(dx, (1, 1), "up") if down else dx
    return clip_backward(dx if other is None else dx + other, x, clip)


def cosine_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Also the logarithm of the sum of exponentials of each row of logits `[N, heads, H·W]`."""
    q, k, v = _normalized(qkv, heads)[0]
    logits = torch.bmm(q, k.mT).mul_(1 / math.sqrt(q.shape[-1]))
    lse = logits.logsumexp(-1).to(wide(qkv.dtype))
    y = torch.bmm(logits.softmax(-1), v).unflatten(0, (-1, heads))
    n, h, w, c = qkv.shape
    return y.transpose(1, 2).reshape(n, h, w, c // 3), lse.view(n, heads, h * w)


def _normalized(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The normalised q, k and v `[3, N·heads, H·W, D]`, and the norms before that `[3, N·heads, H·W, 1]`."""
    x = qkv.unflatten(-1, (heads, 3, -1)).flatten(1, 2).permute(3, 0, 2, 1, 4)  # [3, N, heads, H·W, D]
    root = math.sqrt(x.shape[-1])
    length = norm(x, (-1,))
    n = torch.mul(x, root / (length + EPS * root), out=x.new_empty(x.shape))  # out: contiguous in this order
    return n.flatten(1, 2), length.flatten(1, 2)


def cosine_attention_backward(g: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, heads: int) -> Tensor:
    """logits: p·(∂p − ⟨g,y⟩) / √D;  x: (∂n − n·⟨n,∂n⟩/(‖x‖·√D)·d) · √D/d with d = ‖x‖ + ε·√D."""
    images, height, width, channels = g.shape
    pixels, depth = height * width, channels // heads
    n, length = _normalized(qkv, heads)
    (q, k, v), root = n, math.sqrt(depth)
    g, y = (x.reshape(images, pixels, heads, depth).transpose(1, 2).flatten(0, 1) for x in (g, y))
    p = torch.bmm(q, k.mT).mul_(1 / root).sub_(lse.flatten(0, 1).unsqueeze(-1)).exp_().to(q.dtype)
    delta = (g.to(lse.dtype) * y.to(lse.dtype)).sum(-1, keepdim=True)
    dlogits = (torch.bmm(g, v.mT).to(lse.dtype).sub_(delta) * p).mul_(1 / root).to(q.dtype)
    dn = torch.empty_like(n)
    for out, left, right in zip(dn, (dlogits, dlogits.mT, p.mT), (k, q, g)):
        torch.bmm(left, right, out=out)
    scale = root / (length + EPS * root)
    dx, _ = project(dn.to(lse.dtype), n.to(lse.dtype), length * scale * root, (-1,))
    dqkv = dx.mul_(scale).to(q.dtype).unflatten(1, (images, heads)).permute(1, 3, 2, 0, 4)  # [N, H·W, heads, 3, D]
    return dqkv.reshape(images, height, width, 3 * channels)


def resample(x: Tensor, filter: Sequence[float] = (1, 1), mode: str = "keep") -> Tensor:
    """Differentiable by autograd, unlike the others."""
    if mode == "up" and tuple(filter) == (1, 1) and x.numel():
        return F.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode="nearest").permute(0, 2, 3, 1).contiguous()
    return reference.resample(x, filter, mode)
