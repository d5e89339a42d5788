"""CUDA graphs: the kernels of a function recorded once, and started together from then on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.capturing import filling
from kernels.invariance import is_batch_invariant

WARM = 2  # calls of a function with effects before it is captured: the first allocates what later ones find


class Graph(NamedTuple):
    """What a captured function reads, what it returns, what starts it, and what of its memory is not its own."""

    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]
    kept: Sequence[Tensor] = ()

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """The result, which the next call overwrites."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.replay()
        return self.output


class Memory:
    """What graphs have in common that never run at the same time: the memory between their kernels, and a stream."""

    def __init__(self):
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None

    def claim(self) -> None:
        if self.stream is None:
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def run(self, function: Callable[[], Any]) -> Any:
        """Plainly, on the stream."""
        self.claim()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = function()
        current.wait_stream(self.stream)
        return output


class Graphed:
    """Calls a function of tensors, on a GPU by a CUDA graph for each shape and type of its arguments.

    The first call with such arguments captures it. Whatever the function reads besides its arguments must stay where it is,
    and numbers as they are. The result is overwritten by the next call of any with the same `memory`. Off the GPU the function
    is called plainly.
    """

    def __init__(self, function: Callable[..., Tensor], memory: Memory):
        self.function, self.memory = function, memory
        self.graphs: dict[tuple, Graph] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not captures(inputs[0]):
            return self.function(*inputs)
        key = is_batch_invariant(), *((x.shape, x.dtype) for x in inputs)
        if key not in self.graphs:
            with torch.inference_mode(False), torch.no_grad():  # whose tensors would refuse to be written to elsewhere
                self.graphs[key] = capture(self.function, inputs, self.memory)
        return self.graphs[key](inputs)


def captures(x: Tensor) -> bool:
    return x.is_cuda


def capture(function: Callable[..., Tensor], inputs: Sequence[Tensor], memory: Memory) -> Graph:
    """The function's kernels on copies of the inputs, after a call that compiles them."""
    with torch.cuda.device(inputs[0].device):
        memory.run(partial(function, *inputs))
    return record(function, inputs, memory)


def record(function: Callable[..., Any], inputs: Sequence[Tensor], memory: Memory) -> Graph:
    """The function's kernels on copies of the inputs; nothing is computed."""
    own = [x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    where = dict(pool=memory.pool, stream=memory.stream, capture_error_mode="thread_local")
    with torch.cuda.device(own[0].device), filling() as tables, torch.cuda.graph(graph, **where):
        output = function(*own)
    return Graph(own, output, graph.replay, tables)


class Beside:
    """Calls two functions; on a GPU their kernels may run at the same time."""

    def __init__(self):
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """The results of both."""
        if device.type != "cuda":
            return first(), second()
        self.stream = self.stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            b = second()
        a = first()
        current.wait_stream(self.stream)  # before anything reads b, or takes its memory
        return a, b
