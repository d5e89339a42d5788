"""Cases in processes of their own: a crash, a hang or a broken GPU context costs one case and not the run."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.case import OURS, Case
from bench.ledger import launches_of
from bench.runner import UNFINISHED, Save, blank, broken, reason, run_case, this_device
from edm2.backends import full_precision
from kernels import batch_invariance
from kernels.jit import Launch, warm, warm_key
from kernels.tracing import OnGPU

Source = Callable[[], Iterable[Case]]  # importable: a process finds its cases by name, since they cannot be pickled
SPAWN = multiprocessing.get_context("spawn")  # a fork cannot use CUDA


class Isolated:
    """Runs cases like `run_case`, all in one process as long as it lives, and a fresh one after it.

    A candidate that ends the process, that takes more than `limit` seconds (the case's own if that is more) or that is at
    work at `deadline` (as of `time.monotonic`) is reported as failed, with what the candidates before it came to. A context manager.
    """

    def __init__(self, source: Source, limit: float, deadline: float):
        self.source, self.limit, self.deadline = source, limit, deadline
        self.process: BaseProcess | None = None

    def __enter__(self) -> "Isolated":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process is not None:
            self.connection.close()  # it ends by itself unless it hangs
            self.process.join(5)
            self._stop()

    def __call__(self, case: Case, device: torch.device, ceilings: dict[str, float], runs: int, save: Save) -> dict[str, Any]:
        if self.process is None:
            self._start()
        result, state = blank(case), "at work"
        try:
            self.connection.send((case.name, ceilings, runs))
            while state == "at work":
                left = min(max(self.limit, case.limit), self.deadline - time.monotonic())
                if not self.connection.poll(max(left, 0)):
                    self._stop()
                    return failed(result, f"stopped after {max(left, 0):.0f} s")
                state, result = self.connection.recv()
                save(result)
        except (EOFError, OSError):
            return failed(result, f"the process died (exit code {self._stop()})")
        if state == "broken":
            self._stop()
        return result

    def _start(self) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, self.source), daemon=True)
        self.process.start()
        theirs.close()  # ours is then the only other end, and tells when the process dies

    def _stop(self) -> int | None:
        """End the process; returns its exit code."""
        if self.process is None:
            return None
        self.process.join(0.5)  # one that died by itself has an exit code of its own
        process, self.process = self.process, None
        self.connection.close()
        return end(process)


def _serve(connection: Connection, source: Source) -> None:
    os.setsid()  # a group of its own, with the compilers it starts
    full_precision()
    device, cases = this_device(), {case.name: case for case in source()}
    with suppress(EOFError):  # the other end closes it when there is no more to do
        while True:
            name, ceilings, runs = connection.recv()
            result = run_case(cases[name], device, ceilings, runs, lambda result: connection.send(("at work", result)))
            connection.send(("broken" if broken(device) else "done", result))


def end(process: BaseProcess) -> int | None:
    """Kill a process and those it started; returns its exit code once it is gone."""
    with suppress(ProcessLookupError, PermissionError):  # gone, or so young that it has no group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return process.exitcode


def failed(result: dict[str, Any], why: str) -> dict[str, Any]:
    """The result with `why` where a candidate, or all, did not finish."""
    candidates = {name: {"failure": why} if c.get("failure") == UNFINISHED else c for name, c in result["candidates"].items()}
    return result | {"candidates": candidates or {"all": {"failure": why}}}


def start_compiling(source: Source, batches: Sequence[Sequence[str]]) -> list[BaseProcess]:
    """Compile the cases of these names into the caches on disk, each batch of them in a process of its own.

    They leave some of the GPU's memory to others. The first may take the most, since a backward is only compiled when
    its forward has run; one that runs out of memory ends early.
    """
    shares = [0.6] + [0.25 / max(1, len(batches) - 1)] * len(batches)
    return _start([(_compile, source, *each) for each in zip(batches, shares)])


def start_warming(source: Source, names: Sequence[str], preset: str, batch: int, workers: int) -> list[BaseProcess]:
    """Compile Triton kernels into its cache: those that a training step, evaluations of 1, 8 and 64 images and these cases
    launch, in this order."""
    return _start([(_warm, source, names, preset, batch, worker, workers) for worker in range(workers)])


def _start(jobs: Sequence[tuple]) -> list[BaseProcess]:
    processes = [SPAWN.Process(target=target, args=args, daemon=True) for target, *args in jobs]
    for process in processes:
        process.start()
    return processes


def _compile(source: Source, names: Sequence[str], share: float) -> None:
    os.setsid()
    full_precision()
    device = this_device()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
    left = set(names)
    for case in source():
        if case.name in left:
            _compile_case(case, device)
            left.remove(case.name)
        if not left:
            break


def _compile_case(case: Case, device: torch.device) -> None:
    """What torch.compile makes of it, and this project's kernels where the case is one of these."""
    torch.compiler.reset()
    for candidate, run in case.build(device).items():
        if "compile" in candidate or (case.group == "kernels" and candidate == OURS):
            try:
                run()
            except Exception as e:  # the measurement will say so
                print(f"compiling {case.name} ahead: {reason(e)}", flush=True)


def _warm(source: Source, names: Sequence[str], preset: str, batch: int, worker: int, workers: int) -> None:
    """A share of the kernels: the others' workers have the rest."""
    os.setsid()
    major, minor = torch.cuda.get_device_capability()
    for launch in islice(to_warm(source, names, preset, batch, 10 * major + minor), worker, None, workers):
        warm(launch)


def to_warm(source: Source, names: Sequence[str], preset: str, batch: int, capability: int) -> Iterator[Launch]:
    """One launch for each code that Triton makes."""
    seen: set[str] = set()
    for x in chain(_step_launches(preset, batch, capability), _launches_of_cases(source, set(names), capability)):
        if (key := warm_key(x)) not in seen:
            seen.add(key)
            yield x


def _step_launches(preset: str, batch: int, capability: int) -> Iterator[Launch]:
    yield from launches_of("this project", preset, batch, "train", capability)
    for n, invariant in product((1, 8, 64), (False, True)):
        with batch_invariance(invariant):
            found = launches_of("this project", preset, n, "eval", capability)
        yield from found


def _launches_of_cases(source: Source, names: set[str], capability: int) -> Iterator[Launch]:
    for case in source():
        if case.name in names:
            yield from case_launches(case, capability)


def case_launches(case: Case, capability: int) -> list[Launch]:
    """Of this project's candidates, told on fake tensors."""
    launches: list[Launch] = []
    with FakeTensorMode(), OnGPU(launches.append, capability):
        for name, run in case.build(torch.device("cpu")).items():
            if name.startswith(OURS):
                run()
    return launches


def finish(processes: list[BaseProcess], deadline: float) -> int:
    """Wait for processes until `deadline`, end those that are left; returns how many succeeded."""
    while (alive := [p.sentinel for p in processes if p.is_alive()]) and time.monotonic() < deadline:
        wait(alive, timeout=max(0, deadline - time.monotonic()))
    return sum(end(process) == 0 for process in processes)
