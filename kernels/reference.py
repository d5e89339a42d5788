"""The meaning of every op, in plain differentiable PyTorch. Runs on any device; it is also the CPU path.

Legend: N images, H×W pixels, C channels, `[taps, Cout, Cin]` prepared weight (9 taps of a 3×3 in row-major order, 16 of
four phases behind an up-sampling, or 1), D channels per head. Equation numbers are those of Karras et al., "Analyzing and
Improving the Training Dynamics of Diffusion Models" (arXiv 2312.02696).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

EPS = 1e-4  # every normalisation of the paper's config G
SILU_SCALE = 1 / 0.596  # Eq. 81; the rounded constant is what the published networks were trained with


def normalize(x: Tensor, dim: int | Sequence[int], eps: float = EPS) -> Tensor:
    """`x / (eps + rms(x))`, the root mean square taken over `dim` in fp32. Eq. 47 with eps relative to the RMS.

    At `x = 0` the result is 0 and the derivative `1 / eps`.
    """
    return (x * inverse_rms(x, dim, eps)).to(x.dtype)


def inverse_rms(x: Tensor, dim: int | Sequence[int], eps: float = EPS) -> Tensor:
    """`1 / (eps + rms(x))` over `dim`, kept as size 1, in fp32 (fp64 for fp64)."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    count = math.prod(x.shape[d] for d in dims)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return 1 / (norm / math.sqrt(count) + eps)


Branch = Tensor | tuple[Tensor, Tensor]  # the latter where the activated result is asked for


class Factors(NamedTuple):
    """Constants that a weight is multiplied by: `left` of its first `split` input channels, `right` of the others."""

    split: int = 0
    left: float = 1.0
    right: float = 1.0

    def columns(self, w: Tensor) -> Tensor:
        """`[Cin]` of a raw weight `[Cout, Cin, …]`."""
        return torch.cat([w.new_full([self.split], self.left), w.new_full([w.shape[1] - self.split], self.right)])


NO_FACTORS = Factors()


