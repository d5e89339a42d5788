"""The baselines equal the project, and the ledger counts what is run."""

import json
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import edm2
from bench.__main__ import main
from bench.baseline import Baseline, BaselineOptimizer
from bench.case import Case
from bench.ledger import Entry, Recorder, count
from bench.library import conv_shapes
from bench.runner import run_cases
from tests.conftest import relative_error, tiny_net


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

    def test_wrong_and_failing_candidates_have_no_speed(self, tmp_path):
        def fail():
            raise RuntimeError("out of luck\nand more")

        case = self.case(good=lambda: torch.ones(3), off=lambda: torch.ones(3) * 1.01, nan=lambda: torch.ones(3) / 0 * 0, bad=fail)
        (result,) = run_cases([case], tmp_path, budget=60, runs=3)
        facts = result["candidates"]
        assert "median" in facts["good"] and facts["bad"] == {"failure": "out of luck"}
        assert all("median" not in facts[name] and "error" in facts[name]["failure"] for name in ("off", "nan"))

    def test_budget(self, tmp_path):
        slow = self.case(a=lambda: time.sleep(0.1))
        assert len(run_cases([slow, slow], tmp_path, budget=0.2, runs=3)) == 1

    def test_rehearsal(self, tmp_path, monkeypatch):
        """Every kind of case, and equal losses, on small sizes."""
        monkeypatch.chdir(tmp_path)
        for command in ("kernels", "block", "train", "sample", "optimizer"):
            result = CliRunner().invoke(main, [command, "--dry-run"])
            assert result.exit_code == 0 and "failure" not in result.output and "above" not in result.output, result.output
        stored = [json.loads(path.read_text()) for path in (tmp_path / "out" / "rehearsal").iterdir()]
        assert {case["group"] for case in stored} == {"kernels", "block", "train", "sample", "optimizer"}
        failures = {f"{case['case']} {name}": f["failure"] for case in stored for name, f in case["candidates"].items() if "failure" in f}
        assert not failures
        parts = next(case for case in stored if case["group"] == "train")["candidates"]["edm2"]["parts"]
        assert parts.keys() == {"forward", "backward", "optimizer"} and min(parts.values()) > 0

    def test_convolutions_of_the_published_network(self):
        """92.94 G of 100.8 G multiply-adds are 3×3 convolutions."""
        shapes = conv_shapes("edm2-img512-s").items()
        assert sum(count * res**2 * a * b * 9 for (res, a, b, k), count in shapes if k == 3) == pytest.approx(92.94e9, rel=1e-4)


class TestLedger:
    """Totals of EDM2-S at batch 256, pinned: a pass over memory that comes or goes shows here."""

    @pytest.mark.parametrize(
        ("candidate", "phase", "launches", "gigabytes"),
        [
            ("eager", "eval", 1846, 230.1),
            ("eager", "train", 7715, 770.3),
            ("this project", "eval", 1608, 236.6),
            ("this project", "train", 6096, 733.8),
        ],
    )
    def test_edm2_s(self, candidate, phase, launches, gigabytes):
        ledger = count(candidate, "edm2-img512-s", 256, phase)
        assert ledger.total.launches == pytest.approx(launches, rel=0.02)  # versions of PyTorch differ by a few
        assert ledger.total.bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)
        multiply_adds = 100.819e9 * 256 * (1 if phase == "eval" else 3)
        assert ledger.total.flops / 2 == pytest.approx(multiply_adds, rel=5e-3)
        assert (ledger.saved > 0) == (phase == "train")

    def test_command(self):
        result = CliRunner().invoke(main, ["ledger", "--preset=digits", "--batch=128", "--phase=eval", "--json"])
        assert result.exit_code == 0, result.output
        ledgers = json.loads(result.output)
        assert [x["candidate"] for x in ledgers] == ["eager", "eager, channels-last", "this project"]
        assert all(x["total"]["flops"] == sum(c["flops"] for c in x["classes"].values()) for x in ledgers)
        text = CliRunner().invoke(main, ["ledger", "--preset=digits", "--batch=128", "--candidate=eager"]).output
        assert text.count("total") == 2 and "MB per image" in text and "cosine_attention eager" in text

    def test_unknown_preset(self):
        result = CliRunner().invoke(main, ["ledger", "--preset=digit"])
        assert result.exit_code == 1 and "did you mean digits" in result.output
