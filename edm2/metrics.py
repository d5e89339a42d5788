"""Metrics: numbers that images are measured by, against those of a dataset."""

import hashlib
import inspect
import math
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from edm2.data import Dataset, ImageDataset, read_parts
from edm2.dinov2 import large_features
from edm2.errors import UserError, check_name
from edm2.features import Features, SmallClassifier, SmallFeatures, told
from edm2.files import sha256
from edm2.frechet import Gaussian, Moments, frechet_distance
from edm2.image_files import ImageFiles
from edm2.inception import InceptionFeatures
from edm2.networks import CACHE
from edm2.references import Reference

SMALL = "frechet-small"
METRICS = "fid", "fd_dinov2", SMALL
AT_ONCE = 1024  # images of a dataset; features that are added to a Gaussian
PART = 2**25  # bytes of images that features are asked of together


class Metric(Protocol):
    """Called with images in parts, uint8 `[N, H, W, C]`, it returns a number; lower is better.

    `facts` is what its values depend on besides its name and the images.
    """

    name: str
    facts: dict[str, str]

    def __call__(self, images: Iterable[np.ndarray]) -> float: ...


class FrechetDistance:
    """Between images and all of a dataset's, or a reference's, by any features. UserError for features that are no finite numbers
    `[N, d]`, and for images of another `image_shape` (C, H, W), if that is known, as it is of a dataset."""

    def __init__(
        self,
        name: str,
        features: Features,
        reference: Dataset | Moments,
        facts: dict[str, str] | None = None,
        image_shape: tuple[int, ...] | None = None,
    ):
        self.name, self.facts, self.features, self.image_shape = name, facts or {}, features, image_shape
        if not isinstance(reference, Moments):
            self.image_shape = tuple(reference.image_shape)
            reference = self.gaussian(all_images(reference)).moments()
        self.reference = reference

    def __call__(self, images: Iterable[np.ndarray]) -> float:
        return self.distance(self.gaussian(images))

    def gaussian(self, images: Iterable[np.ndarray]) -> Gaussian:
        """Of the features of two images or more."""
        statistics = self.statistics()
        for part in images:
            statistics.add(part)
        return at_least_two(self.name, statistics.gaussian())

    def statistics(self) -> "Statistics":
        """Of no images yet."""
        return Statistics(self.name, self.features, self.image_shape)

    def distance(self, gaussian: Gaussian | Moments) -> float:
        """From the reference. UserError for features of another number, and where it is not finite."""
        try:
            return frechet_distance(gaussian, self.reference)
        except ValueError as e:
            why = "" if gaussian.mean.shape == self.reference.mean.shape else ": the reference is of other features"
            raise UserError(f"{self.name}: {e}{why}") from e


class Statistics:
    """The Gaussian of features of images that come in parts; with `image_shape` (C, H, W) of such images alone."""

    def __init__(self, name: str, features: Features, image_shape: tuple[int, ...] | None = None):
        self.name, self.features, self.image_shape = name, features, image_shape
        self._gaussian = Gaussian()
        self._waiting: list[np.ndarray] = []

    def add(self, images: np.ndarray) -> None:
        """uint8 `[N, H, W, C]`. UserError for features that are none, and images of another shape."""
        if len(images):
            height, width, channels = images.shape[1:]
            check_shape(self.image_shape, (channels, height, width), "these images are")
            self._waiting.append(self._checked(images))
        if sum(map(len, self._waiting)) >= AT_ONCE:
            self._flush()

    def gaussian(self) -> Gaussian:
        """Of all so far."""
        self._flush()
        return self._gaussian

    def _checked(self, images: np.ndarray) -> np.ndarray:
        """Each image's features, `[N, d]`."""
        try:
            found = np.asarray(self.features(images))
        except (UserError, MemoryError):
            raise
        except Exception as e:  # a function of the user's own raises anything
            reason = (str(e).splitlines() or [""])[0][:200]
            raise UserError(f"{self.name} failed for uint8 images {list(images.shape)}: {type(e).__name__}: {reason}") from e
        fine = found.ndim == 2 and len(found) == len(images) and found.dtype.kind in "fiu"
        if not fine or self._waiting and found.shape[1] != self._waiting[-1].shape[1]:
            kind = "" if found.dtype.kind in "fiu" else f" of {found.dtype}"
            raise UserError(f"{self.name}: features: expected [N, d], got {list(found.shape)}{kind} for {len(images)} images")
        return found

    def _flush(self) -> None:
        """Many at a time: adding some costs about as much as adding a thousand."""
        if self._waiting:
            waiting, self._waiting = np.concatenate(self._waiting), []
            try:
                self._gaussian.add(waiting)
            except ValueError as e:
                raise UserError(f"{self.name}: {e}") from e


