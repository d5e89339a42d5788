"""Which kernels are compiled: those that evaluations and training steps of the presets launch, told on fake tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import edm2
from bench.case import data_size
from bench.ledger import inputs_for
from edm2.presets import PRESETS
from kernels.jit import Launch
from kernels.tracing import OnGPU

CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True)
class Case:
    """A network, a batch and a compute dtype whose launches are compiled. `small`: one block per level."""

    preset: str
    batch: int
    dtype: torch.dtype = torch.float16
    small: bool = True


CASES = [
    Case("edm2-img512-s", 256, small=False),
    Case("edm2-img512-s", 8, small=False),
    Case("edm2-img512-s", 8, torch.bfloat16),
    Case("edm2-img512-s", 8, torch.float32),
    Case("digits", 128),
    *(Case(name, 8) for name in PRESETS if name.startswith("edm2-img512") and not name.endswith("-s")),
]


class Box(NamedTuple):
    """A tensor descriptor, as far as it decides what is compiled."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_short(self.dtype)}[{'x'.join(map(str, self.shape))}]"


@dataclass(frozen=True, order=True)
class Job:
    """A kernel, and all that decides what it is compiled to."""

    capability: int
    module: str
    name: str
    args: tuple[Any, ...] = field(compare=False)
    options: tuple[tuple[str, Any], ...] = field(compare=False)
    arguments: str
    constants: str

    def __str__(self) -> str:
        return f"sm_{self.capability} {self.name}({self.arguments}) {self.constants}"


def job(launch: Launch, capability: int) -> Job:
    """What Triton compiles for a launch; launches that share the code give equal jobs."""
    kernel = launch.kernel
    args = tuple(x if p.is_constexpr else _kind(x) for x, p in zip(launch.args, kernel.params))
    arguments = " ".join(map(_short, args))
    constants = " ".join(f"{name}={value}" for name, value in launch.options.items())
    return Job(capability, kernel.__module__, kernel.__name__, args, tuple(launch.options.items()), arguments, constants)


def _kind(arg: Any) -> Any:
    """A stand-in that Triton specialises on in the same way: of integers, on being 1, a multiple of 16 or wide."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    if hasattr(arg, "block_shape"):
        return Box(arg.base.dtype, tuple(arg.block_shape))
    if isinstance(arg, int) and arg != 1 and not isinstance(arg, bool):
        return (16 if arg % 16 == 0 else 17) + (2**32 if arg >= 2**31 else 0)
    return 0.5 if isinstance(arg, float) else arg


def _short(arg: Any) -> str:
    return str(arg).removeprefix("torch.").replace("float", "fp")


def launches(case: Case, capability: int) -> Iterator[Launch]:
    """What a training step and an evaluation start."""
    found: list[Launch] = []
    with FakeTensorMode():
        size = {"num_blocks": 1} if case.small else {}
        net = edm2.build(case.preset, *data_size(case.preset), dtype=case.dtype, **size)
        inputs = inputs_for(net, case.batch)
        optimizer = edm2.EDM2Optimizer(net)
        with OnGPU(found.append, capability):
            edm2.denoising_loss(net.train(), **inputs).sum().backward()
            optimizer.step(0.01, 2 * case.batch, case.batch)
            with torch.no_grad():
                net.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
    return found


def collect(case: Case, capability: int) -> set[Job]:
    """The distinct kernels of a case."""
    return {job(launch, capability) for launch in launches(case, capability)}
