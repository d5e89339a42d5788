"""The ledger counts what is run."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import edm2
from bench import counted
from bench.__main__ import main
from bench.baseline import Baseline, BaselineOptimizer
from bench.ledger import CANDIDATES, Entry, Recorder, count, fake_network, inputs_for, launches_of
from bench.models import make_inputs, make_network
from edm2.backends import full_precision
from edm2.summary import saved_bytes

ROOT = Path(__file__).parent.parent


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
