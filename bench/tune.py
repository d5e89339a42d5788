"""Which tiles are quickest here for the convolutions of a training step: the rows to add to `kernels.conv_tiles.TUNED`.

A step is traced on fake tensors for its calls of `convolve` and `weight_gradient`. Calls that share a row of the table are
one problem: a candidate makes each of them once, with the epilogues and sources that they have in the network.
"""

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from bench.candidates import Tile, candidates, table_row, text
from bench.case import Candidates, Case
from bench.convs import WAYS
from bench.isolated import SPAWN, Isolated
from bench.ledger import launches_of
from bench.runner import run_cases
from kernels import conv_tiles, conv_triton
from kernels.conv_tiles import Row
from kernels.convolve import convolve
from kernels.jit import Launch, warm, warm_key
from kernels.tracing import OnGPU
from kernels.wgrad import weight_gradient

Result = dict[str, Any]
TOLERANCE = 1e-3  # relative 2-norm against the present tile: sums in another order, rounded to fp16
WORKERS = 16  # processes that compile, at most
COMPILING = 180  # seconds at most for a problem's candidates; what is left compiles when it first runs
SILENCE = 120  # seconds at most for a candidate's first run, or all that is timed
POSITIONAL = {"convolve": ("x", "w", "epilogue"), "weight_gradient": ("g", "x", "taps", "scale")}
LEFT_OUT = {"later", "sums", "training"}  # sums run at once, and kernels compute


class Memory(NamedTuple):
    """What stands for a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> Tensor:
        """Random; a weight, which has three axes, with rows of about unit norm."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride))
        x = torch.randn(size, dtype=self.dtype, device=device)
        x = x / math.sqrt(self.shape[0] * self.shape[2]) if len(self.shape) == 3 else x
        return x.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """Of `convolve` or `weight_gradient`, with Memory in place of tensors."""

    function: str
    arguments: tuple[tuple[str, Any], ...]

    def row(self, capability: int) -> Row:
        given = dict(self.arguments)
        _, height, width, depth = given["x"].shape
        if self.function == "weight_gradient":
            op, taps, channels = "weight gradient", given["taps"], given["g"].shape[3]
            if taps == 16:  # the other way round
                depth, channels = channels, depth
        elif given.get("transposed"):
            op, (taps, _, channels) = "input gradient", given["w"].shape
            if taps == 16:
                height, width = height // 2, width // 2
        else:
            op, (taps, channels, _) = "forward", given["w"].shape
        return conv_tiles.row(capability, op, taps, height, width, depth, channels)

    @property
    def images(self) -> int:
        return dict(self.arguments)["x"].shape[0]

    @property
    def flops(self) -> int:
        given, row = dict(self.arguments), self.row(90)
        weights = row.taps * row.depth * row.channels + sum(math.prod(source.w.shape) for source in given.get("sources", ()))
        return 2 * self.images * row.height * row.width * weights

    def on(self, device: torch.device) -> Callable[[Tile], Any]:
        """The call as a function of the tile."""
        given = tree_map_only(Memory, lambda x: x.tensor(device), dict(self.arguments), is_leaf=lambda x: isinstance(x, Memory))
        return lambda tile: FUNCTIONS[self.function](**given, tile=tile)


FUNCTIONS: dict[str, Callable] = {"convolve": convolve, "weight_gradient": weight_gradient}


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
        row, kind = self.row, {16: "conv3x3-up", 9: "conv3x3", 1: "conv1x1"}[self.row.taps]
        way = next(way for way, op in WAYS.items() if op == row.op)
        return f"tune/{kind}/{way}/n{self.images}-{row.height}x{row.width}-{row.depth}-{row.channels}"

    @property
    def candidates(self) -> list[Tile]:
        return candidates(self.row, self.images)

    def on(self, device: torch.device) -> Callable[[Tile], list[Any]]:
        calls = [call.on(device) for call in self.calls]
        return lambda tile: [call(tile) for call in calls]


def problems(preset: str, batch: int, capability: int) -> list[Problem]:
    """Of a training step: 3×3 first, the most arithmetic first."""
    rows: dict[Row, list[tuple[Call, int]]] = defaultdict(list)
    for call, count in calls_of(preset, batch, capability).items():
        rows[call.row(capability)].append((call, count))
    found = [
        Problem(row, tuple(call for call, _ in uses), sum(count * call.flops for call, count in uses))
        for row, uses in rows.items()
    ]  # fmt: skip
    return sorted(found, key=lambda problem: (problem.row.taps == 1, -problem.flops))


