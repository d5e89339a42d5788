"""Convolutions below the ops: memory that kernels may touch, operands, PyTorch's answer, and the epilogues."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import convolve
from kernels.convolve import Source

aten = torch.ops.aten
MARGIN = 64  # elements before and after each tensor: whole 16 bytes


class Memory(TorchDispatchMode):
    """While entered, all that is allocated lies between NaNs and is NaN."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.blocks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.new_empty.default:
            return self.place(args[1], kwargs.get("dtype", args[0].dtype))
        if func is aten.empty_like.default:
            return self.place(args[0].shape, args[0].dtype)
        return func(*args, **kwargs)

    def place(self, shape, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        size = math.prod(shape)
        self.blocks.append(torch.full((size + 2 * MARGIN,), math.nan, dtype=dtype, device=self.device))
        return self.blocks[-1][MARGIN : MARGIN + size].view(*shape)

    def intact(self) -> bool:
        return all(x.isnan().all() for block in self.blocks for x in (block[:MARGIN], block[-MARGIN:]))

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return self.place(values.shape).copy_(values)

    def normal(self, *shape: int) -> torch.Tensor:
        return self.put(torch.randn(shape, generator=self.generator))

    def weight(self, *shape: int, fan_in: int) -> torch.Tensor:
        return self.put(torch.randn(shape, generator=self.generator) / fan_in**0.5)

    def integers(self, *shape: int, most: int = 2) -> torch.Tensor:
        return self.put(torch.randint(-most, most + 1, shape, generator=self.generator))


def conv2d(x, w):
    """x `[N, H, W, K]`, w `[9 or 1, C, K]`."""
    side = math.isqrt(len(w))
    kernel = w.permute(1, 2, 0).unflatten(2, (side, side))
    return F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=side // 2).permute(0, 2, 3, 1)


def by_autograd(x, w, g):
    """y, dx and dw in float64."""
    x, w, g = (t.cpu().double().requires_grad_() for t in (x, w, g))
    y = conv2d(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


def exactly(actual, expected) -> bool:
    assert expected.abs().max() <= (2048 if actual.dtype == torch.float16 else 2**24), "not exact"
    return torch.equal(actual.cpu(), expected.to(actual.dtype))


def input_and_weight(memory, n, h, w, k, c, taps):
    """And the gradient of the output, of small integers."""
    return memory.integers(n, h, w, k), memory.integers(taps, c, k, most=1), memory.integers(n, h, w, c)


def mp_silu(x):
    return F.silu(x) / 0.596


def grads(y, x, g):
    return torch.autograd.grad(y, x, g)


SUM = dict(scale=0.8, scale_aux=0.6)
INNER = dict(transposed=True, scale=0.8)


def operands(memory, n, h, w, c, k=24, taps=1):
    """Of all epilogues. Rows of the skip weights and of m lie apart."""
    skip, modulation = memory.weight(1, c, 56, fan_in=56), memory.normal(n, c + 16)
    return SimpleNamespace(
        x=memory.normal(n, h, w, k), w=memory.weight(taps, c, k, fan_in=taps * k),
        a=memory.normal(n, h, w, 16), wa=skip[..., :16], b=memory.normal(n, h, w, 40), wb=skip[..., 16:],
        m=modulation[:, 8:-8], aux=memory.normal(n, h, w, c), act=memory.normal(n, h, w, c),
        g=memory.normal(n, h, w, k), wt=memory.weight(taps, k, c, fan_in=taps * k),
    )  # fmt: skip


def sources(t):
    return [Source(t.a, t.wa), Source(t.b, t.wb)]


def of_residual(t):
    """The derivative of 0.8·conv(MP-SiLU(0.7·act)) + 0.6·act, the gradients being g and aux."""
    s = t.act.detach().requires_grad_()
    return grads((0.8 * conv2d(mp_silu(0.7 * s), t.wt), 0.6 * s), s, (t.g, t.aux))


def of_silu(t):
    """The derivatives of 0.8·conv(MP-SiLU(aux·m))."""
    u, m = t.aux.detach().requires_grad_(), t.m.detach().requires_grad_()
    return grads(0.8 * conv2d(mp_silu(u * m[:, None, None]), t.wt), (u, m), t.g)


def modulated(t):
    u = 0.8 * conv2d(t.x, t.w)
    return mp_silu(u * t.m[:, None, None]), u


def with_silu(y):
    return y, mp_silu(y)


# How a kernel computes it, and how PyTorch does
EPILOGUES = {
    "sum": (
        lambda t, **o: convolve.convolve(t.x, t.w, scale=0.8, **o),
        lambda t: (0.8 * conv2d(t.x, t.w),),
    ),
    "sum, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, scale=0.8, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * conv2d(t.x, t.w)).clamp(-0.5, 0.5)),
    ),
    "sum of two": (
        lambda t, **o: convolve.convolve(t.x, t.w, **SUM, aux=t.aux, **o),
        lambda t: (0.8 * conv2d(t.x, t.w) + 0.6 * t.aux,),
    ),
    "sum of two, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, **SUM, aux=t.aux, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * conv2d(t.x, t.w) + 0.6 * t.aux).clamp(-0.5, 0.5)),
    ),
    "source": (
        lambda t, **o: convolve.convolve(t.x, t.w, sources=sources(t)[:1], scale=0.8, **o),
        lambda t: (0.8 * (conv2d(t.x, t.w) + conv2d(t.a, t.wa)),),
    ),
    "two sources, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, sources=sources(t), scale=0.8, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * (conv2d(t.x, t.w) + conv2d(t.a, t.wa) + conv2d(t.b, t.wb))).clamp(-0.5, 0.5)),
    ),
    "silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, "silu", scale=0.8, m=t.m, **o),
        lambda t: modulated(t)[:1],
    ),
    "silu, u": (
        lambda t, **o: convolve.convolve(t.x, t.w, "silu", scale=0.8, m=t.m, with_extra=True, **o),
        modulated,
    ),
    "silu_grad": (
        lambda t, **o: convolve.convolve(t.g, t.wt, "silu_grad", **INNER, aux=t.aux, m=t.m, **o),
        of_silu,
    ),
    "residual_silu_grad": (
        lambda t, **o: convolve.convolve(
            t.g, t.wt, "residual_silu_grad", **INNER, aux=t.aux, scale_aux=0.6, act=t.act, scale_act=0.7, **o
        ),
        of_residual,
    ),
}  # fmt: skip


def results(outputs) -> list[torch.Tensor]:
    return [y for y in outputs if y is not None]


def each(t, f) -> SimpleNamespace:
    return SimpleNamespace(**{name: f(x) for name, x in vars(t).items()})


def image(t, i) -> SimpleNamespace:
    return SimpleNamespace(**{name: x if name.startswith("w") else x[i : i + 1] for name, x in vars(t).items()})
