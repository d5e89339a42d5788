"""CUDA graphs: the kernels of a function recorded once, and started together from then on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.invariance import is_batch_invariant


class Graph(NamedTuple):
    """What a captured function reads, where it writes, and what starts it."""

    inputs: list[Tensor]
    output: Tensor
    replay: Callable[[], None]


class Graphed:
    """Calls a function of tensors, on a GPU by a CUDA graph for each shape and type of its arguments.

    The first call with such arguments captures it. Whatever the function reads besides its arguments must stay where it is,
    and numbers as they are. The result is overwritten by the next call. Off the GPU the function is called plainly.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function
        self.graphs: dict[tuple, Graph] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not captures(inputs[0]):
            return self.function(*inputs)
        key = is_batch_invariant(), *((x.shape, x.dtype) for x in inputs)
        if key not in self.graphs:
            self.graphs[key] = capture(self.function, inputs)
        graph = self.graphs[key]
        for own, given in zip(graph.inputs, inputs):
            own.copy_(given)
        graph.replay()
        return graph.output


def captures(x: Tensor) -> bool:
    return x.is_cuda


def capture(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Graph:
    """The function's kernels on copies of the inputs, after a call that compiles them."""
    own = [x.clone() for x in inputs]
    with torch.cuda.device(own[0].device):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function(*own)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = function(*own)
    return Graph(own, output, graph.replay)


def side_by_side(first: Callable[[], Tensor], second: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """The results of both, whose kernels a GPU may run at the same time."""
    if device.type != "cuda":
        return first(), second()
    current, beside = torch.cuda.current_stream(device), _side_stream(device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        b = second()
    a = first()
    current.wait_stream(beside)  # before anything reads b, or takes its memory
    return a, b


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]
