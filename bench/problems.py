"""The convolutions of a training step as it calls them: what there is to tune.

A step is traced on fake tensors for its calls of `convolve` and `joint_gradients`. Calls that share a row of the table of
tiles are one problem: a tile makes each of them once, with the epilogues, strides and sources that they have in the network.
Weight gradients that share a launch are one call, whose row is the first one's.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.candidates import Tile, candidates
from bench.convs import WAYS
from bench.ledger import launches_of
from kernels import conv_tiles
from kernels.conv_tiles import Row
from kernels.convolve import convolve
from kernels.jit import Launch, recording
from kernels.wgrad import joint_gradients

FUNCTIONS: dict[str, Callable] = {"convolve": convolve, "joint_gradients": joint_gradients}
LEFT_OUT = {"tile", "later", "sums", "training", "split"}  # sums run at once, whole, and kernels compute
KINDS = {16: "conv3x3-up", 9: "conv3x3", 1: "conv1x1"}  # by taps


class Memory(NamedTuple):
    """What stands for a tensor, the same one of a call wherever its number is the same."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int

    def tensor(self, device: torch.device) -> Tensor:
        """Random; a weight, which has three axes, with rows of about unit norm."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride))
        x = torch.randn(size, dtype=self.dtype, device=device)
        x = x / math.sqrt(self.shape[0] * self.shape[2]) if len(self.shape) == 3 else x
        return x.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """Of one of FUNCTIONS: the row that it looks up, and its arguments with Memory in place of tensors."""

    function: str
    arguments: tuple[tuple[str, Any], ...]
    row: Row
    images: int
    flops: int

    def on(self, device: torch.device) -> Callable[[Tile], Any]:
        """The call as a function of the tile."""
        tensor = cache(lambda x: x.tensor(device))
        given = tree_map_only(Memory, tensor, dict(self.arguments), is_leaf=lambda x: isinstance(x, Memory))
        return lambda tile: FUNCTIONS[self.function](**given, tile=tile)


@dataclass(frozen=True)
class Problem:
    """Distinct calls that share a row, and the FLOPs that a step spends on it."""

    row: Row
    calls: tuple[Call, ...]
    flops: int

    @property
    def images(self) -> int:
        return self.calls[0].images

    @property
    def name(self) -> str:
        row, way = self.row, next(way for way, op in WAYS.items() if op == self.row.op)
        return f"tune/{KINDS[row.taps]}/{way}/n{self.images}-{row.height}x{row.width}-{row.depth}-{row.channels}"

    @property
    def candidates(self) -> list[Tile]:
        return candidates(self.row, self.images)

    def on(self, device: torch.device) -> Callable[[Tile], list[Any]]:
        calls = [call.on(device) for call in self.calls]
        return lambda tile: [call(tile) for call in calls]


def problems(preset: str, batch: int, capability: int) -> list[Problem]:
    """Of a training step: 3×3 first, the most arithmetic first."""
    calls: dict[Row, Counter[Call]] = defaultdict(Counter)
    for call, count in calls_of(preset, batch, capability).items():
        calls[call.row][call] = count
    found = [Problem(row, tuple(uses), sum(call.flops for call in uses.elements())) for row, uses in calls.items()]
    return sorted(found, key=lambda problem: (problem.row.taps == 1, -problem.flops))


def small_problems(capability: int) -> list[Problem]:
    """Of the digits, the least of each kind and way: for Triton's interpreter."""
    return list({problem.name.rpartition("/")[0]: problem for problem in problems("digits", 1, capability)}.values())


def calls_of(preset: str, batch: int, capability: int) -> Counter[Call]:
    """Distinct calls in a training step, and how often each is made."""
    calls: Counter[Call] = Counter()

    def recorded(name: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            launches: list[Launch] = []
            with recording(launches.append, capability), patch.object(conv_tiles, "row", wraps=conv_tiles.row) as asked:
                result = function(*args, **kwargs)
            given = signature(function).bind(*args, **kwargs).arguments
            given = {key: _frozen(x) for key, x in given.items() if key not in LEFT_OUT}
            tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
            numbers = {id(x): number for number, x in enumerate(tensors)}
            given = tree_map_only(Tensor, lambda x: Memory(tuple(x.shape), x.stride(), x.dtype, numbers[id(x)]), given)
            row = conv_tiles.row(*asked.call_args.args)
            flops = sum(launch.flops for launch in launches)
            calls[Call(name, tuple(sorted(given.items())), row, tensors[0].shape[0], flops)] += 1
            return result

        return run

    with ExitStack() as stack:
        modules = [module for path, module in sys.modules.items() if path.startswith("kernels.")]
        for (name, function), module in product(FUNCTIONS.items(), modules):
            if getattr(module, name, None) is function:
                stack.enter_context(patch.object(module, name, recorded(name, function)))
        launches_of("this project", preset, batch, "train", capability)
    return calls


def _frozen(x: Any) -> Any:
    return tuple(map(_frozen, x)) if isinstance(x, list) else x
