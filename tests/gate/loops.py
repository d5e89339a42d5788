"""The main loops of the convolutions in machine code: what a warp runs per step of K (pixels, in the weight gradient).

The table beside this file has a row for each tile on each architecture: of its jobs the one with the most steps, and its
first loop. The limits hold for every loop of every job.
"""

from collections.abc import Iterator
from typing import Any

from tests.gate import table
from tests.gate.build import Facts
from tests.gate.collect import Job
from tests.gate.sass import Loop

PATH = table.PATH.with_name(f"loops-{table.PATH.name}")
KERNELS = ("conv_kernel", "wgrad_kernel")
COUNTS = ("steps", *(name for name in Loop._fields if name != "multiply_adds"))
KEYS = ("arch", "convolution", "channels", "pixels", "depth", "warps", "stages", "reached")
LEAST_STEPS = 36  # of a loop that must not be gone: 18 have been unrolled, on sm_80


def violations(job: Job, loops: tuple[Loop, ...]) -> Iterator[str]:
    if job.name not in KERNELS:
        return
    demand = step(job)
    if not loops and steps(job) >= LEAST_STEPS:
        yield "no loop over its products"
    for loop in loops:
        if loop.multiply_adds < demand:
            yield f"tensor-core instructions for {loop.multiply_adds} multiply-adds in its loop, a step takes {demand}"
        if job.capability == 90 and loop.from_registers:
            yield f"{loop.from_registers} tensor-core instructions in its loop take an operand from registers"
        if job.capability >= 90 and loop.shared_loads + loop.global_loads:
            yield f"{loop.shared_loads + loop.global_loads} loads into registers in its loop"


def step(job: Job) -> int:
    """Multiply-adds of a program's step."""
    o = dict(job.options)
    pixels = o["BI"] * o["BH"] * o["BW"]
    if job.name == "conv_kernel":
        return (o["BN0"] + o["BN1"]) * pixels * o["BLOCK_K"]
    return (o["BM0"] + o["BM1"]) * (o["BN0"] + o["BN1"]) * pixels


def steps(job: Job) -> int:
    """Known before the launch."""
    o = dict(job.options)
    if job.name not in KERNELS:
        return 0
    return o["TAPS"] * -(-o["K"] // o["BLOCK_K"]) if job.name == "conv_kernel" else LEAST_STEPS


def tile(job: Job) -> tuple[str, ...]:
    """What a row stands for."""
    o = dict(job.options)
    pixels = o["BI"] * o["BH"] * o["BW"]
    if job.name == "conv_kernel":
        kind, channels, depth = "input gradient" if o["TRANSPOSED"] else "forward", _sum(o, "BN"), o["BLOCK_K"]
        reached = "boxes" if o["BOXES"] else "pointers"
    else:
        kind, channels, pixels, depth = "weight gradient", _sum(o, "BM"), _sum(o, "BN"), pixels
        reached = ("rows" if o["FLAT"] else "boxes") if o["BOXES"] else "pointers"
    return tuple(map(str, (f"sm_{job.capability}", kind, channels, pixels, depth, o["num_warps"], o["num_stages"], reached)))


def _sum(options: dict[str, Any], name: str) -> str:
    return "+".join(str(options[name + i]) for i in "01" if options[name + i])


def rows(facts: dict[Job, Facts]) -> table.Rows:
    found: table.Rows = {}
    for job in sorted((x for x, f in facts.items() if x.name in KERNELS and f.loops), key=steps, reverse=True):
        loop = facts[job].loops[0]
        unrolled = loop.multiply_adds // step(job) if job.capability < 100 else 1  # which tell no shapes
        counts = {"steps": unrolled, **loop._asdict()}
        found.setdefault(tile(job), tuple(str(counts[name]) for name in COUNTS))
    return found


def read() -> table.Rows:
    return table.read(PATH, len(KEYS))


def write(found: table.Rows) -> None:
    table.write(found, PATH, (*KEYS, *COUNTS))


def text(found: table.Rows) -> str:
    lines = [(*KEYS, *COUNTS), *sorted((*key, *counts) for key, counts in found.items())]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(x.ljust(n) for x, n in zip(line, widths)).rstrip() for line in lines)
