"""One launch over the rows of many tensors: which program has which row, and where the tensors lie.

A kernel finds its tensor and row in `programs` and the tensor's address in `addresses`. `pointer` turns the latter into
a pointer that the compiler knows to be aligned, so that it still reads 16 bytes at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import capturing, jit


def row_programs(rows: Sequence[int], device: torch.device) -> Tensor:
    """int32 `[Σ rows, 2]`: (tensor, row) of each program."""
    tensor = np.repeat(np.arange(len(rows)), rows)
    row = np.concatenate([np.arange(n) for n in rows])
    return torch.tensor(np.stack([tensor, row], axis=1), dtype=torch.int32).to(device)


class Addresses:
    """int64 `[tensors, roles]` on the device, sent there again only when a tensor has moved. A CUDA graph gets its own table."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self._table: Tensor | None = None

    def table(self, *roles: Sequence[Tensor | None]) -> Tensor:
        """The addresses of `roles`, lists of contiguous tensors of equal length; 0 for None."""
        device = next(x.device for x in roles[0] if x is not None)
        if jit.is_recording():  # fake tensors lie nowhere
            return torch.empty(len(roles[0]), len(roles), dtype=torch.int64, device=device)
        known = [[0 if x is None else x.data_ptr() for x in tensors] for tensors in zip(*roles)]
        if capturing.is_capturing():
            if self._table is None:
                raise RuntimeError("a kernel with a table of addresses was captured without a call before")
            table, self._table = self._table, None  # allocated outside of the graph, whose memory kernels share in turn
            return capturing.fill_later(table, known)
        if self._table is None or known != self._known:
            self._known = known
            self._table = torch.tensor(known, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        return self._table


@triton.jit
def pointer(addresses, index, dtype: tl.constexpr):
    """The pointer at `addresses[index]`; what PyTorch allocates is a multiple of 16 bytes away from 0."""
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(dtype)), 16)
