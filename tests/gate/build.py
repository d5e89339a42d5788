"""Compiles kernels without a GPU, as a launch would, and reads what came out."""

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Container, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import FallbackWarning
from kernels.jit import OPTIONS
from tests.gate import ir
from tests.gate.collect import CAPABILITIES, CASES, Box, Job, collect, distinct
from tests.gate.sass import Code, Loop


@dataclass(frozen=True)
class Facts:
    """What a kernel was compiled to. `failure`: why it was not."""

    registers: int = 0
    spilled: int = 0  # bytes
    shared: int = 0  # bytes
    tensor_memory: int = 0  # columns
    products: int = 0  # tensor-core instructions
    wants_products: bool = False
    spills_in_loops: int = 0
    traps: bool = False
    loaded_operands: int = 0
    warnings: tuple[str, ...] = ()
    loops: tuple[Loop, ...] = ()  # that hold tensor-core instructions
    failure: str = ""


class OfflineDriver:
    """All that Triton asks of a driver in order to compile. The number of the device is its architecture."""

    capability = 90

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def workers() -> Iterator[ProcessPoolExecutor]:
    """Processes of their own, where Triton's driver is the offline one, as many as there are cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), _prepare) as pool:
        yield pool


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", FallbackWarning)  # a preset that falls back would go unseen
    driver.set_active(OfflineDriver())
    knobs.compilation.always_compile = True  # a cached kernel comes without the assembler's log
    knobs.nvidia.dump_ptxas_log = True


def compile_presets(everything: bool = False, kernels: Container[str] | None = None) -> dict[Job, Facts]:
    """The kernels of the table, or `everything`; of them these."""
    with workers() as pool:
        return compile_all(pool, [job for job in jobs_of_presets(pool, everything) if kernels is None or job.name in kernels])


def jobs_of_presets(pool: ProcessPoolExecutor, everything: bool = False) -> list[Job]:
    """The kernels that the presets launch; without `everything`, of cases `in_table` only, and of most one for each shape class."""
    pairs = [(case, x) for case in CASES for x in CAPABILITIES if everything or x in case.in_table]
    return distinct([case for case, _ in pairs], list(pool.map(collect, *zip(*pairs))), everything)


def compile_all(pool: ProcessPoolExecutor, jobs: list[Job]) -> dict[Job, Facts]:
    facts = tqdm(pool.map(build, jobs), total=len(jobs), unit="kernel", disable=None)  # on a terminal
    return dict(zip(jobs, facts))


def build(job: Job) -> Facts:
    """Compile a kernel, in a worker."""
    kernel = getattr(import_module(job.module), job.name)
    driver.active.capability = job.capability
    log = StringIO()
    try:
        with redirect_stdout(log):
            compiled = kernel.warmup(*map(_mock, job.args), grid=(1,), **OPTIONS, **dict(job.options))
    except Exception as error:  # of whatever kind: the gate reports all kernels that do not compile
        return Facts(failure=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    return _facts(compiled, log.getvalue())


def _mock(arg: Any) -> Any:
    """What Triton specialises as it would the argument of the launch. Pointers are multiples of 16 bytes."""
    if isinstance(arg, torch.dtype):
        return MockTensor(arg)
    if isinstance(arg, Box):
        strides = [16 * 2**i for i in range(len(arg.shape) - 1, 0, -1)] + [1]
        return TensorDescriptor(MockTensor(arg.dtype), list(arg.shape), strides, list(arg.shape))
    return arg


def _facts(compiled: Any, log: str) -> Facts:
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    wants_products = ir.wants_tensor_cores(compiled.asm["ttir"])
    code = Code(_disassemble(compiled.asm["cubin"]) if spilled or wants_products else "")
    return Facts(
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", log)),
        spilled=spilled,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", 0) or 0,
        products=len(code.tensor_core),
        wants_products=wants_products,
        spills_in_loops=code.spills_in_loops(),
        traps=bool(re.search(r"^\s*(@\S+\s+)?trap;", compiled.asm["ptx"], re.MULTILINE)),
        loaded_operands=ir.loaded_operands(compiled.asm["ttgir"]),
        warnings=tuple(re.findall(r"\(C75\d\d\).*", log)),
        loops=tuple(code.main_loops(compiled.metadata.num_warps)),
    )


def _disassemble(cubin: bytes) -> str:
    """Takes half a second, whatever the size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", path], check=True, capture_output=True, text=True).stdout
