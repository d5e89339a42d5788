"""`python -m bench gpu`: cases in processes of their own, kernels compiled ahead, tests, the answer first."""

import json
import os
import time
from itertools import islice
from pathlib import Path

import torch
from click.testing import CliRunner
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from bench import cases, gpu
from bench.__main__ import main
from bench.case import OWN_COMPILED, Case
from bench.convs import conv_cases
from bench.isolated import Isolated, case_launches, finish, start_compiling, to_warm
from bench.ledger import launches_of
from bench.runner import run_cases
from kernels.jit import OPTIONS, Launch, RecordedBox, _mock, _tensor, warm, warm_key
from tests.gate.build import workers

ROOT = Path(__file__).parent.parent


def planted():
    """Cases that end or stop the process they run in; the test's own processes import this."""
    ones = {"good": lambda: torch.ones(3), "off": lambda: torch.zeros(3)}
    bad = {
        "aborts": os.abort,
        "exits": lambda: os._exit(0),
        "hangs": lambda: time.sleep(60),
        "compile hangs": lambda: time.sleep(60),
    }
    yield Case("kernels/first", lambda device: ones, needs_gpu=False)
    for name, run in bad.items():
        yield Case(f"kernels/{name}", lambda device, run=run, name=name: ones | {name: run}, needs_gpu=False)
    yield Case("kernels/last", lambda device: ones, needs_gpu=False)


class TestIsolated:
    def test_crashes_and_hangs_cost_one_case(self, tmp_path):
        cases = [case for case in planted() if "compile" not in case.name]
        with Isolated(planted, limit=15, deadline=time.monotonic() + 200) as isolated:
            results = run_cases(cases, tmp_path, budget=200, runs=3, run=isolated)
        first, aborts, exits, hangs, last = (result["candidates"] for result in results)
        assert "median" in first["good"] and "median" in last["good"] and "above" in last["off"]["failure"]
        assert aborts["aborts"] == {"failure": "the process died (exit code -6)"} and "above" in aborts["off"]["failure"]
        assert exits["exits"] == {"failure": "the process died (exit code 0)"}
        assert hangs["hangs"] == {"failure": "stopped after 15 s"}
        assert json.loads((tmp_path / "kernels_hangs.json").read_text())["candidates"] == hangs

    def test_deadline_is_kept(self, tmp_path):
        case = next(case for case in planted() if case.name == "kernels/hangs")
        start = time.monotonic()
        with Isolated(planted, limit=60, deadline=start + 12) as isolated:
            run_cases([case], tmp_path, budget=12, runs=3, run=isolated)
        assert time.monotonic() - start < 20

    def test_compilation_ahead_is_over_when_it_should_be(self):
        start = time.monotonic()
        processes = start_compiling(planted, [["kernels/compile hangs"], ["kernels/first", "kernels/last"]])
        assert finish(processes, start + 15) == 1 and time.monotonic() - start < 25
        assert not any(process.is_alive() for process in processes)


def codes_of(step: tuple[str, int]) -> list[tuple[str, int, int, int]]:
    """Of each launch of a step of EDM2-S (or of its convolutions' cases) the kernel, and, numbered in the order of their
    first use, its warm key, the code that is compiled ahead and the code that the launch asks for. In a process where the
    driver compiles offline."""
    keys, codes, found = {}, {}, []
    phase, batch = step
    for x in launches_of("this project", "edm2-img512-s", batch, phase) if phase != "convolutions" else launches_of_cases(batch):
        assert not any(base.storage_offset() * base.element_size() % 16 for base in map(_tensor, x.args) if base is not None)
        ahead, launched = (triton_code(x.kernel, map(stand_in, x.args), x.options) for stand_in in (_mock, on_meta))
        numbers = keys.setdefault(warm_key(x), len(keys)), codes.setdefault(ahead, len(codes)), codes.setdefault(launched, len(codes))
        found.append((x.kernel.__name__, *numbers))
    return found


def launches_of_cases(batch: int) -> list[Launch]:
    """Of the heaviest convolutions, and of all that is fused with one at its heaviest."""
    chosen = [*islice(conv_cases("edm2-img512-s", batch, 3), 8), *cases.fusions()[0]]
    return [x for case in chosen for x in case_launches(case, 90)]


def on_meta(x):
    """The argument of a launch with its sizes and strides, at address 0."""
    if isinstance(x, RecordedBox):
        return TensorDescriptor(on_meta(x.base), *x[1:])
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x


