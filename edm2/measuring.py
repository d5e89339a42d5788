"""Metrics of datasets, of images on disk and of what networks make, shared by the processes that `torchrun` started.

Each process takes every n-th batch, so that batches are the same for any number of processes; the first merges their Gaussians and
computes. The result is that of one process, and does not depend on the size of batches, but for rounding. What is wrong with one's
images all hear of after a few batches, and the first tells it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from edm2.data import Dataset, ImageDataset, data_order, read_parts
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.features import (
    SmallClassifier,
    SmallFeatures,
    check_measurable,
    load_classifier,
    save_classifier,
    train_classifier,
)
from edm2.files import make_folder, sha256
from edm2.frechet import Gaussian, Moments
from edm2.generate import ImageGenerator
from edm2.metrics import (
    METRICS,
    SMALL,
    FrechetDistance,
    Statistics,
    at_least_two,
    check_features,
    check_metrics,
    check_pixels,
    check_shape,
    fingerprint,
    open_features,
    parts_of,
)
from edm2.networks import CACHE
from edm2.references import Reference
from edm2.samples import Progress

Values = dict[str, float]  # by metric
IN_MEMORY = 2**30  # bytes of a dataset that is decoded once
HEARD = 8  # batches of a process after which it hears of the others' errors


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
    statistics = [Statistics(metric, found) for metric, (found, _) in opened.items()]
    moments = _of_indices(dataset, np.arange(len(dataset)), statistics, procs, batch, workers)
    if moments is None:
        return None
    checksums = {metric: checksum for metric, (_, checksum) in opened.items() if checksum}
    facts = {"dataset": Path(name).name, "images": len(dataset), "image_shape": list(dataset.image_shape), "features": checksums}
    return Reference(moments, facts, classifier)


def open_measures(reference: Reference, metrics: Sequence[str], procs: Processes, networks: str | Path = CACHE) -> list[FrechetDistance]:
    """Distances from the reference. UserError for metrics that it lacks, that are unknown, or that cannot be had."""
    check_metrics(metrics)
    measures = []
    for name, moments in {metric: reference.of(metric) for metric in metrics}.items():
        features, checksum = open_features(name, procs.device, networks, reference.classifier)
        check_features(reference, name, checksum)
        facts = {"ref": reference.sha256[:16], "features": checksum}
        measures.append(FrechetDistance(name, features, moments, facts, reference.image_shape))
    return measures


def open_metric(
    name: str, reference: Reference | None, dataset: ImageDataset | None, folder: Path, procs: Processes, networks: str | Path = CACHE
) -> FrechetDistance:
    """Against a reference, or all images of a dataset; the classifier of `frechet-small` is then trained once and kept in `folder`.
    UserError as `open_measures` and `make_reference`."""
    if reference is not None:
        return open_measures(reference, [name], procs, networks)[0]
    if name == SMALL:
        features, facts = _kept_classifier(dataset, folder, procs)
    else:
        check_pixels(dataset, dataset.path)
        features, checksum = open_features(name, procs.device, networks)
        facts = {"data": procs.share(procs.first(lambda: fingerprint(dataset))), "features": checksum}
    parts = parts_of(dataset)
    moments = _of_parts(dataset, parts, [Statistics(name, features)], procs, 0, lambda images: None)
    return FrechetDistance(name, features, procs.share(moments and moments[name]), facts, tuple(dataset.image_shape))


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

    UserError for latents, for images of another shape than the reference's, and where there are fewer.
    """
    name = getattr(dataset, "path", "the dataset")
    check_pixels(dataset, name)
    for measure in measures:
        check_shape(measure.image_shape, dataset.image_shape, f"the images of {name} are")
    if len(dataset) < num:
        raise UserError(f"{name} holds {len(dataset)} images, and --num asks for {num}: make more, or give --num={len(dataset)}")
    indices = np.sort(data_order(len(dataset), seed, 0, num)) if num < len(dataset) else np.arange(num)
    statistics = [measure.statistics() for measure in measures]
    return _distances(measures, _of_indices(dataset, indices, statistics, procs, batch, workers), procs)


