"""The registry under pytest-benchmark: `pytest bench`, `pytest bench --benchmark-compare`."""

import pytest
import torch

from bench import cases
from bench.case import OWN_COMPILED, Case
from edm2.backends import full_precision, keep_freed_memory
from edm2.errors import UserError

CPU_CASES = [next(cases.group_cases(group)) for group in ("train", "sample", "optimizer")]  # the digits
BY_GROUP = {
    "train": ("eager", "eager channels-last", "compile", "edm2", OWN_COMPILED),
    "sample": ("eager", "eager channels-last", "compile", "edm2"),
    "block": ("eager", "eager channels-last", "compile", "edm2"),
    "optimizer": ("eager", "edm2"),
    "kernels": (None,),  # a library's only candidate
}
OWN_KERNELS = ("eager", "compile", "edm2")


def candidates_of(case: Case) -> tuple[str | None, ...]:
    if mode := case.facts.get("mode"):
        return "eager channels-last", f"compile {mode}"
    if case.group == "kernels" and case.name.startswith("kernels/conv") and not case.compiles:
        return "cuDNN", "edm2"
    if case.group == "data":
        return "edm2", "edm2 from memory"
    if case.group == "difference":
        return "eager", "edm2"
    return OWN_KERNELS if case.group == "kernels" and case.compiles else BY_GROUP[case.group]


PAIRS = [(case, name) for case in (*CPU_CASES, *cases.gpu_cases()) if case.timed for name in candidates_of(case)]


@pytest.mark.parametrize(("case", "candidate"), PAIRS, ids=lambda x: getattr(x, "name", x) or "library")
def test_case(benchmark, case, candidate):
    if case.needs_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if candidate and "compile" in candidate and not torch.cuda.is_available():
        pytest.skip("compiling for a CPU is no baseline")
    full_precision()
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        candidates = case.build(device)
    except UserError as e:
        pytest.skip(str(e))
    run = next(iter(candidates.values())) if candidate is None else candidates[candidate]

    def synchronised() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info.update(case.facts, device=str(device), flops=case.flops, bytes=case.bytes)
    benchmark.pedantic(synchronised, rounds=20, warmup_rounds=3)
