"""Trainings that should agree do, those that should not are told apart, and the verdict is on what was recorded."""

import json
import math
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import edm2
from bench import equivalence, training_goals
from bench.case import OWN_COMPILED, Case
from bench.equivalence import GOAL, PlainTrainer, configuration, equivalence_case, synthetic
from bench.isolated import Isolated
from bench.runner import run_cases
from edm2.distributed import Processes
from edm2.latents import encoder_for
from edm2.trainer import Trainer
from tests.conftest import relative_error

CPU, BATCH, STEPS = torch.device("cpu"), 8, 16


@pytest.fixture(scope="module")
def plain() -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the plain network's training: the last mean, and each."""
    run = equivalence_case("digits", BATCH, STEPS).build(CPU)["eager"]
    return run(), run.losses


def trained(trainer: type = Trainer, loss=edm2.denoising_loss, **options) -> torch.Tensor:
    config = replace(configuration("digits", BATCH, STEPS)(compile=False), **options)
    make = partial(trainer, config, Processes(0, 1, CPU), synthetic("digits"), **({"loss": loss} if trainer is Trainer else {}))
    return equivalence._Run(make, STEPS)()


class TestLosses:
    def test_each_step_agrees(self, plain):
        last, losses = plain
        run = equivalence_case("digits", BATCH, STEPS, compiled=False).build(CPU)["edm2"]
        assert relative_error(run(), last) < 1e-6 and relative_error(run.losses, losses) < 1e-6
        assert losses[0] > 0.9 and losses[-8:].mean() < losses[:8].mean()

    @pytest.mark.parametrize(
        "fault",
        [
            {"seed": 1},
            {"P_mean": -0.7},
            {"lr": configuration("digits", BATCH, STEPS)().lr * 2},
            {"loss": lambda net, y, sigma, noise, labels, sigma_data: edm2.denoising_loss(net, y, sigma, noise, labels, 0.52)},
            {"loss": lambda *arguments: edm2.denoising_loss(*arguments) * 1.01},
        ],
        ids=["other draws", "other noise levels", "other rate", "other weight", "scaled"],
    )
    def test_a_fault_exceeds_the_bound(self, plain, fault):
        assert relative_error(trained(**fault), plain[0]) > GOAL

    def test_the_bound_is_that_of_the_case(self, plain, tmp_path):
        """A run that is off is reported so, with its curve."""
        runs = {"eager": lambda: plain[0], "edm2": equivalence_case("digits", BATCH, STEPS, compiled=False).build(CPU)["edm2"]}
        case = replace(equivalence_case("digits", BATCH, STEPS), build=lambda device: runs, needs_gpu=False)
        runs["edm2"].make = partial(Trainer, configuration("digits", BATCH, STEPS)(seed=1), Processes(0, 1, CPU), synthetic("digits"))
        (result,) = run_cases([case], tmp_path, budget=60)
        facts = json.loads((tmp_path / "equivalence_digits_n8.json").read_text())["candidates"]["edm2"]
        assert facts == result["candidates"]["edm2"] and facts["failure"].startswith("error") and facts["error"] > GOAL
        assert len(facts["losses"]) == STEPS and facts["loss"] == pytest.approx(np.mean(facts["losses"]), rel=1e-5)

    def test_the_last_hundred(self):
        class Steps:
            config = configuration("digits", 2, 300)()
            start, losses = staticmethod(lambda: None), iter(torch.arange(300.0))

            def step(self):
                return next(self.losses) * 2

        run = equivalence._Run(Steps, 300)
        assert run() == 249.5 and run.record()["loss"] == 249.5 and run.record()["losses"][200] == 200

    def test_what_is_not_finite_is_null(self):
        run = equivalence._Run(None, 2)
        run.losses = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
        assert run.record() == {"loss": None, "losses": [1.0, None, None]}


