"""Which tiles are quickest here for the convolutions of a training step: the rows to add to `kernels.conv_tiles.TUNED`."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.candidates import Tile, table_row, text
from bench.case import Candidates, Case
from bench.isolated import SPAWN, Isolated
from bench.problems import Problem
from bench.runner import reason, run_cases, this_device
from kernels.jit import Launch, warm, warm_key
from kernels.tracing import OnGPU

Result = dict[str, Any]
TOLERANCE = 1e-3  # relative 2-norm against the present tile: sums in another order, rounded to fp16
WORKERS = 16  # processes that compile, at most
COMPILING = 180  # seconds at most for a problem's candidates; what is left compiles when it first runs
SILENCE = 120  # seconds at most for a candidate's first run, or all that is timed


def run(found: Sequence[Problem], outdir: Path, budget: float, capability: int, runs: int = 20) -> None:
    """Tune for `budget` seconds: a line and a JSON file for each problem, then the rows.

    Where there is no GPU the kernels run in Triton's interpreter, in the process that measures.
    """
    has_gpu = this_device().type == "cuda"
    deadline, by_name = time.monotonic() + budget, {problem.name: problem for problem in found}
    environment = patch.dict(os.environ, {} if has_gpu else {"TRITON_INTERPRET": "1"})
    isolated = Isolated(partial(tune_cases, found), SILENCE, deadline)
    with environment, Compilers(capability) as compilers, isolated:

        def compiled_first(case: Case, *args: Any) -> Result:
            if has_gpu:
                compilers(by_name[case.name], min(deadline, time.monotonic() + COMPILING))
            return isolated(case, *args)

        measure(found, outdir, budget, runs, compiled_first)


def measure(found: Sequence[Problem], outdir: Path, budget: float, runs: int, run: Callable[..., Result] | None = None) -> None:
    """Run the problems' cases. However it ends, the rows are printed of those that are done."""
    results: list[Result] = []
    deadline = time.monotonic() + budget

    def tell(result: Result) -> str:
        results.append(result)
        return line(result)

    click.echo(f"Rows of the table to tune: {len(found)}. A line for each that is done:", err=True)
    try:
        run_cases(takewhile(lambda _: time.monotonic() < deadline, tune_cases(found)), outdir, budget, runs, run, tell)
    finally:
        click.echo(f"\n{rows(found, results)}")
        if len(results) < len(found):
            done = sum(result["flops of a step"] for result in results) / sum(problem.flops for problem in found)
            click.echo(f"{len(found) - len(results)} of {len(found)} rows left out, {1 - done:.0%} of their arithmetic", err=True)


def tune_cases(found: Iterable[Problem]) -> Iterator[Case]:
    """A case for each problem. Its candidates are named by their tiles, the present one first."""
    for problem in found:
        flops = float(sum(call.flops for call in problem.calls))
        facts = {"row": list(problem.row), "n": problem.images, "flops of a step": problem.flops}
        yield Case(
            problem.name, partial(_build, problem), flops, facts=facts, tolerance=TOLERANCE, needs_gpu=False,
            in_turn=True, launches=len(problem.calls), dtype="float16",
        )  # fmt: skip


def _build(problem: Problem, device: torch.device) -> Candidates:
    run = problem.on(device)
    return {text(tile): partial(run, tile) for tile in problem.candidates}


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
        failures: list[BaseException] = []
        jobs = [
            self.pool.apply_async(self.compile, (problem, tile, self.capability), error_callback=failures.append)
            for tile in problem.candidates
        ]  # fmt: skip
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
        ended = all(job.ready() for job in jobs)
        if not ended:  # a process that dies leaves its job without an end
            self.__exit__()
        if len(failures) == len(jobs):  # else it fails again when it is measured, and is told then
            click.echo(f"{problem.name}: nothing compiled ahead: {reason(failures[0])}", err=True)
        return ended


def compile_candidate(problem: Problem, tile: Tile, capability: int) -> None:
    """Into Triton's cache on disk."""
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
        timed = sum(quickest(result) is not None for result in results)
        return f"No tile is quicker than the present one beyond the noise (20 to 80 percentiles that lie apart). Rows timed: {timed}"
    return "\n".join(["Rows for kernels.conv_tiles.TUNED, of tiles whose 20 to 80 percentiles lie below the present one's:", *lines])
