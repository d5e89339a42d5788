"""This project's Triton kernels, each alone at the shapes of a preset: against eager PyTorch, compiled, and memory.

Shapes are those that an evaluation calls the ops with; bytes and FLOPs are those of the launches, as the ledger counts
them. The reference is the op's meaning in `kernels.reference`, in fp32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from bench import baseline
from bench.case import REFERENCE, Candidates, Case
from bench.ledger import fake_network, inputs_for
from bench.models import compile_for, compile_name
from kernels import reference
from kernels.jit import Launch
from kernels.tracing import OnGPU

TOLERANCES = {torch.float16: 5e-3, torch.float32: 1e-4}  # relative 2-norm: some ten roundings, sums in another order


def _pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    x = baseline.normalize(x, dim=[-1])
    return x, baseline.mp_silu(x)


def _down_pixel_norm_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    return _pixel_norm_silu(baseline.resample(x.permute(0, 3, 1, 2), (1, 1), "down").permute(0, 2, 3, 1))


def _cat_silu(a: Tensor, b: Tensor, t: float) -> Tensor:
    a, b = (x.permute(0, 3, 1, 2) for x in (a, b))
    return baseline.mp_silu(baseline.mp_cat(a, b, t)).permute(0, 2, 3, 1)


def _cosine_attention(qkv: Tensor, heads: int) -> Tensor:
    """With q, k and v each contiguous in a row, as this project has them and as is best for SDPA."""
    n, height, width, channels = qkv.shape
    q, k, v = baseline.normalize(qkv.view(n, height * width, heads, 3, -1), dim=[-1]).permute(3, 0, 2, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).reshape(n, height, width, channels // 3)


PLAIN: dict[str, Callable] = {  # op → the same as `bench.baseline` does it, on channels-last memory
    "pixel_norm_silu": _pixel_norm_silu,
    "down_pixel_norm_silu": _down_pixel_norm_silu,
    "cat_silu": _cat_silu,
    "mp_silu": baseline.mp_silu,
    "cosine_attention": _cosine_attention,
    "linear": lambda x, w: x @ w[0].t(),
}


class Call(NamedTuple):
    """A call of an op: shapes of its tensors, what follows them, and the type of all."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float16

    @property
    def label(self) -> str:
        """`n256-64x64-192-384`: images, resolution, channels of each source; for attention tokens and heads."""
        n, *rest = self.shapes[0]
        if self.op == "cosine_attention":
            return f"n{n}-{math.prod(rest[:2])}x{self.constants[0]}"
        if self.op == "linear":
            return f"n{n}-{self.shapes[1][2]}-{self.shapes[1][1]}"
        channels = [shape[-1] for shape in self.shapes] if self.op == "cat_silu" else rest[-1:]
        return "-".join([f"n{n}", f"{rest[0]}x{rest[1]}", *map(str, channels)])

    def run(self, function: Callable, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = function(*tensors, *self.constants)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def op_cases(preset: str, batch: int) -> Iterator[Case]:
    """Forward and backward of each distinct call, those that move most memory first."""
    calls = {(call, backward): traffic(call, backward)[1] for call in calls_of(preset, batch) for backward in (False, True)}
    for call, backward in sorted(calls, key=calls.get, reverse=True):
        yield op_case(call, backward)


def op_case(call: Call, backward: bool, needs_gpu: bool = True) -> Case:
    """An op's forward, or its backward from given gradients."""

    def build(device: torch.device) -> Candidates:
        generator = torch.Generator(device).manual_seed(0)

        def randn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        tensors = [randn(shape, call.dtype).requires_grad_(backward) for shape in call.shapes]
        gradients = [randn(shape, call.dtype) for shape in _output_shapes(call)]
        wide = [x.detach().float().requires_grad_(backward) for x in tensors]
        functions = {"eager": PLAIN[call.op], compile_name(device): compile_for(device, PLAIN[call.op])}
        functions["edm2"] = getattr(kernels, call.op)

        def candidate(function: Callable, tensors: list[Tensor]) -> Callable[[], Any]:
            run = partial(call.run, function, tensors)
            return backward_of(run, tensors, gradients) if backward else run

        exact = candidate(getattr(reference, call.op), wide)
        return {REFERENCE: exact} | {name: candidate(function, tensors) for name, function in functions.items()}

    flops, moved = traffic(call, backward)
    facts, dtype = {"op": call.op, "shapes": call.shapes}, str(call.dtype).removeprefix("torch.")
    name = f"kernels/{call.op}/{'backward' if backward else 'forward'}/{call.label}"
    return Case(name, build, flops, moved, 0, facts, TOLERANCES[call.dtype], needs_gpu, compiles=True, dtype=dtype)


def backward_of(run: Callable[[], Sequence[Tensor]], tensors: list[Tensor], gradients: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """The backward of `run` for tensors, given gradients; the first time also the forward, whose graph is kept."""
    outputs: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        if not outputs:
            with functorch_config.patch(donated_buffer=False):  # compiled code would reuse the graph's memory
                outputs.extend(run())
        return torch.autograd.grad(outputs, tensors, [g.to(y.dtype) for g, y in zip(gradients, outputs)], retain_graph=True)

    return backward


class _Calls(OnGPU):
    """Collects the calls of this project's ops on activations."""

    def __init__(self) -> None:
        super().__init__(lambda launch: None)
        self.found: dict[Call, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "edm2" and (call := _call(func.overloadpacket.__name__, *args)):
            self.found[call] = None
        return super().__torch_dispatch__(func, types, args, kwargs)


def _call(op: str, x: Tensor, *rest: Any) -> Call | None:
    shape = tuple(x.shape)
    if op == "linear":
        return Call(op, (shape, tuple(rest[0].shape)), (), x.dtype)
    if x.ndim != 4:
        return None
    if op == "residual_branch_norm":  # of a block, what is apart from its convolutions
        return Call("down_" * rest[7] + "pixel_norm_silu", (shape,), (), x.dtype)
    if op == "residual_branch_cat":
        return Call("cat_silu", (shape, tuple(rest[0].shape)), rest[10:11], x.dtype)  # in training with dropout
    if op in ("residual_branch_silu", "residual_branch_up"):
        return Call("mp_silu", (shape,), (), x.dtype)
    if op == "attention_branch":
        return Call("cosine_attention", ((*shape[:3], rest[0].shape[1]),), rest[4:5], x.dtype)
    return None


@lru_cache
def calls_of(preset: str, batch: int) -> tuple[Call, ...]:
    """The distinct calls of one evaluation."""
    with fake_network(preset) as net, torch.no_grad(), _Calls() as calls:
        inputs = inputs_for(net, batch)
        net.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
    return tuple(calls.found)


@lru_cache
def traffic(call: Call, backward: bool) -> tuple[int, int]:
    """FLOPs and bytes of the launches; a backward's FLOPs without those that repeat the forward's."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=call.dtype).requires_grad_(backward) for shape in call.shapes]
        launches: list[Launch] = []
        with OnGPU(launches.append):
            outputs = call.run(getattr(kernels, call.op), tensors)
            flops = sum(launch.flops for launch in launches)
            if backward:
                launches.clear()
                torch.autograd.grad(outputs, tensors, [torch.empty_like(y) for y in outputs])
    return flops * (2 if backward else 1), sum(launch.bytes for launch in launches)


@lru_cache
def _output_shapes(call: Call) -> tuple[tuple[int, ...], ...]:
    with torch.device("meta"):
        return tuple(tuple(y.shape) for y in call.run(getattr(reference, call.op), [torch.empty(shape) for shape in call.shapes]))