def mp_weight(
    w: Tensor,
    gain: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    heads: int = 0,
    up: bool = False,
    factors: Factors = NO_FACTORS,
) -> Tensor:
    """Raw fp32 weight `[Cout, Cin, k, k]` or `[Cout, Cin]` → prepared `[k·k, Cout, Cin]` in `dtype`. Eq. 66.

    Each row is normalised, scaled by `gain / sqrt(fan_in)` in fp32 and cast. `gain` is a learned scalar (Eq. 104)
    or None for 1. With `heads`, the rows of a qkv weight move from the checkpoint's order (head, channel, q|k|v)
    to (head, q|k|v, channel), which `cosine_attention` expects. `up` makes a 3×3 weight `[16, Cout, Cin]`: see
    `up_weight`. `factors` are multiplied before the cast.
    """
    if w.ndim not in (2, 4) or (w.ndim == 4 and w.shape[2] != w.shape[3]):
        raise ValueError(f"w: expected [Cout, Cin] or [Cout, Cin, k, k], got {list(w.shape)}")
    rows = w.flatten(2) if w.ndim == 4 else w.unsqueeze(2)  # [Cout, Cin, taps]
    scale = inverse_rms(rows, dim=(1, 2)) / math.sqrt(rows.shape[1] * rows.shape[2])
    rows = rows * (scale if gain is None else scale * gain) * factors.columns(w)[:, None]
    if heads:
        rows = rows.unflatten(0, (heads, len(rows) // (3 * heads), 3)).transpose(1, 2).flatten(0, 2)
    rows = rows.permute(2, 0, 1)
    return (up_weight(rows) if up else rows).to(dtype)


def up_weight(w: Tensor) -> Tensor:
    """A 3×3 convolution behind nearest-neighbour doubling as four 2×2 convolutions: `[9, Cout, Cin]` → `[16, Cout, Cin]`.

    These are the output's (even, odd) rows × (even, odd) columns, each of 2 × 2 taps. Of an even row the three taps see
    the row above once and then the same row twice; of an odd row the same row twice and then the one below.
    """
    first, middle, last = w.unflatten(0, (3, 3)).unbind(0)
    rows = torch.stack([first, middle + last, first + middle, last])
    first, middle, last = rows.unbind(1)
    both = torch.stack([first, middle + last, first + middle, last], dim=1)  # [(phase, tap), (phase, tap), Cout, Cin]
    return both.unflatten(1, (2, 2)).unflatten(0, (2, 2)).transpose(1, 2).flatten(0, 3)


def linear(x: Tensor, w: Tensor, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """`scale · x @ w[0].T + shift` in `dtype` (x's without one): x `[..., Cin]`, w `[1, Cout, Cin]` → `[..., Cout]`."""
    _check_channels("x", x, w)
    return (F.linear(x, w[0]) * scale + shift).to(dtype or x.dtype)


def conv(x: Tensor, w: Tensor) -> Tensor:
    """3×3 or 1×1 convolution, stride 1, zero padding: x `[N, H, W, Cin]`, w `[9 or 1, Cout, Cin]` → `[N, H, W, Cout]`.

    x may have more channels, of zeros: these have no weight.
    """
    return _conv(x[..., : w.shape[2]], w)


def _conv(x: Tensor, w: Tensor) -> Tensor:
    if w.shape[0] == 1 or x.numel() == 0:  # without pixels all taps are alike
        return linear(x, w[w.shape[0] // 2, None])
    _check_channels("x", x, w)
    kernel = w.permute(1, 2, 0).unflatten(2, (3, 3))  # [Cout, Cin, 3, 3]
    return F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)


def conv_up(x: Tensor, w: Tensor) -> Tensor:
    """3×3 convolution of x `[N, H, W, Cin]` behind nearest-neighbour doubling, w by `up_weight` → `[N, 2H, 2W, Cout]`.

    Rounded once, like any convolution; an infinite weight meets no zeros around the image.
    """
    _check_channels("x", x, w)
    wide, w = torch.promote_types(x.dtype, torch.float32), w.unflatten(0, (4, 4))
    if x.numel() == 0:
        return _nearest_2x2(linear(x, w[0, :1]))
    phases = [_phase(x.to(wide), *pair) for pair in zip(w.to(wide), UP_OFFSETS)]
    return torch.stack(phases).unflatten(0, (2, 2)).permute(2, 3, 0, 4, 1, 5).flatten(3, 4).flatten(1, 2).to(x.dtype)


def _phase(x: Tensor, w: Tensor, offsets: Sequence[tuple[int, int]]) -> Tensor:
    """The sum of x's products with the taps `[4, Cout, Cin]`, each shifted."""
    products = (x @ w.flatten(0, 1).T).unflatten(-1, w.shape[:2]).unbind(-2)
    return sum(shift(product, *offset) for product, offset in zip(products, offsets))


# For each phase, rows and columns from a pixel of x to those that its taps read.
UP_OFFSETS = [[(a + e - 1, b + f - 1) for e in (0, 1) for f in (0, 1)] for a in (0, 1) for b in (0, 1)]


def shift(x: Tensor, rows: int, columns: int) -> Tensor:
    """y[:, h, w] = x[:, h + rows, w + columns], 0 outside."""
    return F.pad(x, (0, 0, -columns, columns, -rows, rows))


def conv_silu(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """MP-SiLU of the convolution modulated per image and channel by m `[N, Cout]`."""
    return mp_silu(_conv(x, w) * m[:, None, None, :])


def conv_silu_up(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """`conv_silu` behind nearest-neighbour doubling: see `conv_up`."""
    return mp_silu(conv_up(x, w) * m[:, None, None, :])


def conv_sum(x: Tensor, w: Tensor, residual: Tensor, t: float, clip: float | None = None) -> Tensor:
    """MP-Sum of `residual` `[N, H, W, Cout]` (weight ∝ 1−t) and the convolution of x (weight ∝ t), then clip."""
    return mp_sum(residual, _conv(x, w), t, clip)


def conv_cat_sum(x: Tensor, w: Tensor, a: Tensor, b: Tensor, w_skip: Tensor, clip: float | None = None) -> Tensor:
    """The convolution of x plus the 1×1 convolution `w_skip` `[1, Cout, Ca+Cb]` of a and b, one after the other, then clip.

    The MP-Sum of an MP-Cat and a residual branch where the weights hold these two's factors: see `joined_factors`.
    """
    w_a, w_b = w_skip.split((a.shape[-1], b.shape[-1]), dim=-1)
    y = _conv(x, w) + _conv(a, w_a) + _conv(b, w_b)
    return y if clip is None else y.clamp(-clip, clip)


def joined_factors(channels_a: int, channels_b: int, cat_t: float, t: float) -> tuple[Factors, Factors]:
    """With these in its weights w and w_skip, `conv_cat_sum` is MP-Sum of w_skip's convolution of MP-Cat, and w's."""
    scale, scale_conv = sum_scales(t)
    scale_a, scale_b = cat_scales(channels_a, channels_b, cat_t)
    return Factors(right=scale_conv), Factors(channels_a, scale * scale_a, scale * scale_b)


def residual_branch_norm(
    x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, t: float, clip: float | None = None, down: bool = False,
    activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_sum` of `conv_silu` behind `pixel_norm_silu` (or `down_…`): a block of the encoder.

    The gradient of every `…_branch…` passes its clip: whoever reads the result stops it (`fork`, `clip_x`, `clip_a`).
    """
    x, s = down_pixel_norm_silu(x) if down else pixel_norm_silu(x)
    return _branch(conv_sum(conv_silu(s, w0, m), w1, x, t), clip, activate)


def residual_branch_norm_fork(
    x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, t: float, clip: float | None = None, down: bool = False,
    clip_x: float | None = None, activate: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`residual_branch_norm`, and x for another reader."""
    x, other = fork(x, clip_x)
    y = residual_branch_norm(x, w0, m, w1, t, clip, down, activate)
    return (y, other) if activate is None else (*y, other)


def residual_branch_silu(
    x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, t: float, clip: float | None = None, clip_x: float | None = None,
    s: Tensor | None = None, activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_sum` of x and `conv_silu` of MP-SiLU(x), x's gradient stopped at `clip_x`: a block of the decoder without a skip."""
    x = clip_gradient(x, clip_x)
    return _branch(conv_sum(conv_silu(mp_silu(x), w0, m), w1, x, t), clip, activate)


def residual_branch_up(
    x: Tensor, w0: Tensor, m: Tensor, w1: Tensor, t: float, clip: float | None = None, clip_x: float | None = None,
    s: Tensor | None = None, activate: float | None = None,
) -> Branch:  # fmt: skip
    """`residual_branch_silu` behind nearest-neighbour doubling, w0 `[16, Cmid, C]`: a block of the decoder that up-samples."""
    x = clip_gradient(x, clip_x)
    return _branch(conv_sum(conv_silu_up(mp_silu(x), w0, m), w1, _nearest_2x2(x), t), clip, activate)


def residual_branch_cat(
    a: Tensor, b: Tensor, w0: Tensor, m: Tensor, w1: Tensor, w_skip: Tensor, cat_t: float,
    clip: float | None = None, clip_a: float | None = None, s_a: Tensor | None = None, s_b: Tensor | None = None,
    activate: float | None = None,
) -> Branch:  # fmt: skip
    """`conv_cat_sum` of `conv_silu` of `cat_silu`, a's gradient stopped at `clip_a`: a block of the decoder with a skip."""
    a = clip_gradient(a, clip_a)
    return _branch(conv_cat_sum(conv_silu(cat_silu(a, b, cat_t), w0, m), w1, a, b, w_skip), clip, activate)


def attention_branch(
    x: Tensor, w_qkv: Tensor, w_proj: Tensor, heads: int, t: float, clip: float | None = None, activate: float | None = None
) -> Branch:  # fmt: skip
    """`conv_sum` of x with cosine attention between two 1×1 convolutions of it."""
    return _branch(conv_sum(cosine_attention(_conv(x, w_qkv), heads), w_proj, x, t), clip, activate)


def _branch(y: Tensor, clip: float | None, activate: float | None) -> Branch:
    """A branch's result; with `activate` also MP-SiLU(activate·y), as a number only: the gradient is its reader's, who has y."""
    y = _clip_straight(y, clip)
    return y if activate is None else (y, mp_silu(y.detach(), activate))


def clip_gradient(x: Tensor, clip: float | None) -> Tensor:
    """x, its gradient 0 where |x| ≥ clip, NaN included: the derivative of a clip that has let it pass."""
    return x if clip is None else torch.where(x.abs() < clip, x, x.detach())


def fork(x: Tensor, clip: float | None, readers: int = 2) -> tuple[Tensor, ...]:
    """x for several readers, whose gradients add up and are 0 where |x| ≥ clip: the derivative of an earlier straight clip."""
    return (clip_gradient(x, clip),) * readers


def _clip_straight(x: Tensor, clip: float | None) -> Tensor:
    """Clipped values, and the gradient as if they were not."""
    return x if clip is None else _StraightClip.apply(x, clip)


class _StraightClip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, clip: float) -> Tensor:
        return x.clamp(-clip, clip)

    @staticmethod
    def backward(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def mp_fourier(x: Tensor, freqs: Tensor, phases: Tensor) -> Tensor:
    """`√2·cos(freqs·x + phases)`, Eq. 75: x `[N]`, freqs and phases `[C]` → `[N, C]`."""
    return (torch.outer(x, freqs) + phases).cos() * math.sqrt(2)


def precondition_input(x: Tensor, sigma: Tensor, sigma_data: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[N, C, H, W]` at noise levels σ `[N]` → what the network takes: c_in·x in `dtype` `[N, H, W, channels]`, and c_noise `[N]`.

    Eq. 7. After the C channels follow one of ones and zeros up to a multiple of 8.
    """
    *_, c_in = noise_scales(sigma, sigma_data)
    y = F.pad((c_in[:, None, None, None] * x).permute(0, 2, 3, 1), (0, 1), value=1)
    return F.pad(y, (0, input_channels(x.shape[1]) - y.shape[3])).to(dtype), sigma.log() / 4


def precondition_output(f: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """`c_skip·x + c_out·f`, Eq. 5: f `[N, H, W, ≥ C]`, x `[N, C, H, W]`, σ `[N]` → `[N, C, H, W]` in x's type."""
    c_skip, c_out, _ = (c[:, None, None, None] for c in noise_scales(sigma, sigma_data))
    return c_skip * x + c_out * f[..., : x.shape[1]].permute(0, 3, 1, 2).to(x.dtype)


def uncertainty_loss(denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float) -> Tensor:
    """`λ(σ)/exp(u)·(denoised − images)² + u` for each element, Eq. 14 and 21: images `[N, …]`, σ and u = logvar `[N]`."""
    sigma, logvar = (x.reshape(-1, *[1] * (images.ndim - 1)) for x in (sigma, logvar))
    weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2  # λ(σ)
    return weight / logvar.exp() * (denoised - images) ** 2 + logvar


def noise_scales(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """c_skip, c_out and c_in."""
    total = sigma**2 + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data / total.sqrt(), 1 / total.sqrt()


def input_channels(channels: int) -> int:
    """Of what the network takes, for images of `channels`."""
    return (channels + 8) // 8 * 8


def mp_silu(x: Tensor, scale: float = 1.0) -> Tensor:
    """`silu(scale·x) / 0.596`: unit-variance scale·x gives unit mean square. Eq. 81."""
    return F.silu(x * scale) * SILU_SCALE


def mp_sum(a: Tensor, b: Tensor, t: float, clip: float | None = None) -> Tensor:
    """`((1−t)·a + t·b) / sqrt((1−t)² + t²)`, Eq. 88, clamped to ±clip if given."""
    scale_a, scale_b = sum_scales(t)
    y = torch.add(a * scale_a, b, alpha=scale_b)
    return y if clip is None else y.clamp(-clip, clip)


def sum_scales(t: float) -> tuple[float, float]:
    """The two factors of MP-Sum, Eq. 88."""
    scale = 1 / math.hypot(1 - t, t)
    return (1 - t) * scale, t * scale


def mp_cat(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Concatenation along the last axis, each part scaled so that it contributes by (1−t) and t. Eq. 103."""
    scale_a, scale_b = cat_scales(a.shape[-1], b.shape[-1], t)
    return torch.cat([a * scale_a, b * scale_b], dim=-1)


def cat_scales(channels_a: int, channels_b: int, t: float) -> tuple[float, float]:
    """The two factors of MP-Cat for sources of `channels_a` and `channels_b` channels."""
    scale = math.sqrt((channels_a + channels_b) / ((1 - t) ** 2 + t**2))
    return (1 - t) * scale / math.sqrt(channels_a), t * scale / math.sqrt(channels_b)


def cat_silu(a: Tensor, b: Tensor, t: float) -> Tensor:
    """MP-SiLU of MP-Cat: `[N, H, W, Ca]`, `[N, H, W, Cb]` → `[N, H, W, Ca+Cb]`."""
    return mp_silu(mp_cat(a, b, t))


def pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise each pixel over its channels: returns the normalised x and its MP-SiLU."""
    x = normalize(x, dim=-1)
    return x, mp_silu(x)


def down_pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """`pixel_norm_silu` behind a 2×2 mean: `[N, H, W, C]` → two tensors `[N, H/2, W/2, C]`."""
    return pixel_norm_silu(resample(x, (1, 1), "down"))


def cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    """Attention over all pixels of an image with normalised q, k and v.

    qkv `[N, H, W, heads·3·D]`, channels (head, q|k|v, D) → `[N, H, W, heads·D]`. |q| ≤ sqrt(D), so logits lie in
    ±sqrt(D).
    """
    if qkv.shape[-1] % (3 * heads):
        raise ValueError(f"qkv: {qkv.shape[-1]} channels are not a multiple of 3 × {heads} heads")
    n, h, w, c = qkv.shape
    q, k, v = normalize(qkv.reshape(n, h * w, heads, 3, c // (3 * heads)), dim=-1).permute(3, 0, 2, 1, 4)  # [N, heads, H·W, D]
    logits = torch.einsum("ngqd,ngkd->ngqk", q, k / math.sqrt(q.shape[-1]))
    y = torch.einsum("ngqk,ngkd->ngqd", logits.softmax(dim=-1), v)
    return y.transpose(1, 2).reshape(n, h, w, c // 3)


def resample(x: Tensor, filter: Sequence[float] = (1, 1), mode: str = "keep") -> Tensor:
    """Halve ("down") or double ("up") H and W with a separable even-length filter, or "keep" them.

    The filter is normalised to sum 1. (1, 1) is the 2×2 mean and nearest-neighbour doubling.
    """
    if mode == "keep":
        return x
    if mode not in ("down", "up") or len(filter) % 2:
        raise ValueError(f"resample: expected mode keep, down or up and an even-length filter, got {mode}, {filter}")
    if tuple(filter) == (1, 1) or x.numel() == 0:
        return _mean_2x2(x) if mode == "down" else _nearest_2x2(x)
    channels, pad = x.shape[-1], (len(filter) - 1) // 2
    f = torch.tensor(filter, dtype=torch.float32, device=x.device)
    f = torch.outer(f, f) / f.sum() ** 2 * (4 if mode == "up" else 1)
    f = f.to(x.dtype).expand(channels, 1, -1, -1)
    op = F.conv2d if mode == "down" else F.conv_transpose2d
    return op(x.permute(0, 3, 1, 2), f, groups=channels, stride=2, padding=pad).permute(0, 2, 3, 1)


def _mean_2x2(x: Tensor) -> Tensor:
    return F.avg_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) if x.numel() else x[:, ::2, ::2]


def _nearest_2x2(x: Tensor) -> Tensor:
    n, h, w, c = x.shape
    return x[:, :, None, :, None, :].expand(n, h, 2, w, 2, c).reshape(n, 2 * h, 2 * w, c)


def _check_channels(name: str, x: Tensor, w: Tensor) -> None:
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"{name}: {x.shape[-1]} channels do not match the weight's {w.shape[-1]} (w is {list(w.shape)})")