def measure_network(
    generate: ImageGenerator,
    measures: Sequence[FrechetDistance],
    procs: Processes,
    seeds: Sequence[int],
    batch: int = 32,
    class_idx: Sequence[int] | None = None,
    progress: Callable[[int], Any] | None = None,
    **heun: Any,
) -> Values | None:
    """Of the images of `seeds`, which are made and not kept; None but in the first process.

    class_idx: classes to take in turn; None draws each image's class from its own seed. `progress` is told of this process's images
    (default: a bar). `heun`: see `edm2.edm_sampler`. UserError for classes that the network does not know, and for networks that make
    no pixels, or images of another shape than the reference's.
    """
    if not generate.encoder.makes_pixels:
        raise UserError("metrics measure pixels, and the network makes latents: give the VAE that decodes them")
    classes = generate.check_classes(None if class_idx is None else list(class_idx))
    mine = [i for part in share_of(len(seeds), batch, procs) for i in part]
    own = classes and [classes[i % len(classes)] for i in mine]
    batches = generate([seeds[i] for i in mine], own or None, batch, **heun)
    images, statistics = (made.images for made in batches), [measure.statistics() for measure in measures]
    rounds = -(-len(seeds) // (batch * procs.world_size))
    return _distances(measures, _moments(images, statistics, procs, rounds, len(mine), progress), procs)


def _classifier(dataset: Dataset, name: str | Path, procs: Processes) -> SmallClassifier:
    """Trained by the first process, for all."""
    check_measurable(dataset, name)
    if dataset.nbytes <= IN_MEMORY:
        dataset.load()
    return _of_state(dataset, procs.share(procs.first(lambda: train_classifier(dataset).state_dict())))


def _kept_classifier(dataset: Dataset, folder: Path, procs: Processes) -> tuple[SmallFeatures, dict[str, str]]:
    """Features of the one that is kept in `folder`, which the first process trains if there is none of this dataset; their facts."""
    check_measurable(dataset, getattr(dataset, "path", "the dataset"))
    if dataset.nbytes <= IN_MEMORY:
        dataset.load()

    def keep() -> tuple[dict[str, Any], dict[str, str]]:
        data = fingerprint(dataset)
        path = make_folder(folder) / f"features-{data[:8]}.safetensors"
        net = load_classifier(path, dataset.image_shape, dataset.label_dim, {"data": data})
        if net is None:
            net = train_classifier(dataset)
            save_classifier(path, net, {"data": data})
        return net.state_dict(), {"data": data, "features": sha256(path)[:16]}

    state, facts = procs.share(procs.first(keep))
    return SmallFeatures(_of_state(dataset, state), procs.device), facts


def _of_state(dataset: Dataset, state: dict[str, Any]) -> SmallClassifier:
    net = SmallClassifier(dataset.image_shape, dataset.label_dim).eval()
    net.load_state_dict(state)
    return net


def share_of(total: int, batch: int, procs: Processes) -> list[range]:
    """A process's batches, as positions among all."""
    return _mine([range(start, min(start + batch, total)) for start in range(0, total, batch)], procs)


def _mine(parts: Sequence[Any], procs: Processes) -> Sequence[Any]:
    return parts[procs.rank :: procs.world_size]


def _of_indices(
    dataset: Dataset, indices: np.ndarray, statistics: list[Statistics], procs: Processes, batch: int, workers: int | None
) -> dict[str, Moments] | None:
    return _of_parts(dataset, [indices[start : start + batch] for start in range(0, len(indices), batch)], statistics, procs, workers)


def _of_parts(
    dataset: Dataset,
    parts: Sequence[Sequence[int]],
    statistics: list[Statistics],
    procs: Processes,
    workers: int | None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, Moments] | None:
    mine, rounds = _mine(parts, procs), len(parts[:: procs.world_size])
    return _moments(read_parts(dataset, mine, workers), statistics, procs, rounds, sum(map(len, mine)), progress)


def _moments(
    parts: Iterable[np.ndarray],
    statistics: list[Statistics],
    procs: Processes,
    rounds: int,
    total: int,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, Moments] | None:
    """Of all processes' images in the first; None in the others. This one has `total`, no process more than `rounds` parts."""
    found = error = None
    with Progress(total, procs) if progress is None else nullcontext() as bar:
        work = _work(parts, statistics, rounds, progress if bar is None else bar.update)
        for number in range(rounds + 1):
            try:
                found = None if error else next(work)
            except UserError as e:
                error = e
            if number % HEARD == 0 or number == rounds:
                procs.raise_any(error)
    gathered = procs.gather(found)
    return procs.first(lambda: {each.name: _merged(each.name, list(gaussians)) for each, *gaussians in zip(statistics, *gathered)})


def _work(
    parts: Iterable[np.ndarray], statistics: list[Statistics], rounds: int, progress: Callable[[int], Any]
) -> Iterator[list[Gaussian] | None]:
    """In each round one of the parts, as long as there are some; after the last what they came to."""
    parts = iter(parts)
    for _ in range(rounds):
        for images in islice(parts, 1):
            for each in statistics:
                each.add(images)
            progress(len(images))
        yield None
    yield [each.gaussian() for each in statistics]


def _merged(name: str, gaussians: list[Gaussian]) -> Moments:
    first, *others = gaussians
    try:
        for other in others:
            first.merge(other)
    except ValueError as e:
        raise UserError(f"{name}: {e}") from e
    return at_least_two(name, first).moments()


def _distances(measures: Sequence[FrechetDistance], moments: dict[str, Moments] | None, procs: Processes) -> Values | None:
    return procs.first(lambda: {measure.name: measure.distance(moments[measure.name]) for measure in measures})
