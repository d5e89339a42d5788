"""Metrics of datasets, of images on disk and of what networks make, shared by the processes that `torchrun` started.

Each process takes every n-th batch, so that batches are the same for any number of processes; the first merges their Gaussians and
computes. The result is that of one process, and does not depend on the size of batches, but for rounding.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edm2.data import Dataset, data_order, read_parts
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.features import Features, SmallClassifier, check_measurable, train_classifier
from edm2.frechet import Gaussian
from edm2.generate import ImageGenerator
from edm2.metrics import (
    IN_MEMORY,
    METRICS,
    SMALL,
    FrechetDistance,
    Statistics,
    at_least_two,
    check_features,
    check_metrics,
    check_pixels,
    open_features,
)
from edm2.networks import CACHE
from edm2.references import Reference
from edm2.samples import Progress

Values = dict[str, float]  # by metric


def make_reference(
    dataset: Dataset, metrics: Sequence[str], procs: Processes, networks: str | Path = CACHE, batch: int = 32, workers: int | None = None
) -> Reference | None:
    """Statistics of all images of a dataset, in the first process; None in the others.

    `frechet-small` trains its classifier of them, by their labels. `networks`: where the weights of `fid` and `fd_dinov2` are kept.
    UserError for latents, fewer than two images, metrics that are unknown or cannot be had, features that are not finite.
    """
    name = getattr(dataset, "path", "the dataset")
    check_metrics(metrics)
    check_pixels(dataset, name)
    if len(dataset) < 2:
        raise UserError(f"{name} holds one image, and statistics need two at least")
    classifier = _classifier(dataset, name, procs) if SMALL in metrics else None
    opened = {metric: open_features(metric, procs.device, networks, classifier) for metric in dict.fromkeys(metrics)}
    features = {metric: found for metric, (found, _) in opened.items()}
    gaussians = _of_indices(dataset, np.arange(len(dataset)), features, procs, batch, workers)
    if gaussians is None:
        return None
    checksums = {metric: checksum for metric, (_, checksum) in opened.items() if checksum}
    facts = {"dataset": Path(name).name, "images": len(dataset), "image_shape": list(dataset.image_shape), "features": checksums}
    return Reference({metric: gaussian.moments() for metric, gaussian in gaussians.items()}, facts, classifier)


def open_measures(reference: Reference, metrics: Sequence[str], procs: Processes, networks: str | Path = CACHE) -> list[FrechetDistance]:
    """Distances from the reference. UserError for metrics that it lacks, that are unknown, or that cannot be had."""
    check_metrics(metrics)
    measures = []
    for name, moments in {metric: reference.of(metric) for metric in metrics}.items():
        features, checksum = open_features(name, procs.device, networks, reference.classifier)
        check_features(reference, name, checksum)
        measures.append(FrechetDistance(name, features, moments, {"ref": reference.sha256, "features": checksum}))
    return measures


def metrics_of(reference: Reference) -> list[str]:
    """Those that need no one's program. UserError if there are none."""
    found = [metric for metric in METRICS if metric in reference.moments]
    if not found:
        raise UserError(f"name the --metrics: {reference.name} has statistics of {', '.join(reference.moments)}")
    return found


def measure_images(
    dataset: Dataset,
    measures: Sequence[FrechetDistance],
    procs: Processes,
    num: int,
    seed: int = 0,
    batch: int = 32,
    workers: int | None = None,
) -> Values | None:
    """Of `num` images of a dataset, of more than so many those that `seed` draws; None but in the first process.

    UserError for latents, and where there are fewer.
    """
    name = getattr(dataset, "path", "the dataset")
    check_pixels(dataset, name)
    if len(dataset) < num:
        raise UserError(f"{name} holds {len(dataset)} images, and --num asks for {num}: make more, or give --num={len(dataset)}")
    indices = np.sort(data_order(len(dataset), seed, 0, num)) if num < len(dataset) else np.arange(num)
    return _distances(measures, _of_indices(dataset, indices, _features(measures), procs, batch, workers))


def measure_network(
    generate: ImageGenerator,
    measures: Sequence[FrechetDistance],
    procs: Processes,
    seeds: Sequence[int],
    batch: int = 32,
    class_idx: Sequence[int] | None = None,
    **heun: Any,
) -> Values | None:
    """Of the images of `seeds`, which are made and not kept; None but in the first process.

    class_idx: classes to take in turn; None draws each image's class from its own seed. `heun`: see `edm2.edm_sampler`. UserError for
    classes that the network does not know, and for networks that make no pixels.
    """
    if not generate.encoder.makes_pixels:
        raise UserError("metrics measure pixels, and the network makes latents: give the VAE that decodes them")
    classes = generate.check_classes(None if class_idx is None else list(class_idx))
    mine = [i for part in _share(len(seeds), batch, procs) for i in part]
    own = classes and [classes[i % len(classes)] for i in mine]
    batches = generate([seeds[i] for i in mine], own or None, batch, **heun)
    return _distances(measures, _gaussians((made.images for made in batches), _features(measures), procs, len(mine)))


def _classifier(dataset: Dataset, name: str | Path, procs: Processes) -> SmallClassifier:
    """Trained by the first process, for all."""
    check_measurable(dataset, name)
    if dataset.nbytes <= IN_MEMORY:
        dataset.load()
    state = procs.share(train_classifier(dataset).state_dict() if procs.rank == 0 else None)
    net = SmallClassifier(dataset.image_shape, dataset.label_dim).eval()
    net.load_state_dict(state)
    return net


def _features(measures: Sequence[FrechetDistance]) -> dict[str, Features]:
    return {measure.name: measure.features for measure in measures}


def _of_indices(
    dataset: Dataset, indices: np.ndarray, features: dict[str, Features], procs: Processes, batch: int, workers: int | None
) -> dict[str, Gaussian] | None:
    share = _share(len(indices), batch, procs)
    return _gaussians(read_parts(dataset, (indices[part] for part in share), workers), features, procs, sum(map(len, share)))


def _share(total: int, batch: int, procs: Processes) -> list[range]:
    """This process's batches, as positions among all."""
    return [range(start, min(start + batch, total)) for start in range(0, total, batch)][procs.rank :: procs.world_size]


def _gaussians(parts: Iterable[np.ndarray], features: dict[str, Features], procs: Processes, total: int) -> dict[str, Gaussian] | None:
    """Of each metric's features of all processes' images, of which this one has `total`, in the first; None in the others."""
    statistics = [Statistics(name, each) for name, each in features.items()]
    with Progress(total, procs) as progress:
        for images in parts:
            for each in statistics:
                each.add(images)
            progress.update(len(images))
    gathered = procs.gather([each.gaussian() for each in statistics])
    return None if gathered is None else {name: _merged(name, found) for name, *found in zip(features, *gathered)}


def _merged(name: str, gaussians: list[Gaussian]) -> Gaussian:
    first, *others = gaussians
    for other in others:
        first.merge(other)
    return at_least_two(name, first)


def _distances(measures: Sequence[FrechetDistance], gaussians: dict[str, Gaussian] | None) -> Values | None:
    return None if gaussians is None else {measure.name: measure.distance(gaussians[measure.name]) for measure in measures}
