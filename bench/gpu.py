"""What a GPU that is there for minutes is asked: its tests, with compilation beside them, then the cases."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from bench import goals, training_goals
from bench.case import OURS, Case
from bench.isolated import Isolated, Source, finish, start_compiling, start_warming
from bench.runner import line, run_cases, this_device, write

ROOT = Path(__file__).parent.parent
GPU_TESTS = ("-m", "gpu", "--continue-on-collection-errors", "tests")  # some files need packages that may not be there
COMPILED_AHEAD = 6  # cases, each in a process of its own
KERNELS_AHEAD, TOGETHER = 24, 8  # cases of single kernels, and how many in one process
WARMING = 6  # processes that compile Triton kernels: some 400 of 1 to 2 s each
TESTS_SHARE, COMPILING_SHARE, SILENCE_SHARE = 0.25, 0.2, 0.3  # of the budget; the last is one candidate's at most


def run(source: Source, cases: Iterable[Case], outdir: Path, budget: float, runs: int) -> list[dict[str, Any]]:
    """Tests, then the cases in their order, all within `budget` seconds; prints the answer, then a line per case.

    Compilation goes on beside the tests. Nothing else is at work while a case is measured.
    """
    start, cases = time.monotonic(), list(cases)
    ahead = start_compiling(source, batches_ahead(cases))
    if this_device().type == "cuda" and any(case.group in ("train", "sample") for case in cases):
        ahead += start_warming(source, kernels_ahead(cases), "edm2-img512-s", 256, WARMING)
    try:
        tests = run_tests(GPU_TESTS, TESTS_SHARE * budget)
    finally:
        compiled = finish(ahead, start + COMPILING_SHARE * budget)
    write(outdir / "tests" / "tests.json", tests)
    click.echo(f"{describe_tests(tests)}; {compiled} of {len(ahead)} processes compiled ahead; {time.monotonic() - start:.0f} s so far")
    deadline = start + budget
    with Isolated(source, SILENCE_SHARE * budget, deadline) as isolated:
        results = run_cases(cases, outdir, deadline - time.monotonic(), runs, isolated)
    click.echo("\n" + "\n".join([answer(results), describe_tests(tests), *map(line, results)]))
    for header, rows in [*training_goals.training(results), *goals.averages(results)]:  # last, where whoever sees only the end sees it
        click.echo("\n" + "\n".join(" | ".join(cells) for cells in (header, *rows)))
    return results


def batches_ahead(cases: Sequence[Case]) -> list[list[str]]:
    """Names of the cases to compile ahead, by process: networks alone, single kernels together."""
    names = [case.name for case in cases if case.compiles and case.group != "kernels"][:COMPILED_AHEAD]
    single = [case.name for case in cases if case.compiles and case.group == "kernels"][:KERNELS_AHEAD]
    workers = -(-len(single) // TOGETHER)
    return [[name] for name in names] + [single[worker::workers] for worker in range(workers)]


def kernels_ahead(cases: Sequence[Case]) -> list[str]:
    """Names of the cases whose Triton kernels are compiled ahead. Those of the weights are part of a step's."""
    return [case.name for case in cases if case.group == "kernels" and case.dtype]


def run_tests(arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """Run pytest for at most `limit` seconds: how many passed, failed and were skipped, the names of those that failed
    or at which it was stopped, and, unless all is well, the end of what it printed."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # with what it started
                os.killpg(process.pid, signal.SIGKILL)
        stopped = process.wait() == -signal.SIGKILL
        output.seek(0)
        text = output.read()
    facts = {**_counts(text), "stopped": stopped, "seconds": time.monotonic() - start}
    return facts | ({} if process.returncode in (0, 5) else {"output": text[-4000:]})  # 5: no such tests


def _counts(text: str) -> dict[str, Any]:
    """From the lines of `pytest -v`; one without an outcome is the test at which it was stopped."""
    lines = re.findall(r"^(\S+?\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)?\s*(?:\(.*\))?\s*(?:\[ *\d+%\])?$", text, re.M)
    outcomes = [outcome for _, outcome in lines]
    return {
        "passed": outcomes.count("PASSED"),
        "failed": outcomes.count("FAILED") + outcomes.count("ERROR"),
        "skipped": outcomes.count("SKIPPED"),
        "failures": [name for name, outcome in lines if outcome in ("FAILED", "ERROR", "")],
    }


def describe_tests(tests: dict[str, Any]) -> str:
    """One line."""
    parts = [f"GPU tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"]
    parts += [f"STOPPED after {tests['seconds']:.0f} s"] if tests["stopped"] else []
    parts += [tests["output"].strip().splitlines()[-1]] if "output" in tests and not tests["failures"] else []
    return ", ".join(parts + tests["failures"][:5])


def answer(results: list[dict[str, Any]]) -> str:
    """What it all is about: images per second of training (EDM2-S comes first) against eager and torch.compile, by the
    quickest of this project's candidates."""
    training = next((result for result in results if result["group"] == "train"), None)
    if training is None:
        return "training: unmeasured"
    candidates = training["candidates"]
    rates = {name: c["images/s"] for name, c in candidates.items() if "images/s" in c}
    best = training_goals.quickest(rates) or OURS
    ours = candidates.get(best, {"failure": "unmeasured"})
    parts = [f"{ours['images/s']:.4g} images/s" if "images/s" in ours else ours["failure"]]
    for name, other in candidates.items():
        if name != best and "images/s" in other:
            times = f"{ours['images/s'] / other['images/s']:.2f} × " if "images/s" in ours else ""
            parts.append(f"{times}{name} ({other['images/s']:.4g})")
    return f"training {training['preset']}, batch {training['batch']}: {best} {', '.join(parts)}"
