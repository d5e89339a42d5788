"""What every op asks of its arguments: one clear line that names the argument and what it got."""

import torch
from torch import Tensor


def check_activation(name: str, x: Tensor) -> None:
    """`[N, H, W, C]`, contiguous, floating point, of at least one channel."""
    if x.ndim != 4 or not x.shape[3]:
        raise ValueError(f"{name}: expected [N, H, W, C], got {list(x.shape)}")
    check_dense(name, x)


def check_even(name: str, x: Tensor) -> None:
    """An activation whose H and W can be halved."""
    if x.shape[1] % 2 or x.shape[2] % 2:
        raise ValueError(f"{name}: expected even H and W, got {list(x.shape)}")


def check_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: expected floating point, got {dtype}")


def check_dense(name: str, x: Tensor) -> None:
    """Contiguous and floating point."""
    check_floating(name, x.dtype)
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(x.stride())} for {list(x.shape)}")


def check_like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Same type and device."""
    if x.dtype != other.dtype or x.device != other.device:
        raise ValueError(f"{name}: {x.dtype} on {x.device} does not go with {other_name}, {other.dtype} on {other.device}")


def check_heads(name: str, channels: int, heads: int) -> None:
    """q, k and v of each head."""
    if heads < 1 or channels % (3 * heads):
        raise ValueError(f"{name}: {channels} channels are not a multiple of 3 × {heads} heads")


def check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected {list(shape)}, got {list(x.shape)}")


def check_weight(name: str, w: Tensor, x_name: str, x: Tensor, taps: tuple[int, ...] = (1, 9), more: bool = False) -> None:
    """A prepared weight `[taps, Cout, Cin]` for x `[..., Cin]`, which may have `more` channels."""
    if w.ndim != 3 or w.shape[0] not in taps:
        allowed = " or ".join(map(str, taps))
        raise ValueError(f"{name}: expected a prepared weight [{allowed}, Cout, Cin], got {list(w.shape)}")
    if x.shape[-1] < w.shape[-1] or (x.shape[-1] > w.shape[-1] and not more):
        raise ValueError(f"{x_name}: {x.shape[-1]} channels do not match the weight's {w.shape[-1]} ({name} is {list(w.shape)})")
    check_like(name, w, x_name, x)
