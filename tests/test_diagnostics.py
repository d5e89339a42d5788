"""What a run tells of itself: loss by noise level, magnitudes by block, gradients, shares of the machine's peak."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import edm2
from edm2 import diagnostics, stats
from edm2.config import TrainingConfig
from edm2.diagnostics import NoiseLevels, gradient_norm, magnitudes
from edm2.distributed import Processes
from edm2.network import Block
from edm2.stats import StatusLog, read_stats
from tests.conftest import tiny_net

CPU = Processes(0, 1, torch.device("cpu"))


def inputs(n: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, n, 2, 8, 8, generator=generator)
    return images, torch.tensor([0.001, 0.03, 0.031, 2.0, 2.1, 200.0])[:n].reshape(-1, 1, 1, 1), noise, torch.eye(5)[torch.arange(n) % 5]


def test_loss_by_noise_level():
    """Against the definitions: the weighted error of the denoiser itself, u of its own head."""
    net, levels = tiny_net(), NoiseLevels(CPU)
    images, sigma, noise, labels = inputs()
    with torch.no_grad():
        loss = edm2.denoising_loss(net, images, sigma, noise * sigma, labels).mean(dim=(1, 2, 3))
        denoised, u = net(images + noise * sigma, sigma, labels, return_logvar=True)
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        error = (weight * (denoised - images) ** 2).mean(dim=(1, 2, 3))
    for part in (slice(0, 2), slice(2, 6)):  # rounds
        levels.add(net, sigma[part], loss[part])
    found = levels.take()
    bins = [i for i, images in enumerate(found["images"]) if images]
    assert [found["images"][i] for i in bins] == [1, 2, 2, 1] and bins[0] == 0 and bins[-1] == 21  # beyond either end: the last
    assert [found["sigma"][i] for i in bins[1:3]] == pytest.approx([0.03, 2.05], rel=0.3)
    for name, values in (("loss", loss), ("error", error), ("u", u.flatten())):
        expected = [values[0], values[1:3].mean(), values[3:5].mean(), values[5]]
        assert [found[name][i] for i in bins] == pytest.approx([float(x) for x in expected], rel=1e-4), name
    assert all(found["loss"][i] is None for i in range(22) if i not in bins)
    assert levels.take()["images"] == [0.0] * 22
    own = NoiseLevels(CPU, weighted=False)
    own.add(net, sigma, loss)
    assert own.take()["error"] == [None] * 22


def test_magnitudes():
    """Of each block what leaves it; the network stays as it was."""
    net = tiny_net(dropout=0.5).train()
    images, sigma, noise, labels = inputs()
    seen = {}
    blocks = {name: module for name, module in net.unet.named_modules() if isinstance(module, Block)}
    for name, block in blocks.items():
        block.register_forward_hook(lambda _, __, y, name=name: seen.update({name: y if isinstance(y, torch.Tensor) else y[0]}))
    state = torch.get_rng_state()
    found = magnitudes(net, images + noise * sigma, sigma, labels)
    assert torch.equal(torch.get_rng_state(), state) and net.training  # dropout would draw
    assert found.keys() == {"activations", "weights", "gains"} and all(each.keys() == blocks.keys() for each in found.values())
    for name, block in blocks.items():
        assert found["activations"][name] == pytest.approx(seen[name].square().mean().sqrt().item(), rel=1e-5)
        assert found["gains"][name] == block.emb_gain.item()
    edm2.force_weight_norm_(net)
    assert list(magnitudes(net, images, sigma, labels)["weights"].values()) == pytest.approx([0.9999] * len(blocks), abs=1e-5)
    with torch.no_grad():
        next(iter(blocks.values())).emb_gain.fill_(math.nan)
    assert next(iter(magnitudes(net, images, sigma, labels)["gains"].values())) is None


def test_gradient_norm():
    assert gradient_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]) == pytest.approx(5)
    assert gradient_norm([torch.tensor([math.inf])]) is None


def test_share_of_the_peak(tmp_path, monkeypatch):
    """6 operations per multiply-add, image and second, over all GPUs."""
    monkeypatch.setattr(stats, "peak_flops", lambda device: 1e12)
    log = StatusLog(tmp_path, CPU, 0, 100, 0.0, flops=6e9)
    assert log.share_of_peak == pytest.approx(0.006)
    line = log.tick(50, 0.1, {})
    assert line["Throughput/MFU"] == pytest.approx(line["Throughput/images_per_sec"] * 0.006)
    monkeypatch.setattr(stats, "peak_flops", lambda device: None)
    assert StatusLog(tmp_path, CPU, 0, 100, 0.0, flops=6e9).tick(50, 0.1, {})["Throughput/MFU"] is None


@pytest.fixture()
def config(tmp_path, digits_zip) -> TrainingConfig:
    return TrainingConfig(
        outdir=str(tmp_path / "run"), data=str(digits_zip), preset="digits", batch=16, duration=64, status=32, snapshot=0, checkpoint=0
    )


def test_status_lines_hold_them(config):
    """And change nothing of the run."""
    trainer = edm2.train(replace(config, batch_gpu=4))
    for line in read_stats(config.outdir):
        assert sum(line["Loss/by_noise_level"]["images"]) == 32 and line["Gradients/norm"] > 0 and line["Throughput/images_per_sec"] > 0
        activations = line["Magnitudes/activations"]
        assert len(activations) == len(trainer.net.unet.blocks()) and all(0.2 < x < 5 for x in activations.values())
        by_level = line["Loss/by_noise_level"]
        total = sum(n * loss for n, loss in zip(by_level["images"], by_level["loss"]) if n)
        assert total / 32 == pytest.approx(line["Loss/loss"], rel=1e-4)
    text = (Path(config.outdir) / "stats.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_few_images_are_looked_at(config, monkeypatch):
    sizes = []
    own = magnitudes
    monkeypatch.setattr("edm2.trainer.magnitudes", lambda net, x, *more: sizes.append(len(x)) or own(net, x, *more))
    edm2.train(replace(config, batch=32, status=64))
    edm2.train(replace(config, outdir=config.outdir + "2", status=64, batch=8))
    assert sizes == [16, 8] and diagnostics.EDGES.exp()[[0, -1]].tolist() == pytest.approx([0.002, 80])
