"""What ops of convolutions share: checks of their arguments, forms of their outputs, FLOPs, and what kernels refuse."""

import torch
from torch import Tensor

from kernels.checks import check_activation, check_like, check_shape, check_weight
from kernels.weight import Weight, unpack


def saves_for(*tensors: Tensor | None) -> bool:
    """Will there be a backward?"""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)


def check_conv(
    x: Tensor, w: Weight, name: str = "w", taps: tuple[int, ...] = (1, 9), more: bool = False
) -> tuple[Tensor, Tensor | None]:
    w, master = unpack(w)
    check_activation("x", x)
    check_weight(name, w, "x", x, taps, more)
    return w, master


def check_modulation(m: Tensor, x: Tensor, w: Tensor) -> None:
    check_shape("m", m, (x.shape[0], w.shape[1]))
    check_like("m", m, "x", x)


def check_residual(residual: Tensor, x: Tensor, w: Tensor) -> None:
    check_activation("residual", residual)
    check_shape("residual", residual, (*x.shape[:3], w.shape[1]))
    check_like("residual", residual, "x", x)


def check_sources(a: Tensor, b: Tensor, w_skip: Weight, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
    w_skip, master = unpack(w_skip)
    for name, source in (("a", a), ("b", b)):
        check_activation(name, source)
        check_shape(name, source, (*x.shape[:3], source.shape[3]))
        check_like(name, source, "x", x)
    check_shape("w_skip", w_skip, (1, w.shape[1], a.shape[3] + b.shape[3]))
    check_like("w_skip", w_skip, "x", x)
    return w_skip, master


def output(x: Tensor, w: Tensor, *_: Tensor | float | None) -> Tensor:
    return x.new_empty(*x.shape[:3], w.shape[1])


def doubled(x: Tensor, channels: int) -> Tensor:
    n, height, width, _ = x.shape
    return x.new_empty(n, 2 * height, 2 * width, channels)


def flops(x: tuple[int, ...], *weights: tuple[int, ...]) -> int:
    """Of convolutions at the pixels of x."""
    return sum(2 * x[0] * x[1] * x[2] * w[0] * w[1] * w[2] for w in weights)


def refuses(args: tuple, *weights: int) -> str | None:
    """Why kernels cannot take the weights at these positions, or None."""
    for w in (args[i] for i in weights):
        if w.shape[1] % 8 or w.shape[2] % 8:
            return f"a weight of {list(w.shape)}, kernels take multiples of 8 channels"
    return None


def refuses_sources(*sources: Tensor) -> str | None:
    return next((f"a source of {x.shape[3]} channels, kernels take multiples of 8" for x in sources if x.shape[3] % 8), None)


def refuses_t(t: float) -> str | None:
    """Of an MP-Sum's derivative, the convolution's factor is taken relative to the residual's, which is 0 at the end of t."""
    return "t = 1, kernels sum two sources" if t == 1 else None


def like(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs of the forms of `tensors`: gradients of activations and modulations, dense."""
    return tuple(x.new_empty(x.shape) for x in tensors)
