"""What all kernels share: the one place that launches, and device functions.

Every Triton kernel of the project is started by `launch`. Within `recording`, launches are handed to a recorder instead
of the device, so that what the ledger counts and what the compile gate compiles is what would run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import reference

INTERPRET = triton.knobs.runtime.interpret  # Triton reads it when a kernel is defined: set for the whole process
EPS = tl.constexpr(reference.EPS)
SILU_SCALE = tl.constexpr(reference.SILU_SCALE)
OPTIONS = {"enable_fp_fusion": True}  # of every launch; a default of Triton 3.9, about which it warns, and not of 3.10


@dataclass(frozen=True)
class Launch:
    """One launch: `kernel[grid](*args, **options)`. FLOPs are those of matrix products, 2 per multiply-add."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    flops: int
    bytes: int


_recorder: Callable[[Launch], None] | None = None
_capability: int | None = None


@contextmanager
def recording(recorder: Callable[[Launch], None], capability: int = 90) -> Iterator[None]:
    """Hand launches to `recorder` instead of the device, with the tiles of an architecture (80, 90, 100)."""
    global _recorder, _capability
    before = _recorder, _capability
    _recorder, _capability = recorder, capability
    try:
        yield
    finally:
        _recorder, _capability = before


def is_recording() -> bool:
    return _recorder is not None


def serves(x: Tensor) -> bool:
    """Does a kernel take this tensor? On CUDA; on a CPU in the interpreter, or to be recorded."""
    return x.is_cuda or INTERPRET or is_recording()


def capability(x: Tensor) -> int:
    """The architecture that tiles are chosen for: 90 is Hopper. The interpreter takes Hopper's."""
    if _capability is not None:
        return _capability
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    return 10 * major + minor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    flops: int = 0,
    reached: Iterable[Tensor] = (),
    updated: Iterable[Tensor] = (),
    untouched: Iterable[Tensor] = (),
    **options: Any,
) -> None:
    """Start a kernel on the device of its tensors; nothing happens where there is no work.

    For the ledger, every tensor among the arguments counts as moved once, like those `reached` by addresses in a
    table; those in `updated` (read and written) once more; `untouched` are parts of arguments that stay where they are.
    """
    if 0 in grid:
        return
    tensors = {id(x): x for x in map(_tensor, args) if x is not None}.values()
    if _recorder is not None:
        moved = sum(map(_size, (*tensors, *reached, *updated))) - sum(map(_size, untouched))
        _recorder(Launch(kernel, grid, args, options, flops, moved))
        return
    device = next(iter(tensors)).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **OPTIONS, **options)
    else:
        kernel[grid](*args, **OPTIONS, **options)


class RecordedBox(NamedTuple):
    """A tensor descriptor of a fake tensor, which lies nowhere."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]


def descriptor(x: Tensor, *block: int) -> TensorDescriptor | RecordedBox:
    """x, accessed in boxes of the size `block`."""
    return (RecordedBox if is_recording() else TensorDescriptor)(x, list(x.shape), list(x.stride()), list(block))


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _tensor(arg: Any) -> Tensor | None:
    """The tensor behind an argument: itself, or that of a tensor descriptor."""
    base = getattr(arg, "base", None)
    return arg if isinstance(arg, Tensor) else base if isinstance(base, Tensor) else None


def warm(launch: Launch) -> None:
    """Compile the kernel of a recorded launch for the present GPU, into Triton's cache on disk."""
    launch.kernel.warmup(*map(_mock, launch.args), grid=launch.grid, **OPTIONS, **launch.options)


def _mock(x: Any) -> Any:
    """What Triton specialises as it would the argument. Pointers are multiples of 16 bytes."""
    if isinstance(x, RecordedBox):
        return TensorDescriptor(MockTensor(x.base.dtype), list(x.block_shape), _strides(x.block_shape), list(x.block_shape))
    return MockTensor(x.dtype) if isinstance(x, Tensor) else x


def _strides(shape: Sequence[int]) -> list[int]:
    """Any that a descriptor may have."""
    return [16 * 2**i for i in range(len(shape) - 1, 0, -1)] + [1]


def warm_key(launch: Launch) -> str:
    """The same for launches that Triton serves with the same code."""
    kernel = launch.kernel
    kinds = [_kind(x, p.is_constexpr, p.do_not_specialize) for x, p in zip(launch.args, kernel.params)]
    by_name = {p.name: p for p in kernel.params if not p.is_constexpr}
    options = {
        name: _kind(x, False, by_name[name].do_not_specialize) if name in by_name else x for name, x in sorted(launch.options.items())
    }
    return f"{kernel.__module__}.{kernel.__name__} {kinds} {options}"


def _kind(x: Any, constant: bool, general: bool) -> str:
    """What Triton tells apart: of integers 1, multiples of 16 and width, of those for `general` code width, of floats nothing."""
    if isinstance(x, RecordedBox):
        return f"{x.base.dtype}{x.block_shape}"
    if isinstance(x, Tensor):
        return str(x.dtype)
    if constant or not isinstance(x, int | float) or isinstance(x, bool):
        return repr(x)
    if isinstance(x, float):
        return "float"
    return f"int {x >= 2**31}" + ("" if general else f" {x == 1} {x % 16 == 0}")


@triton.jit
def mp_silu(x):
    """Eq. 81 in fp32."""
    return x * tl.sigmoid(x) * SILU_SCALE


@triton.jit
def mp_silu_grad(x):
    """The derivative of `mp_silu`, infinite x giving NaN as in PyTorch."""
    s = tl.sigmoid(x)
    return s * (1 + x * (1 - s)) * SILU_SCALE