class TestCase:
    def test_as_train_does_against_the_plain_network_in_fp32(self):
        """Compiled and in fp16 where there is a GPU; the other neither, with fp32 weights of its own."""
        plain, own = (run.make() for run in equivalence_case("digits", 4).build(CPU).values())
        assert (own._compiles, own.net.use_fp16) == (True, True) and type(own) is Trainer
        assert (plain._compiles, plain.net.use_fp16) == (False, False) and type(plain) is PlainTrainer
        assert own.config.lr == plain.config.lr and own.config.dropout == 0 and own.config.seed == plain.config.seed
        assert all(torch.equal(a, b) and a is not b for a, b in zip(own.net.parameters(), plain.net.parameters()))

    def test_the_plain_training_is_none_of_this_project(self, monkeypatch):
        """Or it would be compared with itself."""
        plain, own = (run.make() for run in equivalence_case("digits", 4, 2, compiled=False).build(CPU).values())
        for place in ("edm2.network.Precond.forward", "edm2.optimizer.EDM2Optimizer.step", "edm2.weights.StepWeights.prepared"):
            with monkeypatch.context() as patched:
                patched.setattr(place, None)
                for trainer in (plain, own):
                    trainer.start()
                plain.step()
                with pytest.raises(TypeError, match="not callable"):
                    own.step()

    @pytest.mark.parametrize(("preset", "shape"), [("digits", (1, 8, 8)), ("edm2-img512-xxs", (4, 64, 64)), ("edm2-img64-xs", (3, 64, 64))])
    def test_data(self, preset, shape):
        """Of the standard deviation that networks expect; a quarter of the variance is the class."""
        dataset, indices = synthetic(preset), np.arange(500)
        images, labels = dataset.images(indices), dataset.labels(indices)
        assert np.array_equal(images[:1], synthetic(preset).images([0])) and labels.shape[1] == (10 if preset == "digits" else 1000)
        encoder, channels = encoder_for(images.shape[1], images.dtype)
        encoded = encoder.encode(torch.from_numpy(images), torch.randn(len(images), *shape))
        assert encoded.shape[1:] == shape and channels == shape[0] and encoded.std() == pytest.approx(0.5, rel=0.1)
        means = torch.stack([encoded[labels.argmax(axis=1) == i].mean(dim=0) for i in range(10)])
        assert 0.15 < means.var() / encoded.var() < 0.35


class TestRunner:
    def test_what_is_not_timed_runs_once(self, tmp_path, capsys):
        runs = []

        class Run:
            def __call__(self):
                runs.append(0)
                return torch.ones(1)

            def record(self):
                return {"loss": 1.0}

        case = Case("equivalence/x", lambda device: {"a": Run(), "b": Run()}, needs_gpu=False, timed=False)
        (result,) = run_cases([case], tmp_path, budget=60)
        assert len(runs) == 2 and result["candidates"]["b"] == {"error": 0.0, "tolerance": 0.02, "loss": 1.0}
        assert "equivalence/x  a error 0.00e+00 | b error 0.00e+00" in capsys.readouterr().out

    def test_a_case_may_take_longer_than_others(self, tmp_path):
        (case,) = patient()
        with Isolated(patient, limit=0.1, deadline=time.monotonic() + 60) as isolated:
            (result,) = run_cases([case], tmp_path, budget=60, run=isolated)
        assert result["candidates"]["good"]["error"] == 0


def patient():
    """A case of more than a tenth of a second; the test's own process imports this."""
    yield Case("equivalence/slow", lambda device: {"good": lambda: torch.ones(3)}, needs_gpu=False, timed=False, limit=50)


def result(eager: dict, ours: dict, name: str = OWN_COMPILED, **facts) -> dict:
    """As the runner writes it."""
    head = {"case": "equivalence/digits/n32", "group": "equivalence", "dtype": "float16", "preset": "digits", "batch": 32}
    return head | {"steps": 1000, "last": 100, "candidates": {"eager": eager, name: ours}} | facts


class TestVerdict:
    @pytest.mark.parametrize(
        ("eager", "ours", "cells"),
        [
            ({"loss": 0.5}, {"loss": 0.502, "error": 0.004}, ["0.50000", "0.50200 (edm2 compiled, float16)", "0.4%", "≤ 0.5%: reached"]),
            (
                {"loss": 0.5},
                {"loss": 0.503, "error": 0.006, "failure": "error 6.00e-03 above 0.005"},
                ["0.50000", "0.50300 (edm2 compiled, float16)", "0.6%", "≤ 0.5%: missed"],
            ),
            (
                {"loss": 0.5},
                {"loss": 0.5, "error": 0.0, "failure": "op conv fell back: a | b"},
                ["0.50000", "0.50000 (edm2 compiled, float16)", "0%", r"≤ 0.5%: failed: op conv fell back: a \| b"],
            ),
            (
                {"failure": "CUDA out of memory"},
                {"loss": 0.5, "error": 0.0},  # of itself: nothing else was there to compare it with
                ["unmeasured", "0.50000 (edm2 compiled, float16)", "unmeasured", "≤ 0.5%: failed: CUDA out of memory"],
            ),
            (
                {"loss": 0.5},
                {"loss": None, "error": None, "failure": "error inf above 0.005"},
                ["0.50000", "unmeasured (edm2 compiled, float16)", "unmeasured", "≤ 0.5%: failed: error inf above 0.005"],
            ),
        ],
        ids=["reached", "missed", "fell back", "nothing to compare with", "not finite"],
    )
    def test_is_on_what_was_recorded(self, eager, ours, cells):
        ours = {"tolerance": GOAL, **ours}
        (row,) = training_goals.equivalence([result(eager, ours)])[1]
        assert row == ["digits, batch 32, last 100 of 1,000 steps", *cells]
