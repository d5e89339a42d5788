"""Convolutions alone, without what follows them: this project's kernels, cuDNN in channels-last, a GEMM of the same size."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import edm2
import kernels
from bench.case import Candidates, Case, data_size
from bench.library import gemm_case
from edm2.layers import MPConv
from kernels import conv_tiles, library
from kernels.convolve import convolve
from kernels.jit import serves

WAYS = {"forward": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}  # as `kernels.conv_tiles.LIBRARY` names them
LIBRARY = "edm2 by library"  # this project, were the library named in the table of tiles


@lru_cache
def conv_shapes(preset: str) -> dict[tuple[int, int, int, int], int]:
    """(resolution, in, out, kernel) of every convolution of a preset → how often it occurs."""
    resolution, *rest = data_size(preset)
    with torch.device("meta"):
        net = edm2.build(preset, resolution, *rest)
    shapes: dict[tuple[int, int, int, int], int] = {}
    for name, module in net.named_modules():
        if isinstance(module, MPConv) and module.weight.ndim == 4:
            at = int(name.split(".")[2].split("x")[0]) if ".enc." in name or ".dec." in name else resolution
            key = (at, module.weight.shape[1], module.weight.shape[0], module.weight.shape[2])
            shapes[key] = shapes.get(key, 0) + 1
    return shapes


def conv_cases(preset: str, n: int, k: int) -> Iterator[Case]:
    """Every k×k convolution of a preset but those of the images' few channels, the most arithmetic first, and its GEMM."""
    shapes = {key: count for key, count in conv_shapes(preset).items() if key[3] == k and min(key[1:3]) >= 8}
    for (res, cin, cout, _), count in sorted(shapes.items(), key=lambda item: _work(*item), reverse=True):
        yield from (conv_case(way, n, res, cin, cout, k, count) for way in WAYS)
        yield gemm_case(n * res**2, cout, cin * k**2, f"as-conv{k}x{k}/{_label(n, res, cin, cout)}")


def _work(shape: tuple[int, int, int, int], count: int) -> int:
    res, cin, cout, k = shape
    return count * res**2 * cin * cout * k**2


def _label(n: int, res: int, *channels: int) -> str:
    return "-".join([f"n{n}", f"{res}x{res}", *map(str, channels)])


def conv_name(way: str, n: int, res: int, cin: int, cout: int, k: int) -> str:
    return f"kernels/conv{k}x{k}/{way}/{_label(n, res, cin, cout)}"


def conv_case(way: str, n: int, res: int, cin: int, cout: int, k: int, count: int, needs_gpu: bool = True) -> Case:
    """One of `WAYS`; also by the library in this project's place, where its table may name the library."""

    def build(device: torch.device) -> Candidates:
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float16, device=device)

        x, g, w = randn(n, res, res, cin), randn(n, res, res, cout), randn(k * k, cout, cin) / (cin * k * k) ** 0.5
        plain_x, plain_g, plain_w = plain_form(x), plain_form(g), plain_weight(w)
        plain = {
            "forward": lambda: own_form(F.conv2d(plain_x, plain_w, padding=k // 2)),
            "dgrad": lambda: own_form(plain_input_gradient(plain_g, plain_w)),
            "wgrad": lambda: own_weight(plain_backward(plain_g, plain_x, plain_w, [False, True, False])[1]),
        }
        own = {
            "forward": lambda: kernels.conv(x, w),
            "dgrad": lambda: input_gradient(g, w),
            "wgrad": lambda: torch.ops.edm2.conv_backward(g, x, w, False)[1],
        }
        tabled = way != "forward" and serves(x)
        candidates = {"cuDNN": plain[way], "edm2": own[way]}
        return candidates | {LIBRARY: by_library(own[way])} if tabled else candidates

    flops = 2.0 * n * res**2 * cin * cout * k**2
    traffic = 2.0 * (n * res**2 * (cin + cout) + cin * cout * k**2)
    facts = dict(n=n, res=res, cin=cin, cout=cout, k=k, count=count)
    facts |= {} if way == "forward" else {"row": row(way, k, res, cin, cout)}
    name = conv_name(way, n, res, cin, cout, k)
    return Case(name, build, flops, traffic, n, facts, needs_gpu=needs_gpu, dtype="float16")


def row(way: str, k: int, res: int, cin: int, cout: int) -> list[Any]:
    """What `kernels.conv_tiles.LIBRARY` calls this convolution, but for the kind of matrix product."""
    depth, channels = (cout, cin) if way == "dgrad" else (cin, cout)
    return [WAYS[way], k * k, res, res, depth, channels, 0]


def input_gradient(g: Tensor, w: Tensor) -> Tensor:
    """g `[N, H, W, Cout]`, w `[taps, Cout, Cin]` → `[N, H, W, Cin]`. No op of its own: a backward has weights' gradients too."""
    return convolve(g, w, transposed=True, training=True)[0] if serves(g) else library.convolution(g, w, transposed=True)


class _Everything:
    """A table that names the library for all convolutions."""

    def __contains__(self, row: tuple) -> bool:
        return True


def by_library(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same where the table names the library."""
    return patch.object(conv_tiles, "LIBRARY", _Everything())(run)


def plain_form(x: Tensor) -> Tensor:
    """`[N, H, W, C]` as PyTorch wants it, `[N, C, H, W]` in channels-last."""
    return x.permute(0, 3, 1, 2)


def own_form(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def plain_weight(w: Tensor) -> Tensor:
    """`[taps, Cout, Cin]` → `[Cout, Cin, k, k]` in channels-last."""
    k = 3 if len(w) == 9 else 1
    return w.permute(1, 2, 0).unflatten(2, (k, k)).contiguous(memory_format=torch.channels_last)


def own_weight(w: Tensor) -> Tensor:
    """A view."""
    return w.flatten(2).permute(2, 0, 1)


def plain_input_gradient(g: Tensor, w: Tensor) -> Tensor:
    like = g.new_empty(g.shape[0], w.shape[1], *g.shape[2:]).contiguous(memory_format=torch.channels_last)
    return plain_backward(g, like, w, [True, False, False])[0]


def plain_backward(g: Tensor, x: Tensor, w: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    pad = [w.shape[2] // 2] * 2
    return torch.ops.aten.convolution_backward(g, x, w, None, [1, 1], pad, [1, 1], False, [0, 0], 1, wanted)
