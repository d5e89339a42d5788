"""Metrics: numbers that images are measured by, against those of a dataset."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from edm2.data import Dataset, ImageDataset
from edm2.errors import UserError
from edm2.features import Features, SmallFeatures, check_measurable, load_classifier, save_classifier, train_classifier
from edm2.files import make_folder, sha256
from edm2.frechet import Gaussian, frechet_distance
from edm2.image_files import ImageFiles

AT_ONCE = 1024  # images of a dataset
IN_MEMORY = 2**30  # bytes of a dataset that is decoded once


class Metric(Protocol):
    """Called with images in parts, uint8 `[N, H, W, C]`, it returns a number; lower is better.

    `facts` is what its values depend on besides its name and the images.
    """

    name: str
    facts: dict[str, str]

    def __call__(self, images: Iterable[np.ndarray]) -> float: ...


class FrechetDistance:
    """Between images and all of a dataset's, by any features. UserError for features that are no finite numbers `[N, d]`."""

    def __init__(self, name: str, features: Features, dataset: Dataset, facts: dict[str, str] | None = None):
        self.name, self.facts, self.features = name, facts or {}, features
        self.reference = self.gaussian(_all_images(dataset))

    def __call__(self, images: Iterable[np.ndarray]) -> float:
        return frechet_distance(self.gaussian(images), self.reference)

    def gaussian(self, images: Iterable[np.ndarray]) -> Gaussian:
        """Of the features of two images or more."""
        gaussian = Gaussian()
        for part in images:
            features = self.features(part)
            try:
                gaussian.add(features)
            except ValueError as e:
                raise UserError(f"{self.name}: {e}") from e
        if gaussian.count < 2:
            raise UserError(f"{self.name} needs at least two images, got {gaussian.count}")
        return gaussian


def frechet_small(dataset: Dataset, folder: Path, device: torch.device | str) -> FrechetDistance:
    """By features of a small classifier of this dataset, which is trained once and kept in `folder`. UserError where it cannot be:
    see `check_measurable`."""
    check_measurable(dataset, getattr(dataset, "path", "the dataset"))
    if dataset.nbytes <= IN_MEMORY:
        dataset.load()
    data = fingerprint(dataset)
    path = make_folder(folder) / f"features-{data[:8]}.safetensors"
    net = load_classifier(path, dataset.image_shape, dataset.label_dim, {"data": data})
    if net is None:
        net = train_classifier(dataset)
        save_classifier(path, net, {"data": data})
    return FrechetDistance("frechet-small", SmallFeatures(net, device), dataset, {"data": data, "features": sha256(path)[:16]})


METRICS: dict[str, Callable[[Dataset, Path, torch.device | str], Metric]] = {"frechet-small": frechet_small}


def open_labelled(path: str | Path) -> ImageDataset:
    """A dataset with its labels, if it has any."""
    return ImageDataset(path, use_labels=ImageFiles(path).labels() is not None)


def fingerprint(dataset: Dataset) -> str:
    """A checksum of all images and labels, in their order."""
    digest = hashlib.sha256(f"{tuple(dataset.image_shape)} {dataset.dtype} {dataset.label_dim}".encode())
    for indices in _parts(len(dataset)):
        digest.update(np.ascontiguousarray(dataset.images(indices)))
        digest.update(np.ascontiguousarray(dataset.labels(indices)))
    return digest.hexdigest()[:16]


def _all_images(dataset: Dataset) -> Iterator[np.ndarray]:
    return (np.ascontiguousarray(dataset.images(indices).transpose(0, 2, 3, 1)) for indices in _parts(len(dataset)))


def _parts(n: int) -> Iterator[range]:
    return (range(start, min(start + AT_ONCE, n)) for start in range(0, n, AT_ONCE))
