"""Training by this project against the plain network in fp32: the same data, the same draws, both losses step by step."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.baseline import Baseline, BaselineOptimizer, UnpreparedWeights
from bench.case import OWN_COMPILED, Candidates, Case, data_size
from edm2.config import TrainingConfig
from edm2.data import ArrayDataset
from edm2.distributed import Processes
from edm2.latents import encoder_for
from edm2.loss import denoising_loss
from edm2.presets import get_preset
from edm2.trainer import Trainer

GOAL = 0.005  # of the loss over the last steps
LAST = 100  # steps
IMAGES, KINDS, MODES = 1024, 10, 4  # of the synthetic data: how many, classes among them, cosines along an axis
SHARES = {"class": 0.5, "image": 0.5, "white": 0.5**0.5}  # of the standard deviation; their squares make 1


def equivalence_case(
    preset: str, batch: int, steps: int = 1000, *, compiled: bool = True, limit: float = 0.0, needs_gpu: bool = True
) -> Case:
    """Losses of `steps` steps of `edm2.training.Trainer`: its own, compiled as on a GPU or not, and of the plain network in fp32.

    Compared are the means over the last steps. Nothing is timed.
    """

    def build(device: torch.device) -> Candidates:
        dataset, procs = synthetic(preset), Processes(0, 1, device)
        config = configuration(preset, batch, steps)
        own = partial(Trainer, config(fp16=True, compile=compiled), procs, dataset)
        plain = partial(PlainTrainer, config(fp16=False, compile=False), procs, dataset)
        return {"eager": _Run(plain, steps), OWN_COMPILED if compiled else "edm2": _Run(own, steps)}

    facts = {"preset": preset, "batch": batch, "steps": steps, "last": min(LAST, steps)}
    name = f"equivalence/{preset}/n{batch}"
    return Case(name, build, images=batch, facts=facts, tolerance=GOAL, needs_gpu=needs_gpu, timed=False, limit=limit)


def configuration(preset: str, batch: int, steps: int) -> Callable[..., TrainingConfig]:
    """The preset's, for a short run of small batches: its rate falls with the root of the batch and is reached after a tenth.

    Without dropout, whose masks would not be the same.
    """
    row, images = get_preset(preset), steps * batch
    rate = row.lr * math.sqrt(batch / row.batch)
    never = dict.fromkeys(("status", "snapshot", "checkpoint"), 0)
    run = dict(outdir="", data="", preset=preset, batch=batch, duration=images, lr=rate, rampup_Mimg=images / 10 / 1e6, dropout=0.0)
    return partial(TrainingConfig, **run, **never)


def synthetic(preset: str) -> ArrayDataset:
    """What the preset's network can learn in part: smooth fields, of a class and of an image, and white noise.

    The noise keeps the loss, which contains a logarithm, well above 0, where a relative difference would say nothing.
    """
    resolution, channels, classes = data_size(preset)
    kinds = min(KINDS, classes)
    labels = torch.arange(IMAGES) % kinds
    generator = torch.Generator().manual_seed(0)
    of_class, of_image = (_fields(n, channels, resolution, generator) for n in (kinds, IMAGES))
    white = torch.randn(of_image.shape, generator=generator)
    images = SHARES["class"] * of_class[labels] + SHARES["image"] * of_image + SHARES["white"] * white
    stored = (8, np.dtype(np.float32)) if channels == 4 else (channels, np.dtype(np.uint8))
    arrays = encoder_for(*stored)[0].decode(images / 2)
    if channels == 4:
        arrays = torch.cat([arrays, torch.zeros_like(arrays)], dim=1)  # means and standard deviations
    return ArrayDataset(arrays.numpy(), F.one_hot(labels, classes).float().numpy())


def _fields(n: int, channels: int, resolution: int, generator: torch.Generator) -> Tensor:
    """`[n, channels, resolution, resolution]`: sums of cosines with random amplitudes, of standard deviation 1."""
    places = (torch.arange(resolution) + 0.5) / resolution
    cosines = (torch.pi * torch.outer(torch.arange(MODES), places)).cos()
    fields = torch.einsum("ncij,ih,jw->nchw", torch.randn(n, channels, MODES, MODES, generator=generator), cosines, cosines)
    return fields / fields.std()


class PlainTrainer(Trainer):
    """The same loop around the network, the loss and the optimizer of `baseline.py`."""

    def __init__(self, config: TrainingConfig, procs: Processes, dataset: ArrayDataset):
        super().__init__(config, procs, dataset, loss=plain_loss)

    def _optimizer(self) -> tuple[UnpreparedWeights, BaselineOptimizer]:
        return UnpreparedWeights(self.net), BaselineOptimizer(self.net)


def plain_loss(net: torch.nn.Module, *draws: Any) -> Tensor:
    """`denoising_loss` in plain PyTorch."""
    return denoising_loss(Baseline(net), *draws)


class _Run:
    """Trains when it is called; returns the mean loss over the last steps. `record` is what else a result holds of it."""

    def __init__(self, make: Callable[[], Trainer], steps: int):
        self.make, self.steps, self.losses = make, steps, torch.empty(0)

    def __call__(self) -> Tensor:
        trainer = self.make()
        trainer.start()
        sums = torch.stack([trainer.step() for _ in range(self.steps)])
        self.losses = sums.double().cpu() / trainer.config.batch
        return self.losses[-LAST:].mean()

    def record(self) -> dict[str, Any]:
        """The loss of each step, and over the last; null where it is not finite."""
        numbers = [*self.losses.tolist(), self.losses[-LAST:].mean().item()]
        *losses, last = (float(f"{x:.6g}") if math.isfinite(x) else None for x in numbers)
        return {"loss": last, "losses": losses}
