"""Which kernels are compiled: those that evaluations and training steps of the presets launch, told on fake tensors."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import edm2
from bench.case import data_size
from bench.ledger import inputs_for
from edm2.weights import StepWeights
from kernels.invariance import batch_invariance
from kernels.jit import Launch
from kernels.tracing import OnGPU

CAPABILITIES = (80, 90, 100)
# Constants that follow from channel counts,
CHANNELS = re.compile("C(_\\d|[A-Z])?|K(_\\d|[A-Z])?|STRIDE.*|REST|C_?IN|C_?OUT|HEADS|SCALE_.*")
FORMS = re.compile("B[IHW]|FLAT")  # and those of the form of a tile's pixels


@dataclass(frozen=True)
class Case:
    """A network, a batch and a compute dtype, whose kernels for the architectures `in_table` the table holds; by `--all` for all.

    A training step and an evaluation, or, of `sampling`, an evaluation whose bits no batch changes. It holds every launch
    for those for which it is `complete`, else one of each shape class.
    """

    preset: str
    batch: int
    dtype: torch.dtype = torch.float16
    in_table: tuple[int, ...] = ()
    complete: tuple[int, ...] = ()
    sampling: bool = False

    @property
    def network(self) -> dict[str, int]:
        """The others' blocks of one level differ in nothing but channel counts: one is enough."""
        return {} if self.preset == "edm2-img512-s" else {"num_blocks": 1}


WIDEST_FIRST = ("xxl", "xl", "l", "m", "xs", "xxs")
CASES = [
    Case("edm2-img512-s", 256, in_table=CAPABILITIES, complete=(90,)),
    Case("edm2-img512-s", 8, in_table=(90,)),
    Case("edm2-img512-s", 1, in_table=(90,), sampling=True),
    Case("edm2-img512-s", 64, in_table=CAPABILITIES, sampling=True),
    *(Case(f"edm2-img512-{size}", 8) for size in WIDEST_FIRST),
    Case("digits", 128),
    Case("digits", 128, torch.bfloat16),
    Case("edm2-img512-s", 8, torch.float32, in_table=(90,)),
]


class Box(NamedTuple):
    """A tensor descriptor, as far as it decides what is compiled."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_short(self.dtype)}[{'x'.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Job:
    """A kernel, and all that decides what it is compiled to."""

    capability: int
    module: str
    name: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def arguments(self) -> str:
        return " ".join(map(_short, self.args))

    @property
    def constants(self) -> str:
        return " ".join(f"{name}={_short(value)}" for name, value in self.options)

    @property
    def shape_class(self) -> tuple[Any, ...]:
        """What jobs share that differ in their channel counts, numbers and forms of pixels only."""
        types = tuple(x.dtype if isinstance(x, Box) else x for x in self.args if not isinstance(x, int))
        options = tuple(x for x in self.options if not CHANNELS.fullmatch(x[0]) and not FORMS.fullmatch(x[0]))
        return self.capability, self.name, types, options

    def __str__(self) -> str:
        return f"sm_{self.capability} {self.name}({self.arguments}) {self.constants}"


def job(launch: Launch, capability: int) -> Job:
    """What Triton compiles for a launch; launches that share the code give equal jobs."""
    kernel = launch.kernel
    args = tuple(x if p.is_constexpr else _kind(x, p.do_not_specialize) for x, p in zip(launch.args, kernel.params))
    by_name = {p.name: p for p in kernel.params if not p.is_constexpr}
    options = {name: _kind(x, by_name[name].do_not_specialize) if name in by_name else x for name, x in launch.options.items()}
    return Job(capability, kernel.__module__, kernel.__name__, args, tuple(options.items()))


def _kind(arg: Any, general: bool) -> Any:
    """A stand-in that Triton specialises on in the same way: of integers, unless `general`, on being 1, a multiple of 16 or wide."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    if hasattr(arg, "block_shape"):
        return Box(arg.base.dtype, tuple(arg.block_shape))
    if isinstance(arg, int) and not isinstance(arg, bool) and (arg != 1 or general):
        return (17 if general else 16 if arg % 16 == 0 else 17) + (2**32 if arg >= 2**31 else 0)
    return 0.5 if isinstance(arg, float) else arg


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def launches(case: Case, capability: int) -> list[Launch]:
    """What a case starts."""
    found: list[Launch] = []
    with FakeTensorMode():
        net = edm2.build(case.preset, *data_size(case.preset), dtype=case.dtype, **case.network)
        inputs, weights = inputs_for(net, case.batch), StepWeights(net)
        optimizer = edm2.EDM2Optimizer(net, weights=weights)
        with OnGPU(found.append, capability):
            if not case.sampling:
                with weights.prepared():
                    edm2.denoising_loss(net.train(), **inputs).sum().backward()
                weights.project()
                optimizer.step(0.01, 2 * case.batch, case.batch)
            with torch.no_grad(), batch_invariance(case.sampling):
                net.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
    return found


def collect(case: Case, capability: int) -> list[Job]:
    """The distinct jobs of a case, in the order of their first launch."""
    return list(dict.fromkeys(job(launch, capability) for launch in launches(case, capability)))


def distinct(cases: list[Case], found: list[list[Job]], everything: bool = False) -> list[Job]:
    """All jobs of complete cases, or of all, and of the others one for each shape class."""
    chosen: dict[Job, None] = {}
    classes = set()
    for case, jobs in zip(cases, found):
        for x in jobs:
            if everything or x.capability in case.complete or x.shape_class not in classes:
                chosen[x] = None
                classes.add(x.shape_class)
    return list(chosen)
