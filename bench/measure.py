"""Timing functions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 * 2**20  # more than any L2 cache
HEAD_START = 500_000  # cycles for each of the launches, some 0.3 ms


@dataclass(frozen=True)
class Timing:
    """Seconds: median, 20th and 80th percentile of `runs` runs."""

    median: float
    low: float
    high: float
    runs: int


def measure_in_turn(
    candidates: Sequence[Callable[[], object]],
    device: torch.device,
    runs: int = 20,
    seconds: float = 3.0,
    flush: bool = True,
    warmup: int = 3,
    launches: int = 1,
) -> list[Timing]:
    """Time each candidate after `warmup` calls, each time with a cold L2 cache if `flush`, and the `launches` ahead.

    In turn, A B A B …, so that a machine whose speed drifts treats all alike. At most `runs` times each, and no longer
    than about `seconds` each, but at least three times.
    """
    for run in candidates:
        for _ in range(warmup):
            run()
    timer = _cuda_timer(flush, launches) if device.type == "cuda" else _cpu_timer
    start, times = time.perf_counter(), [[] for _ in candidates]
    while len(times[0]) < 3 or (len(times[0]) < runs and time.perf_counter() - start < seconds * len(candidates)):
        for run, own in zip(candidates, times):
            own.append(timer(run))
    return [Timing(*np.percentile(own, [50, 20, 80]).tolist(), len(own)) for own in times]


def _cpu_timer(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_timer(flush: bool, launches: int) -> Callable[[Callable[[], object]], float]:
    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if flush else None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer(run: Callable[[], object]) -> float:
        if cache is not None:
            cache.zero_()
            torch.cuda._sleep(launches * HEAD_START)  # a short kernel's time would be that of its launch
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return timer
