"""The loss of images that a run does not train on, with noise that never changes: its course shows when a network overfits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edm2.backends import to_device
from edm2.data import Dataset
from edm2.diagnostics import NoiseLevels
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.generate import SeedGenerators
from edm2.latents import Encoder
from edm2.loss import EDM2Loss
from edm2.network import Precond

IMAGES = 1024  # at most: of a larger set these, evenly spaced


class HeldOut:
    """Images of `dataset`, of the kind that `net` is trained on. UserError for others.

    Each has its own noise, and a noise level: those of the training distribution at equal distances of probability. The
    processes share the images.
    """

    def __init__(self, dataset: Dataset, net: Precond, encoder: Encoder, losses: Callable[..., Tensor], loss: EDM2Loss,
                 levels: NoiseLevels, procs: Processes, at_once: int):  # fmt: skip
        if dataset.label_dim > net.label_dim:
            raise UserError(f"the held-out images know {dataset.label_dim} labels, those to train on {net.label_dim}")
        self.net, self.encoder, self.losses, self.loss, self.levels, self.procs = net, encoder, losses, loss, levels, procs
        count = min(len(dataset), IMAGES)
        self.sigma = loss.sigma(torch.special.ndtri((torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 0.5) / count))
        mine = range(procs.rank, count, procs.world_size)
        self.parts = [list(mine[start : start + at_once]) for start in range(0, len(mine), at_once)]
        indices = np.linspace(0, len(dataset) - 1, count).round().astype(np.int64)
        self.images = [torch.from_numpy(dataset.images(indices[part])) for part in self.parts]
        self.labels = [torch.from_numpy(dataset.labels(indices[part])) for part in self.parts]

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """The mean loss of all processes' images, and means by noise level. The network is evaluated without dropout, and left as
        it was."""
        was_training = self.net.training
        self.net.eval()
        for part, images, labels in zip(self.parts, self.images, self.labels):
            self._add(part, to_device(images, self.procs.device), to_device(labels, self.procs.device))
        self.net.train(was_training)
        found = self.levels.take()
        weighted = [n * loss for n, loss in zip(found["images"], found["loss"]) if n and loss is not None]
        mean = sum(weighted) / sum(found["images"])
        return {"Loss/held_out": mean if math.isfinite(mean) else None, "Loss/held_out_by_noise_level": found}

    def _add(self, part: list[int], images: Tensor, labels: Tensor) -> None:
        random = SeedGenerators(part, self.procs.device)
        shape = self.net.img_channels, self.net.img_resolution, self.net.img_resolution
        noise, normal = random.randn(*shape), random.randn(*shape) if self.encoder.draws_noise else None
        sigma = to_device(self.sigma[part].reshape(-1, 1, 1, 1), self.procs.device)
        labels = F.pad(labels, (0, self.net.label_dim - labels.shape[1]))
        loss = self.losses(self.net, self.encoder.encode(images, normal), sigma, noise * sigma, labels, self.loss.sigma_data)
        self.levels.add(self.net, sigma, loss.mean(dim=(1, 2, 3)))
