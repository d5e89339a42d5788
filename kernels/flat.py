"""Many tensors in one."""

from collections.abc import Iterator, Sequence

from torch import Tensor

ALIGNMENT = 8  # numbers: 32 bytes of fp32


def flat_views(tensors: Sequence[Tensor]) -> tuple[Tensor, Iterator[Tensor]]:
    """Zeros for all of `tensors`, one after the other `[Σ numel, rounded up]`, and views of it in their shapes, each aligned."""
    sizes = [-(-x.numel() // ALIGNMENT) * ALIGNMENT for x in tensors]
    flat = tensors[0].new_zeros(sum(sizes), requires_grad=False)
    return flat, iter([part[: x.numel()].view(x.shape) for part, x in zip(flat.split(sizes), tensors)])
