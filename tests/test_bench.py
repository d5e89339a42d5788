"""The baselines equal the project, and the ledger counts what is run."""

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import edm2
import kernels.fallback
from bench import cases, counted, gpu
from bench.__main__ import main
from bench.baseline import Baseline, BaselineOptimizer
from bench.case import OWN_COMPILED, Case
from bench.convs import conv_cases, conv_shapes
from bench.isolated import Isolated, case_launches, finish, start_compiling, to_warm
from bench.ledger import CANDIDATES, Entry, Recorder, count, fake_network, inputs_for, launches_of
from bench.models import compile_for, data_stream, make_inputs, make_network, train_case
from bench.runner import run_cases
from bench.sampling import sample_case
from edm2.backends import full_precision
from edm2.summary import saved_bytes
from kernels.jit import OPTIONS, Launch, RecordedBox, _mock, _tensor, warm, warm_key
from tests.conftest import relative_error, tiny_net
from tests.gate.build import workers
from tests.test_bench_convs import KINDS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("label_dim", [5, 0])
def test_baseline_equals_the_project(fast, label_dim):
    """Loss and every gradient, to rounding."""
    net = tiny_net(label_dim, num_blocks=2, attn_resolutions=(8, 4)).train()
    y, sigma, noise = torch.randn(3, 2, 8, 8), torch.tensor([0.1, 1, 10]), torch.randn(3, 2, 8, 8)
    labels = torch.eye(5)[:3] if label_dim else None

    def loss_and_gradients(model):
        net.zero_grad()
        loss = edm2.denoising_loss(model, y, sigma, noise, labels)
        loss.sum().backward()
        gradients = {name: p.grad for name, p in net.named_parameters() if p.ndim}
        gradients["gains"] = torch.stack([p.grad for p in net.parameters() if not p.ndim])
        return loss, gradients

    loss, gradients = loss_and_gradients(net)
    baseline_loss, baseline_gradients = loss_and_gradients(Baseline(net, fast))
    assert relative_error(baseline_loss, loss) < 1e-5
    for name, gradient in gradients.items():
        assert relative_error(baseline_gradients[name], gradient) < 1e-4, name


def test_baseline_optimizer_equals_the_project():
    nets = [tiny_net().train() for _ in range(2)]
    optimizers = [edm2.EDM2Optimizer(nets[0]), BaselineOptimizer(nets[1])]
    for step in (1, 2, 3):
        for net, optimizer in zip(nets, optimizers):
            torch.manual_seed(step)
            optimizer.zero_grad()
            edm2.EDM2Loss()(net, torch.randn(4, 2, 8, 8)).sum().backward()
            optimizer.step(0.01, step * 4, 4)
    for (name, a), b in zip(nets[0].named_parameters(), nets[1].parameters()):
        assert relative_error(b, a) < 1e-5, name
    for a, b in zip(optimizers[0].ema(0.05).values(), optimizers[1].emas[0.05]):
        assert relative_error(b, a) < 1e-5


