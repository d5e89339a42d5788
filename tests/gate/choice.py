"""Which of the table's kernels every run of the tests compiles."""

from collections.abc import Iterable
from typing import Any

from tests.gate import loops
from tests.gate.collect import Job

FAMILY = ("EPILOGUE", "UP", "TRANSPOSED", "BLOCK", "num_warps")


def of_every_run(jobs: Iterable[Job]) -> list[Job]:
    """On sm_90 one of each shape class, elsewhere of each family; and everywhere the convolutions of the table of loops."""
    chosen: dict[Any, Job] = {}
    for job in sorted(jobs, key=loops.steps, reverse=True):
        chosen.setdefault(form(job), job)
        if job.name in loops.KERNELS:
            chosen.setdefault(loops.tile(job), job)
    return list(dict.fromkeys(chosen.values()))


def form(job: Job) -> tuple[Any, ...]:
    """Kernels that share it differ in numbers alone."""
    return job.shape_class if job.capability == 90 else family(job)


def family(job: Job) -> tuple[Any, ...]:
    """What a kernel does and with how many warps."""
    return job.capability, job.name, tuple(x for x in job.options if x[0] in FAMILY)
