"""What stands in for the capture of a CUDA graph where there is no GPU: a record of all operations and kernels.

Like a graph it repeats them on the same memory, whatever Python would now do, and what it was given as numbers stays. Unlike
a capture, recording computes: the first replay does nothing. Kernels are Triton's interpreter's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from edm2.graphs import Graph, Memory
from kernels import capturing
from kernels.registration import OPS

LAUNCH = GridExecutor.__call__
WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "lift_fresh")  # for the device, or sends it numbers


class Recorder(TorchDispatchMode):
    """Within it, operations of PyTorch and, by `launch`, those of kernels are remembered, in `calls`."""

    def __init__(self):
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def launch(self, grid: GridExecutor, *args: Any, **options: Any) -> None:
        self.calls.append(partial(LAUNCH, grid, *args, **options))
        with _disable_current_modes():
            self.calls[-1]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, call = func.overloadpacket.__name__, partial(func, *args, **(kwargs or {}))
        if func.namespace == "edm2":
            with self:
                return OPS[name].triton(*args, **(kwargs or {}))
        assert name not in WAITS, f"{name} within a capture"
        output = call()
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        fresh = all(x.untyped_storage().data_ptr() not in given for x in _tensors(output))
        self.calls.append(partial(_again, call, _tensors(output) if fresh else []))
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _again(call: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
    """Into the same memory; without `outputs` these are views of arguments, or some of them themselves."""
    for output, result in zip(outputs, _tensors(call())):
        output.copy_(result)


def _fill_now(fill_later: Callable[..., Tensor], table: Tensor, values: list) -> Tensor:
    """As recording computes; a capture does not, and tables are filled when it is over."""
    with _disable_current_modes():
        table.copy_(torch.tensor(values))
    return fill_later(table, values)


def record(function: Callable[..., Any], inputs: Sequence[Tensor], memory: Memory) -> Graph:
    """In place of `edm2.graphs.record`."""
    own = [x.clone() for x in inputs]
    is_capturing, capturing.is_capturing = capturing.is_capturing, lambda: True
    fill_later, capturing.fill_later = capturing.fill_later, partial(_fill_now, capturing.fill_later)
    try:
        with capturing.filling() as tables, Recorder() as recorder:
            GridExecutor.__call__ = lambda *args, **options: recorder.launch(*args, **options)
            output = function(*own)
    finally:
        capturing.is_capturing, capturing.fill_later, GridExecutor.__call__ = is_capturing, fill_later, LAUNCH
    left = iter([recorder.calls[:0]])

    @torch.no_grad()
    def replay() -> None:
        for call in next(left, recorder.calls):
            call()

    return Graph(own, output, replay, tables)
