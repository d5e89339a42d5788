"""What the kernels of a CUDA graph read from tables, filled when its capture is over.

Addresses of the graph's own tensors are known only within its capture, in which nothing may be sent to the device but by
the graph itself, again at every replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_later: list[tuple[Tensor, list]] | None = None


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def fill_later(table: Tensor, values: list) -> Tensor:
    """A table for the graph that is being captured alone. RuntimeError outside of `filling`."""
    if _later is None:
        raise RuntimeError("a CUDA graph of a training step must be captured by edm2.graphs.capture")
    _later.append((table, values))
    return table


@contextmanager
def filling() -> Iterator[list[Tensor]]:
    """Around a capture: fills at its end what it used, which the graph must keep alive: the list that is yielded."""
    global _later
    _later, tables = [], []
    try:
        yield tables
        for table, values in _later:
            table.copy_(torch.tensor(values, dtype=table.dtype))
            tables.append(table)
    finally:
        _later = None
