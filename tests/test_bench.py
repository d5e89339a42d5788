"""The baselines equal the project, and what runs the cases keeps its word."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import edm2
import kernels.fallback
from bench import cases
from bench.__main__ import main
from bench.baseline import Baseline, BaselineOptimizer
from bench.case import Case
from bench.convs import conv_shapes
from bench.models import compile_for, data_stream, train_case
from bench.runner import run_cases
from bench.sampling import sample_case
from tests.conftest import relative_error, tiny_net
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
