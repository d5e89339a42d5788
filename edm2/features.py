"""Features of small images, by a small classifier that is trained on the dataset itself: nothing is downloaded.

They are meant for images of a few thousand pixels in a few classes, to compare networks of one run. Their distances mean
nothing beside those of another dataset, or of another training of the classifier.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edm2.data import Dataset, data_order
from edm2.errors import UserError
from edm2.files import replacing

Features = Callable[[np.ndarray], np.ndarray]  # images uint8 `[N, H, W, C]` → float `[N, d]`

WIDTH = 64  # features
SIZES = 4, 64  # pixels of a side, at least and at most
STEPS, BATCH, LR = 300, 128, 4e-3  # with Adam; the digits are seen 21 times
AT_ONCE, FEW, SCALED = 512, 64, 4096  # images evaluated together, by large networks, and those that the scale is taken from


class SmallClassifier(nn.Module):
    """Convolutions at full, half, … resolution down to 2 or 3 pixels. The features are the means of the last one's channels."""

    def __init__(self, image_shape: tuple[int, ...], classes: int):
        super().__init__()
        self.image_shape = tuple(image_shape)
        channels, *size = image_shape
        levels = int(math.log2(min(size)))
        widths = [channels, 32, *[WIDTH] * (levels - 1)]
        self.convs = nn.ModuleList(nn.Conv2d(cin, cout, 3, padding=1) for cin, cout in zip(widths, widths[1:]))
        self.out = nn.Linear(WIDTH, classes)
        self.register_buffer("scale", torch.ones([]))  # of the features, without effect on the logits

    def features(self, x: Tensor) -> Tensor:
        """uint8 `[N, C, H, W]` → `[N, WIDTH]`, scaled."""
        return self._means(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """uint8 `[N, C, H, W]` → logits `[N, classes]`."""
        return self.out(self._means(x))

    def _means(self, x: Tensor) -> Tensor:
        x = x.float() / 127.5 - 1
        for i, conv in enumerate(self.convs):
            x = F.silu(conv(F.avg_pool2d(x, 2) if i else x))
        return x.mean(dim=(2, 3))


def told(height: int, width: int, channels: int) -> str:
    """An image's size in words."""
    return f"{width}x{height} with {channels} channel{'s' * (channels > 1)}"


def rgb(images: np.ndarray, device: torch.device | str) -> Tensor:
    """uint8 `[N, H, W, C]` → uint8 `[N, 3, H, W]` on the device; grey becomes three channels alike. UserError for other channels."""
    channels = images.shape[3]
    if channels not in (1, 3):
        raise UserError(f"images of {told(*images.shape[1:])}; this metric takes grey and RGB")
    return torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(0, 3, 1, 2).expand(-1, 3, -1, -1)


def in_parts(evaluate: Callable[[np.ndarray], Tensor], images: np.ndarray) -> np.ndarray:
    """Of images `[N, …]`, few at a time: a large network has room for no more."""
    parts = (images[start : start + FEW] for start in range(0, len(images), FEW))
    return np.concatenate([evaluate(part).cpu().numpy() for part in parts])


class SmallFeatures:
    """`Features` of a classifier."""

    def __init__(self, net: SmallClassifier, device: torch.device | str = "cpu"):
        self.net, self.device = net.to(device).eval(), device

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        """uint8 `[N, H, W, C]` → fp32 `[N, WIDTH]`. UserError for images of other sizes than those it was trained on."""
        channels, *size = self.net.image_shape
        if images.shape[1:] != (*size, channels):
            raise UserError(f"frechet-small: its classifier is for images of {told(*size, channels)}, not {told(*images.shape[1:])}")
        parts = torch.from_numpy(images).permute(0, 3, 1, 2).split(AT_ONCE)
        return np.concatenate([self.net.features(part.to(self.device)).cpu().numpy() for part in parts])


def check_measurable(dataset: Dataset, name: str | Path) -> None:
    """UserError if no small classifier can be trained on these images."""
    channels, height, width = dataset.image_shape
    if dataset.dtype != np.uint8:
        raise UserError(f"{name} holds latents, and this metric measures pixels")
    if not SIZES[0] <= min(height, width) <= max(height, width) <= SIZES[1]:
        raise UserError(f"{name} holds images of {width}x{height}, and this metric is for sides of {SIZES[0]} to {SIZES[1]} pixels")
    if dataset.label_dim < 2:
        raise UserError(f"{name} has no labels, or but one: this metric trains a classifier of its images")


def train_classifier(dataset: Dataset, seed: int = 0) -> SmallClassifier:
    """Of a dataset's images by their labels, on the CPU: the same each time with one number of threads. UserError for images
    that cannot be read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = SmallClassifier(dataset.image_shape, dataset.label_dim)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS)
    for step in range(STEPS):
        indices = data_order(len(dataset), seed, step * BATCH, BATCH)
        labels = torch.from_numpy(dataset.labels(indices).argmax(axis=1))
        loss = F.cross_entropy(net(torch.from_numpy(dataset.images(indices))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return _scaled(net.eval(), torch.from_numpy(dataset.images(data_order(len(dataset), seed, 0, min(len(dataset), SCALED)))))


@torch.no_grad()
def _scaled(net: SmallClassifier, images: Tensor) -> SmallClassifier:
    """So that the features of these images have variance 1, in the mean over features."""
    net.scale /= net.features(images).var(dim=0).mean().sqrt()
    return net


def save_classifier(path: str | Path, net: SmallClassifier, facts: dict[str, str]) -> None:
    """As a safetensors file with these facts in its header; it appears only when complete. UserError if it cannot be written."""
    with replacing(path) as temporary:
        try:
            save_file(net.state_dict(), temporary, facts)
        except safetensors.SafetensorError as e:  # its form of OSError
            raise UserError(f"cannot write {path}: {e}") from e


def load_classifier(path: str | Path, image_shape: tuple[int, ...], classes: int, facts: dict[str, str]) -> SmallClassifier | None:
    """One that was saved with these facts; None where there is none, it has others, or is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if file.metadata() != facts:
                return None
        net = SmallClassifier(image_shape, classes)
        net.load_state_dict(load_file(path))
        return net.eval()
    except (OSError, RuntimeError, safetensors.SafetensorError):
        return None