def at_least_two(name: str, gaussian: Gaussian) -> Gaussian:
    """UserError for fewer images: they have no covariance."""
    if gaussian.count < 2:
        raise UserError(f"{name} needs at least two images, got {gaussian.count}")
    return gaussian


def check_metrics(names: Iterable[str]) -> None:
    """UserError for one that is neither known nor `package.module:function`."""
    for name in names:
        if ":" not in name:
            check_name("metric", name, METRICS)


def open_features(
    name: str, device: torch.device | str = "cpu", networks: str | Path = CACHE, classifier: SmallClassifier | None = None
) -> tuple[Features, str]:
    """Of a metric, and a checksum of what makes them. Weights of `fid` and `fd_dinov2` are kept in `networks`; `classifier` is that of
    `frechet-small`. UserError for what is missing or unknown."""
    check_metrics([name])
    if ":" in name:
        return _imported(name)
    if name == SMALL:
        if classifier is None:
            raise UserError("frechet-small needs the classifier of its dataset, which the reference does not hold")
        return SmallFeatures(classifier, device), ""
    features = InceptionFeatures(networks, device) if name == "fid" else large_features(networks, device)
    return features, features.checksum[:16]


def _imported(name: str) -> tuple[Features, str]:
    """`package.module:function`, and the checksum of its file."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as e:  # it is a program of the user's
        raise UserError(f"{name} cannot be imported: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}") from e
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{name}: {module_name} has no function {attribute!r}")
    try:
        return function, sha256(inspect.getfile(module))[:16]
    except TypeError:  # built in
        return function, ""


def check_features(reference: Reference, name: str, checksum: str) -> None:
    """UserError if the reference was made with other weights of this metric's network."""
    made = reference.checksum(name)
    if made and checksum and made != checksum and ":" not in name:
        raise UserError(f"{reference.name} was made with other weights of {name} than those here: {made!r} and {checksum!r}")


def check_shape(known: tuple[int, ...] | None, shape: tuple[int, ...], these: str) -> None:
    """UserError if images (C, H, W) are of another shape than those of the reference: nothing is resized."""
    if known is not None and tuple(known) != tuple(shape):
        there, here = (told(*size, channels) for channels, *size in (known, shape))
        raise UserError(f"{these} of {here}, and those of the reference of {there}: give a reference of such images")


def check_pixels(dataset: Dataset, name: str | Path) -> None:
    """UserError for a dataset of latents."""
    if dataset.dtype != np.uint8:
        raise UserError(f"{name} holds latents, and metrics measure pixels: `dataset decode` makes those, or sample.py without --latents")


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


def all_images(dataset: Dataset) -> Iterator[np.ndarray]:
    """In parts of some MiB, uint8 `[N, H, W, C]`."""
    return read_parts(dataset, parts_of(dataset), workers=0)


def parts_of(dataset: Dataset) -> list[range]:
    """Their indices."""
    most = PART // math.prod(dataset.image_shape)
    return list(_parts(len(dataset), max(1, min(AT_ONCE, most))))


def _parts(n: int, most: int = AT_ONCE) -> Iterator[range]:
    return (range(start, min(start + most, n)) for start in range(0, n, most))