def calls_of(preset: str, batch: int, capability: int) -> Counter[Call]:
    """Distinct calls in a training step, and how often each is made."""
    calls: Counter[Call] = Counter()

    def recorded(name: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(POSITIONAL[name], args)) | {key: x for key, x in kwargs.items() if key not in LEFT_OUT}
            given = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
            given = tree_map_only(Tensor, lambda x: Memory(tuple(x.shape), x.stride(), x.dtype), given)
            calls[Call(name, tuple(sorted(given.items())))] += 1
            return FUNCTIONS[name](*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in FUNCTIONS:
            stack.enter_context(patch.object(conv_triton, name, recorded(name)))
        launches_of("this project", preset, batch, "train", capability)
    return calls


def tune_cases(found: Sequence[Problem], needs_gpu: bool = True) -> Iterator[Case]:
    """A case for each problem. Its candidates are named by their tiles, the present one first."""
    for problem in found:
        flops = float(sum(call.flops for call in problem.calls))
        facts = {"row": list(problem.row), "n": problem.images, "flops of a step": problem.flops}
        yield Case(
            problem.name, partial(_build, problem), flops, facts=facts, tolerance=TOLERANCE, needs_gpu=needs_gpu,
            in_turn=True, launches=len(problem.calls), dtype="float16",
        )  # fmt: skip


def _build(problem: Problem, device: torch.device) -> Candidates:
    run = problem.on(device)
    return {text(tile): partial(run, tile) for tile in problem.candidates}


def run(found: Sequence[Problem], outdir: Path, budget: float, capability: int, runs: int = 20, needs_gpu: bool = True) -> None:
    """Tune on the GPU at hand for `budget` seconds: a line and a JSON file for each problem, then the rows."""
    deadline, by_name = time.monotonic() + budget, {problem.name: problem for problem in found}
    with Compilers(capability) as compilers, Isolated(partial(tune_cases, found, needs_gpu), SILENCE, deadline) as isolated:

        def compiled_first(case: Case, *args: Any) -> Result:
            compilers(by_name[case.name], min(deadline, time.monotonic() + COMPILING))
            return isolated(case, *args)

        measure(found, tune_cases(found, needs_gpu), outdir, budget, runs, compiled_first)


def measure(
    found: Sequence[Problem],
    cases: Iterable[Case],
    outdir: Path,
    budget: float,
    runs: int,
    run: Callable[..., Result] | None = None,
) -> None:
    """Run the cases of these problems. However it ends, the rows are printed of those that are done."""
    results: list[Result] = []

    def tell(result: Result) -> str:
        results.append(result)
        return line(result)

    try:
        run_cases(cases, outdir, budget, runs, run, tell)
    finally:
        click.echo("\n" + rows(found, results))


class Compilers:
    """Processes that compile candidates ahead. A context manager."""

    def __init__(self, capability: int, compile: Callable[[Problem, Tile, int], None] | None = None):
        self.capability, self.compile = capability, compile or compile_candidate
        self.pool: Pool | None = None

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.pool is not None:
            self.pool.terminate()
            self.pool = None

    def __call__(self, problem: Problem, deadline: float) -> bool:
        """Compile a problem's candidates; returns whether all were at an end by `deadline`. None goes on after it."""
        self.pool = self.pool or SPAWN.Pool(min(WORKERS, len(os.sched_getaffinity(0))), os.setsid)
        jobs = [self.pool.apply_async(self.compile, (problem, tile, self.capability)) for tile in problem.candidates]
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
        ended = all(job.ready() for job in jobs)
        if not ended:  # a process that dies leaves its job without an end
            self.__exit__()
        return ended


def compile_candidate(problem: Problem, tile: Tile, capability: int) -> None:
    """Into Triton's cache on disk. What fails will fail again when it is measured, and be told then."""
    launches: list[Launch] = []
    with FakeTensorMode(), OnGPU(launches.append, capability):
        problem.on(torch.device("cpu"))(tile)
    for launch in {warm_key(launch): launch for launch in launches}.values():
        warm(launch)


def line(result: Result) -> str:
    """The present tile and the quickest, and what went wrong."""
    facts, best = result["candidates"], quickest(result)
    timed = {name: f"{name} {x['median'] * 1e3:.3f} ms" for name, x in facts.items() if "median" in x}
    failures = [f"{name}: {x['failure']}" for name, x in facts.items() if "failure" in x]
    present = next(iter(facts))
    parts = [f"present {timed.get(present, f'{present} failed')}", f"{len(timed)} of {len(facts)} candidates timed"]
    if best is not None:
        parts.insert(1, f"quickest {timed[best]}, {gain(result, best)}" if best != present else "none quicker")
    return f"{result['case']}  " + " | ".join(parts + failures)


def quickest(result: Result) -> str | None:
    """Of the candidates that are right, if the present one is among them."""
    medians = {name: facts["median"] for name, facts in result["candidates"].items() if "median" in facts}
    return min(medians, key=medians.get) if next(iter(result["candidates"])) in medians else None


def gain(result: Result, best: str) -> str:
    facts = result["candidates"]
    share = f"{1 - facts[best]['median'] / next(iter(facts.values()))['median']:.1%} less"
    return share if beyond_noise(result, best) else f"{share}, within the noise"


def beyond_noise(result: Result, best: str) -> bool:
    """Do its 20 to 80 percentiles lie below those of the present tile?"""
    facts = result["candidates"]
    return facts[best]["high"] < next(iter(facts.values()))["low"]


def rows(found: Sequence[Problem], results: Sequence[Result]) -> str:
    """What to add to the table, as Python: gains beyond the noise."""
    by_name, lines = {problem.name: problem for problem in found}, []
    for result in results:
        best, facts = quickest(result), result["candidates"]
        if best is not None and beyond_noise(result, best):
            problem = by_name[result["case"]]
            tile = next(tile for tile in problem.candidates if text(tile) == best)
            before, after = (facts[name]["median"] * 1e3 for name in (next(iter(facts)), best))
            device = f"{result['machine']['name']}, {problem.images} images"
            lines.append(f"    # {device}: {before:.3f} → {after:.3f} ms, {gain(result, best)}")
            lines.append(f"    {table_row(problem.row, tile, problem.images)}")
    if not lines:
        return "No tile is quicker than the present one beyond the noise: 20 to 80 percentiles that lie apart."
    return "\n".join(["Rows for kernels.conv_tiles.TUNED, of tiles whose 20 to 80 percentiles lie below the present one's:", *lines])
