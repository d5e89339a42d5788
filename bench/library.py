"""What cuBLAS, cuDNN and SDPA reach at this network's shapes: the numbers that decide the design of the kernels."""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

import edm2
from bench.case import Candidates, Case, data_size
from edm2.network import MPConv


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


def library_cases(preset: str = "edm2-img512-s", batches: tuple[int, ...] = (256, 8)) -> Iterator[Case]:
    """What the libraries reach at this network's shapes: the numbers that decide the design of the kernels."""
    yield copy_case()
    yield gemm_case(8192, 8192, 8192, "square")
    for batch in batches:
        for (res, cin, cout, k), count in sorted(conv_shapes(preset).items(), reverse=True):
            if min(cin, cout) >= 8:
                yield from conv_cases(batch, res, cin, cout, k, count)
        for tokens, heads in ((256, 9), (64, 12)):
            yield attention_case(batch, tokens, heads)


def copy_case(elements: int = 2**29, needs_gpu: bool = True) -> Case:
    def build(device: torch.device) -> Candidates:
        x = torch.randn(elements, dtype=torch.float16, device=device)
        y = torch.empty_like(x)
        return {"copy": lambda: y.copy_(x)}

    return Case("kernels/copy", build, bytes=4 * elements, tolerance=0.0, needs_gpu=needs_gpu, dtype="float16")


def gemm_case(m: int, n: int, k: int, label: str, needs_gpu: bool = True) -> Case:
    def build(device: torch.device) -> Candidates:
        a, b = (torch.randn(*shape, dtype=torch.float16, device=device) for shape in ((m, k), (n, k)))
        return {"cuBLAS": lambda: a @ b.T}

    facts = {"m": m, "n": n, "k": k}
    traffic = 2.0 * (m * k + n * k + m * n)
    return Case(f"kernels/gemm/{label}", build, 2.0 * m * n * k, traffic, facts=facts, needs_gpu=needs_gpu, dtype="float16")


def conv_cases(n: int, res: int, cin: int, cout: int, k: int, count: int) -> Iterator[Case]:
    """Forward, input gradient and weight gradient by cuDNN in channels-last, and cuBLAS at the same size."""
    flops, facts = 2.0 * n * res**2 * cin * cout * k**2, dict(n=n, res=res, cin=cin, cout=cout, k=k, count=count)
    traffic = 2.0 * (n * res**2 * (cin + cout) + cin * cout * k**2)

    def build(device: torch.device, which: str) -> Candidates:
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)

        x, g, w = randn(n, cin, res, res), randn(n, cout, res, res), randn(cout, cin, k, k) / (cin * k * k) ** 0.5
        pad, masks = [k // 2] * 2, {"dgrad": [True, False, False], "wgrad": [False, True, False]}
        if which == "forward":
            return {"cuDNN": lambda: F.conv2d(x, w, padding=k // 2)}
        backward = torch.ops.aten.convolution_backward
        return {"cuDNN": lambda: backward(g, x, w, None, [1, 1], pad, [1, 1], False, [0, 0], 1, masks[which])}

    for which in ("forward", "dgrad", "wgrad"):
        name = f"kernels/conv{k}x{k}/{which}/n{n}-{res}x{res}-{cin}-{cout}"
        yield Case(name, lambda device, which=which: build(device, which), flops, traffic, n, facts, dtype="float16")
    yield gemm_case(n * res**2, cout, cin * k**2, f"as-conv{k}x{k}/n{n}-{res}x{res}-{cin}-{cout}")


def attention_case(n: int, tokens: int, heads: int, width: int = 64) -> Case:
    def build(device: torch.device) -> Candidates:
        q, k, v = torch.randn(3, n, heads, tokens, width, dtype=torch.float16, device=device)
        return {"SDPA": lambda: F.scaled_dot_product_attention(q, k, v)}

    facts = dict(n=n, tokens=tokens, heads=heads, width=width)
    traffic = 8.0 * n * heads * tokens * width
    return Case(f"kernels/attention/n{n}-{tokens}x{heads}", build, 4.0 * n * heads * tokens**2 * width, traffic, n, facts, dtype="float16")