def test_recorder_counts_launches_flops_and_bytes():
    classes = defaultdict(Entry)
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    with Recorder(classes):
        c = a @ b
        d = (c.T + 1).reshape(4, 8)
    assert d.shape == (4, 8) and set(classes) == {"matrix product", "pointwise"}
    product, add = classes["matrix product"], classes["pointwise"]
    assert (product.launches, product.flops, product.bytes) == (1, 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    assert (add.launches, add.flops, add.bytes) == (1, 0, 4 * 2 * 8 * 4)


class TestRunner:
    def case(self, **candidates):
        return Case("kernels/x", lambda device: candidates, flops=1e6, bytes=1e6, tolerance=1e-3, needs_gpu=False)

    def test_results_are_written_after_each_case(self, tmp_path):
        cases = [replace(self.case(a=lambda: torch.ones(3)), name=f"kernels/{i}") for i in range(2)]
        results = run_cases(cases, tmp_path, budget=60, runs=3)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels_0.json", "kernels_1.json"]
        stored = json.loads((tmp_path / "kernels_0.json").read_text())
        assert stored == json.loads(json.dumps(results[0]))
        facts = stored["candidates"]["a"]
        assert facts["low"] <= facts["median"] <= facts["high"] and facts["runs"] == 3 and facts["TFLOP/s"] > 0
        assert {"name", "torch", "triton", "commit", "python"} <= stored["machine"].keys()
        assert stored["dtype"] == "float32"

    def test_wrong_and_failing_candidates_have_no_speed(self, tmp_path):
        def fail():
            raise RuntimeError("out of luck\nand more")

        case = self.case(good=lambda: torch.ones(3), off=lambda: torch.ones(3) * 1.01, nan=lambda: torch.ones(3) / 0 * 0, bad=fail)
        (result,) = run_cases([case], tmp_path, budget=60, runs=3)
        facts = result["candidates"]
        assert "median" in facts["good"] and facts["bad"] == {"failure": "out of luck"}
        assert all("median" not in facts[name] and "error" in facts[name]["failure"] for name in ("off", "nan"))

    def test_every_output_is_compared_with_an_untimed_reference(self, tmp_path):
        pair = torch.ones(3), torch.arange(3.0)
        candidates = {"reference": lambda: pair, "good": lambda: pair, "off": lambda: [pair[0], pair[1] + 1], "one": lambda: pair[0]}
        (result,) = run_cases([self.case(**candidates)], tmp_path, budget=60, runs=3)
        facts = result["candidates"]
        assert facts.keys() == {"good", "off", "one"} and facts["good"]["error"] == 0 and "median" in facts["good"]
        assert facts["off"]["failure"].startswith("error") and "came out, not" in facts["one"]["failure"]

    def test_a_reference_is_what_came_out_first(self, tmp_path):
        """An optimizer goes on changing the weights that it returned."""
        x, y = torch.ones(3), torch.ones(3)
        (result,) = run_cases([self.case(a=lambda: x.add_(1), b=lambda: y.add_(1))], tmp_path, budget=60, runs=3)
        assert [c["error"] for c in result["candidates"].values()] == [0, 0]

    def test_results_are_json_for_everyone(self, tmp_path):
        """Python would write NaN and Infinity, which others cannot read."""
        run_cases([self.case(a=lambda: torch.ones(3), b=lambda: torch.ones(3) / 0 * 0)], tmp_path, budget=60, runs=3)

        def refuse(constant):
            raise AssertionError(constant)

        facts = json.loads((tmp_path / "kernels_x.json").read_text(), parse_constant=refuse)["candidates"]["b"]
        assert facts["error"] is None and facts["failure"] == "error inf above 0.001"

    def test_budget(self, tmp_path):
        slow = self.case(a=lambda: time.sleep(0.1))
        assert len(run_cases([slow, slow], tmp_path, budget=0.2, runs=3)) == 1

    def test_rehearsal(self, tmp_path, monkeypatch):
        """Every kind of case but the convolutions', which `test_bench_convs` runs one by one, and equal losses, on small sizes."""
        monkeypatch.chdir(tmp_path)
        others = [case for case in cases.rehearsal_cases() if not case.name.startswith(KINDS)]
        monkeypatch.setattr(cases, "rehearsal_cases", lambda: others)
        for command in (groups := ("kernels", "block", "train", "sample", "data", "difference", "equivalence", "optimizer")):
            result = CliRunner().invoke(main, [command, "--dry-run"])
            assert result.exit_code == 0 and "failure" not in result.output and "above" not in result.output, result.output
        stored = [json.loads(path.read_text()) for path in (tmp_path / "out" / "rehearsal").iterdir()]
        assert {case["group"] for case in stored} == set(groups)
        failures = {f"{case['case']} {name}": f["failure"] for case in stored for name, f in case["candidates"].items() if "failure" in f}
        assert not failures
        trained = next(case for case in stored if case["group"] == "train")["candidates"]
        for parts in (trained[name]["parts"] for name in ("edm2", "edm2 traced, not compiled")):
            assert parts.keys() == {"data", "forward", "backward", "optimizer"} and min(parts.values()) > 0

    def test_a_case_that_cannot_be_built_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "diffusers", None)
        case = sample_case("edm2-img512-s", 1, steps=1, decoded=True, needs_gpu=False)
        (result,) = run_cases([case, self.case(a=lambda: None)], tmp_path, budget=60, runs=3)[:1]
        assert "decoding latents needs diffusers" in result["candidates"]["all"]["failure"]

    def test_results_so_far_are_written_before_each_candidate(self, tmp_path):
        stored = []
        case = self.case(a=lambda: torch.ones(3), b=lambda: stored.append(json.loads((tmp_path / "kernels_x.json").read_text())))
        run_cases([case], tmp_path, budget=60, runs=3)
        assert stored[0]["candidates"]["b"] == {"failure": "did not finish"} and "torch" in stored[0]["machine"]

    def test_an_op_that_fell_back_is_no_measurement(self, tmp_path):
        def fall_back():
            kernels.fallback.note("conv", "40 channels")

        with pytest.warns(kernels.fallback.FallbackWarning, match="conv fell back: 40 channels"):
            (result,) = run_cases([self.case(edm2=fall_back)], tmp_path, budget=60, runs=3)
        facts = result["candidates"]["edm2"]
        assert facts["failure"] == "op conv fell back: 40 channels" and "median" not in facts
        (result,) = run_cases([self.case(edm2=lambda: None)], tmp_path, budget=60, runs=3)
        facts = result["candidates"]["edm2"]
        assert facts["coverage"] == kernels.coverage("cpu") and "median" in facts

    def test_every_size_is_compiled_for_itself(self, tmp_path):
        """torch.compile takes a size that it sees change for a variable one, and makes slower code."""

        def double(x):
            return x * 2

        def sized(n):
            return replace(self.case(), build=lambda device: {"compile": lambda: compile_for(device, double)(torch.ones(n))})

        with torch._dynamo.config.patch(error_on_recompile=True):
            results = run_cases([sized(3), sized(4)], tmp_path, budget=60, runs=3)
        assert not any("failure" in result["candidates"]["compile"] for result in results)

    def test_a_step_is_compiled_whole_and_for_its_size(self, monkeypatch):
        """As `train.py` does: forward, loss and backward are one graph, which later steps use again."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        candidates = train_case("digits", 4, needs_gpu=False).build(torch.device("cpu"))
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses = [[candidates[name]() for _ in range(3)] for name in ("edm2", "edm2 traced, not compiled")]
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert relative_error(torch.stack(losses[1]), torch.stack(losses[0])) < 1e-5

    def test_convolutions_of_the_published_network(self):
        """92.94 G of 100.8 G multiply-adds are 3×3 convolutions."""
        shapes = conv_shapes("edm2-img512-s").items()
        assert sum(count * res**2 * a * b * 9 for (res, a, b, k), count in shapes if k == 3) == pytest.approx(92.94e9, rel=1e-4)


class TestSampling:
    @pytest.mark.parametrize(("guided", "steps", "calls"), [(False, 0, 1), (True, 0, 2), (False, 3, 5), (True, 3, 10)])
    def test_evaluations_are_counted(self, guided, steps, calls, monkeypatch):
        denoise, made = edm2.Precond.denoise, []
        case = sample_case("digits", 2, guided=guided, steps=steps, needs_gpu=False)
        monkeypatch.setattr(edm2.Precond, "denoise", lambda *args: made.append(0) or denoise(*args))
        assert case.build(torch.device("cpu"))["edm2"]().shape == (2, 1, 8, 8)
        assert len(made) == calls == case.facts["evaluations"] * (2 if guided else 1)
        monkeypatch.undo()
        assert case.flops == calls * sample_case("digits", 2, needs_gpu=False).flops

    def test_names_differ_and_decoding_ends_in_pixels(self):
        cases = [sample_case("digits", 2, steps=2, guided=guided, decoded=decoded) for guided in (0, 1) for decoded in (0, 1)]
        ends = ["trajectory", "decoded", "guided/trajectory", "guided/decoded"]
        assert [case.name for case in cases] == [f"sample/digits/n2/{end}" for end in ends]
        pixels = cases[1].build(torch.device("cpu"))["edm2"]()
        assert pixels.shape == (2, 8, 8, 1) and pixels.dtype == torch.uint8


@pytest.mark.parametrize(("preset", "shape"), [("edm2-img512-s", (3, 8, 64, 64)), ("edm2-img64-s", (3, 3, 64, 64))])
def test_data_stream_is_what_training_reads(preset, shape):
    stream, encoder = data_stream(preset, 3)
    images, labels = next(stream)
    assert images.shape == shape and labels.shape == (3, 1000)
    assert encoder.draws_noise == (shape[1] == 8)


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


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["eval", "train"])
def test_launches_are_those_of_a_profiler(phase):
    """Of the baseline, whose optimizer has but one operator that takes lists of tensors; the ledger counts it as one."""
    full_precision()
    device, preset = torch.device("cuda"), "edm2-img512-s"
    model, inputs = Baseline(make_network(preset, device)), make_inputs(preset, 2, device)
    optimizer = BaselineOptimizer(model.net)

    def step():
        if phase == "eval":
            with torch.no_grad():
                return model.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
        optimizer.zero_grad()
        edm2.denoising_loss(model.train(), **inputs).sum().backward()
        optimizer.step(0.01, 4, 2)

    step()  # cuDNN tries its algorithms once
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    assert len(on_device) == pytest.approx(count("eager", preset, 2, phase).total.launches, rel=0.1)


class TestLedger:
    """Totals of EDM2-S at batch 256, held by `bench/results/ledger.json`: a pass over memory that comes or goes shows here."""

    @pytest.mark.parametrize("held", counted.load(ROOT), ids=lambda held: f"{held['candidate']}, {held['phase']}")
    def test_edm2_s(self, held):
        """After a change that is meant: `python -m bench count-ledger`, `python -m bench report`, and the diff shows it."""
        found, total = count(held["candidate"], held["preset"], held["batch"], held["phase"]).total, held["total"]
        assert found.launches == pytest.approx(total["launches"], rel=0.02)  # versions of PyTorch differ by a few
        assert found.bytes == pytest.approx(total["bytes"], rel=0.02)
        multiply_adds = 100.819e9 * 256 * (1 if held["phase"] == "eval" else 3)
        if held["candidate"] == "this project":  # 4 taps in place of 9 behind up-samplings
            multiply_adds *= 95.345 / 100.819
        assert found.flops / 2 == pytest.approx(multiply_adds, rel=5e-3)
        assert found.saved == pytest.approx(total["saved"], rel=0.02)

    def test_save(self, tmp_path, monkeypatch):
        """All four of them, which the tables then show."""
        monkeypatch.setattr(counted, "PRESET", "digits")
        counted.save(tmp_path)
        held = counted.load(tmp_path)
        assert [(x["candidate"], x["phase"]) for x in held] == [(c, p) for p in ("eval", "train") for c in ("eager", "this project")]
        assert held[3] == count("this project", "digits", 256, "train").to_json()

    @pytest.mark.parametrize("candidate", ["eager", "eager, channels-last", "this project"])
    def test_saved_bytes_are_those_that_autograd_packs(self, candidate):
        """Told by hooks, their sum is the same but for single numbers."""
        with fake_network("digits") as net, saved_bytes(net) as packed:
            edm2.denoising_loss(CANDIDATES[candidate][0](net.train()), **inputs_for(net, 4)).sum()
            expected = packed()
        classes = count(candidate, "digits", 4, "train").classes
        if candidate == "this project":  # in a step its weights are prepared beforehand
            assert 0 < sum(entry.saved for entry in classes.values()) < expected
        else:
            assert sum(entry.saved for entry in classes.values()) == pytest.approx(expected, rel=1e-3)
        assert max(classes, key=lambda name: classes[name].saved) in ("convolution", "pointwise")

    def test_eager_starts_no_kernel_of_this_project(self):
        for candidate in ("eager", "eager, channels-last"):
            assert not any(launches_of(candidate, "digits", 2, phase) for phase in ("eval", "train"))
        assert launches_of("this project", "digits", 2, "eval")

    def test_command(self):
        result = CliRunner().invoke(main, ["ledger", "--preset=digits", "--batch=128", "--phase=eval", "--json"])
        assert result.exit_code == 0, result.output
        ledgers = json.loads(result.output)
        assert [x["candidate"] for x in ledgers] == ["eager", "eager, channels-last", "this project"]
        assert all(x["total"]["flops"] == sum(c["flops"] for c in x["classes"].values()) for x in ledgers)
        text = CliRunner().invoke(main, ["ledger", "--preset=digits", "--batch=128", "--candidate=eager"]).output
        assert text.count("total") == 2 and "MB per image" in text and "resample eager" in text

    def test_unknown_preset(self):
        result = CliRunner().invoke(main, ["ledger", "--preset=digit"])
        assert result.exit_code == 1 and "did you mean digits" in result.output