def triton_code(kernel, args, options) -> str:
    """Triton's name of the source with all that it specialises, by which it finds the compiled code on disk."""
    options = OPTIONS | options
    *_, backend, binder = kernel.device_caches[driver.active.get_current_device()]
    bound, specialization, rest = binder(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
    return f"{ASTSource(kernel, signature, constants, attributes).hash()} {parsed.hash()}"


class TestGpu:
    def test_tests_are_counted_and_stopped(self, tmp_path):
        (tmp_path / "test_x.py").write_text(
            "import pytest, time\n"
            "@pytest.mark.parametrize('x', ['a b', 'c'])\n"
            "def test_good(x): pass\n"
            "def test_bad(): assert 0\n"
            "@pytest.mark.skip(reason='so (really)')\n"
            "def test_left(): pass\n"
            "def test_hangs(): time.sleep(600)\n"
        )
        facts = gpu.run_tests([str(tmp_path / "test_x.py")], limit=10)
        assert (facts["passed"], facts["failed"], facts["skipped"], facts["stopped"]) == (2, 1, 1, True)
        assert [name.split("::")[1] for name in facts["failures"]] == ["test_bad", "test_hangs"] and facts["seconds"] < 15
        assert "STOPPED" in gpu.describe_tests(facts) and "test_bad" in gpu.describe_tests(facts)

    def test_cases_are_compiled_ahead_by_what_they_take(self):
        """Networks alone, kernels together; those that a budget reaches first."""
        chosen = list(cases.gpu_cases())
        batches = gpu.batches_ahead(chosen)
        assert batches[0] == ["train/edm2-img512-s/n256"] and [len(x) for x in batches] == [1] * 6 + [8] * 3
        assert all(name.startswith("kernels/") for batch in batches[6:] for name in batch)
        assert len({case.name for case in chosen}) == len(chosen)
        ((place, thousand),) = ((i, case) for i, case in enumerate(chosen) if case.group == "equivalence")
        assert len(chosen) / 2 < place < len(chosen) - 1 and thousand.limit > 0 and thousand.facts["steps"] == 1000
        assert [case.name for case in cases.group_cases("equivalence")] == ["equivalence/digits/n32", thousand.name]

    def test_kernels_of_a_step_are_compiled_ahead(self, monkeypatch):
        compiled = []
        monkeypatch.setattr("triton.runtime.jit.JITFunction.warmup", lambda self, *args, **options: compiled.append((self, args, options)))
        launches = launches_of("this project", "digits", 2, "train")
        for launch in {warm_key(x): x for x in launches}.values():
            warm(launch)
        assert {kernel for kernel, *_ in compiled} == {x.kernel for x in launches} and len(compiled) < len(launches)
        assert not any(isinstance(arg, torch.Tensor) for _, args, _ in compiled for arg in args)

    def test_what_is_compiled_ahead_is_what_a_launch_looks_for(self):
        """Arguments that stand in for tensors and descriptors ask Triton for the code that the real ones will ask for."""
        with workers() as pool:
            found = list(pool.map(codes_of, [("eval", 1), ("train", 8), ("convolutions", 256)]))
        assert {name for codes in found for name, *_ in codes} >= {"conv_kernel", "wgrad_kernel", "cosine_attention_backward_kernel"}
        for name, key, ahead, launched in (code for codes in found for code in codes):
            assert ahead == launched, name
            assert key == ahead, f"{name}: keys that differ share code, or equal ones do not"

    def test_kernels_of_steps_and_cases_are_compiled_ahead_once(self):
        """Those of a step first; then what only cases launch, in their order."""
        ahead = list(to_warm(cases.rehearsal_cases, gpu.kernels_ahead(list(cases.rehearsal_cases())), "digits", 8, 90))
        keys = [warm_key(x) for x in ahead]
        step = dict.fromkeys(warm_key(x) for x in launches_of("this project", "digits", 8, "train"))
        assert keys[: len(step)] == list(step) and len(set(keys)) == len(keys)
        of_cases = [case for case in cases.rehearsal_cases() if case.name.startswith(("kernels/conv", "kernels/silu_grad"))]
        assert {warm_key(x) for case in of_cases for x in case_launches(case, 90)} <= set(keys[len(step) :]) | set(step)
        assert "epilogue_kernel" in {x.kernel.__name__ for x in ahead[len(step) :]}  # by the library

    def test_first_line_is_the_answer(self):
        candidates = {"eager": {"images/s": 200.0}, "compile": {"images/s": 400.0}, "edm2": {"images/s": 1000.0}}
        result = {"group": "train", "preset": "edm2-img512-s", "batch": 256, "candidates": candidates}
        assert gpu.answer([result]) == "training edm2-img512-s, batch 256: edm2 1000 images/s, 5.00 × eager (200), 2.50 × compile (400)"
        candidates[OWN_COMPILED] = {"images/s": 1100.0}
        assert gpu.answer([result]).endswith(": edm2 compiled 1100 images/s, 5.50 × eager (200), 2.75 × compile (400), 1.10 × edm2 (1000)")
        del candidates[OWN_COMPILED]
        candidates["edm2"] = {"failure": "no luck"}
        assert gpu.answer([result]).endswith("edm2 no luck, eager (200), compile (400)")

    def test_rehearsal(self, tmp_path, monkeypatch):
        """Tests, compilation ahead, a case in a process of its own, the table."""
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(main, ["gpu", "--dry-run", "--only=block"])
        assert result.exit_code == 0 and "2 of 2 processes compiled ahead" in result.output, result.output
        table = result.output.split("\n\n")[1].splitlines()
        assert table[0] == "training: unmeasured" and table[1].startswith("GPU tests: ") and table[2].startswith("block/digits")
        folder = tmp_path / "out" / "rehearsal"
        assert json.loads((folder / "tests" / "tests.json").read_text())["failed"] == 0
        assert "median" in json.loads((folder / "block_digits_8x8_n2.json").read_text())["candidates"]["edm2"]
