"""The table of what kernels are compiled to: a file for a version of Triton, a row for a kernel and its constants."""

import csv
from pathlib import Path

import triton

from tests.gate.build import Facts
from tests.gate.collect import Job

PATH = Path(__file__).with_name(f"triton-{triton.__version__}.csv")
KEYS = ("arch", "kernel", "arguments", "constants")
FACTS = ("registers", "spilled", "shared", "tensor_memory", "products")
Rows = dict[tuple[str, ...], tuple[str, ...]]


def rows(facts: dict[Job, Facts]) -> Rows:
    return {key(job): tuple(str(getattr(x, name)) for name in FACTS) for job, x in facts.items() if not x.failure}


def key(job: Job) -> tuple[str, ...]:
    return f"sm_{job.capability}", job.name, job.arguments, job.constants


def write(table: Rows, path: Path = PATH, header: tuple[str, ...] = (*KEYS, *FACTS)) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *sorted((*k, *v) for k, v in table.items())])


def read(path: Path = PATH, keys: int = len(KEYS)) -> Rows:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    return {tuple(line[:keys]): tuple(line[keys:]) for line in lines}


def differences(old: Rows, new: Rows, names: tuple[str, ...] = FACTS) -> list[str]:
    """In words, one for each row that came, went or changed."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before is None or after is None:
            lines.append(f"{'new' if after else 'gone'}: {' '.join(key)}")
        elif before != after:
            changes = (f"{name} {a} → {b}" for name, a, b in zip(names, before, after) if a != b)
            lines.append(f"{', '.join(changes)}: {' '.join(key)}")
    return lines
