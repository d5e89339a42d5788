"""A metric over widths of the average, guidance weights and guidance intervals (Karras et al. 2024, Fig. 5 and 6).

Results are lines of JSON in `sweep.jsonl`, each with all that its value depends on: what is there is not made again.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import nn

from edm2.averages import RunAverages
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.files import make_folder, sha256
from edm2.folding import fold
from edm2.generate import ImageGenerator
from edm2.guidance import Unlabelled, check_fits
from edm2.latents import Encoder
from edm2.measuring import measure_network
from edm2.metrics import FrechetDistance, Metric
from edm2.network import Precond
from edm2.networks import open_snapshot
from edm2.reconstruction import check_widths

EVERYWHERE = (0.0, math.inf)


class Point(NamedTuple):
    """Where to measure: σ_rel, guidance weight (1: none), and the noise levels that are guided (lo, hi]."""

    std: float
    guidance: float = 1.0
    interval: tuple[float, float] = EVERYWHERE


class Result(NamedTuple):
    """The metric's value at a point."""

    point: Point
    value: float


def grid(
    stds: Iterable[float], guidances: Iterable[float] = (1.0,), intervals: Iterable[tuple[float, float]] = (EVERYWHERE,)
) -> list[Point]:
    """All combinations, each once; without guidance there is one interval. UserError for an impossible σ_rel."""
    guidances, intervals = list(guidances), list(intervals)
    points = [Point(std, w, interval if w != 1 else EVERYWHERE) for std in stds for w in guidances for interval in intervals]
    check_widths([point.std for point in points])
    return list(dict.fromkeys(points))


@dataclass(frozen=True)
class Guide:
    """What guides a run's networks. `of(net, std)` is the guide of one of them; `identity` names its weights."""

    identity: str
    of: Callable[[Precond, float], nn.Module]


def self_guide(run: RunAverages) -> Guide:
    """The network itself without labels. UserError if the run had all labels."""
    if not run.meta.get("label_dropout"):
        raise UserError(f"guidance needs a guide network: give --gnet ({run.folder} was not trained with --label-dropout)")
    return Guide("itself without labels", lambda net, std: Unlabelled(net))


def run_guide(run: RunAverages, guide: RunAverages, device: torch.device | str) -> Guide:
    """The other run's average of the same σ_rel. UserError if it does not fit."""
    if guide.identity == run.identity:
        raise UserError(f"--gnet {guide.folder} is the run itself, at the same time: give another run, or --gnet-kimg")
    check_fits(run.config, guide.config, str(run.folder), str(guide.folder))
    return Guide(guide.identity, lambda net, std: guide.average(std, device).net)


def file_guide(run: RunAverages, path: Path, device: torch.device | str) -> Guide:
    """One network for every σ_rel. UserError if it does not fit."""
    snapshot = open_snapshot(path, device)
    check_fits(run.config, snapshot.config, str(run.folder), str(path))
    folded = fold(snapshot.net)
    return Guide(sha256(path)[:16], lambda net, std: folded)


class Sweep:
    """Measures averages of a run with a metric, by the images of some seeds; the classes are taken in turn.

    Results are kept in `folder`, which is made when there is the first. The size of a batch and the order of points change no
    value, but for rounding. `encoder` turns what the networks make into pixels (default: the snapshots' own). UserError if it does
    not. Several `procs` share the images of each point if the metric is a `FrechetDistance`, else UserError; each iterates over
    `measure`, and the first has the results.
    """

    def __init__(
        self,
        run: RunAverages,
        metric: Metric,
        folder: str | Path,
        guide: Guide | None = None,
        seeds: Sequence[int] = range(1000),
        steps: int = 32,
        batch: int = 100,
        device: torch.device | str = "cpu",
        encoder: Encoder | None = None,
        procs: Processes | None = None,
    ):
        check_pixels(run, encoder)
        self.procs = procs or Processes(0, 1, torch.device(device))
        if self.procs.world_size > 1 and not isinstance(metric, FrechetDistance):
            raise UserError(f"{metric.name} is no FrechetDistance: several processes cannot share it")
        self.encoder = encoder
        self.run, self.metric, self.guide, self.device = run, metric, guide, torch.device(device)
        self.seeds, self.steps, self.batch = list(seeds), steps, batch
        self.results = ResultsFile(Path(folder) / "sweep.jsonl")

    def settings(self, point: Point) -> dict[str, Any]:
        """All that the value depends on, for JSON."""
        guided, vae = point.guidance != 1, getattr(self.encoder, "sha256", None)
        if guided and self.guide is None:
            raise ValueError(f"guidance {point.guidance} needs a guide")
        return {
            "std": float(point.std),
            "guidance": float(point.guidance),
            "interval": [str(float(bound)) for bound in point.interval] if guided and point.interval != EVERYWHERE else None,
            "metric": self.metric.name,
            **self.metric.facts,
            "nimg": self.run.nimg,
            "net": self.run.identity,
            "gnet": self.guide.identity if guided else None,
            "seeds": ranges(self.seeds),
            "steps": self.steps,
            "device": self.device.type,
            **({} if vae is None else {"vae": vae[:16]}),
        }

    def known(self, points: Iterable[Point]) -> list[Result]:
        """Those of the points that have been measured."""
        found = ((point, self.results.value(self.settings(point))) for point in points)
        return [Result(point, value) for point, value in found if value is not None]

    def all_known(self) -> list[Result]:
        """All points that have been measured with these settings, also by earlier commands."""
        points = (_point(line) for line in self.results.lines)
        guided = self.guide is not None
        return self.known(dict.fromkeys(point for point in points if point is not None and (guided or point.guidance == 1)))

    def measure(self, points: Iterable[Point], progress: Callable[[int], Any] = lambda images: None) -> Iterator[Result]:
        """Measure those that have not been, each recorded before the next is begun. `progress` is told of images that this
        process made.

        The network of each σ_rel is made once. UserError where the snapshots do not fit together, or results cannot be written.
        """
        points = list(points)
        known = self.procs.share({result.point for result in self.known(points)})  # the first's: it writes while others read
        for std in dict.fromkeys(point.std for point in points):
            todo = [point for point in points if point.std == std and point not in known]
            if todo:
                generate = self._generator(std, any(point.guidance != 1 for point in todo))
            for point in todo:
                yield from self._measured(generate, point, progress)

    def _measured(self, generate: ImageGenerator, point: Point, progress: Callable[[int], Any]) -> list[Result]:
        """Recorded by the first process; nothing in the others."""
        shared = self.procs.world_size > 1
        value = self._shared_value(generate, point, progress) if shared else self.metric(self._images(generate, point, progress))
        self.procs.first(lambda: self._record(point, value))
        return [] if value is None else [Result(point, value)]

    def _record(self, point: Point, value: float) -> None:
        if not math.isfinite(value):
            raise UserError(f"{self.metric.name} is {value} at {point}")
        self.results.add(self.settings(point), value)

    def _generator(self, std: float, guided: bool) -> ImageGenerator:
        snapshot = self.run.average(std, self.device)
        return ImageGenerator(snapshot.net, self.guide.of(snapshot.net, std) if guided else None, self.encoder or snapshot.encoder)

    def _images(self, generate: ImageGenerator, point: Point, progress: Callable[[int], Any]) -> Iterator[np.ndarray]:
        """uint8 `[N, H, W, C]`."""
        for batch in generate(self.seeds, _classes(generate), self.batch, **self._heun(point)):
            progress(len(batch.seeds))
            yield batch.images

    def _shared_value(self, generate: ImageGenerator, point: Point, progress: Callable[[int], Any]) -> float | None:
        """None but in the first process."""
        classes, heun = _classes(generate), self._heun(point)
        values = measure_network(generate, [self.metric], self.procs, self.seeds, self.batch, classes, progress, **heun)
        return values and values[self.metric.name]

    def _heun(self, point: Point) -> dict[str, Any]:
        return {"num_steps": self.steps, "guidance": point.guidance, "guidance_interval": point.interval}


def _classes(generate: ImageGenerator) -> range | None:
    """All, to be taken in turn."""
    return range(generate.net.label_dim) if generate.net.label_dim else None


def check_pixels(run: RunAverages, encoder: Encoder | None = None) -> None:
    """UserError if its networks make latents, and no encoder makes pixels of them."""
    encoder = encoder or run.encoder
    if encoder and not encoder.makes_pixels:
        raise UserError(f"{run.folder} makes VAE latents, and this metric measures pixels")


class ResultsFile:
    """Lines of JSON: settings and a `value`. Nothing is ever taken out of it; a line that cannot be read is passed over."""

    def __init__(self, path: Path):
        self.path = path
        self.lines = list(_read_lines(path))
        self._values = {_key(line): line["value"] for line in self.lines}

    def value(self, settings: dict[str, Any]) -> float | None:
        return self._values.get(_key(settings))

    def add(self, settings: dict[str, Any], value: float) -> None:
        """On disk when it returns. UserError if that cannot be."""
        line = json.loads(json.dumps({**settings, "value": value}))
        make_folder(self.path.parent)
        try:
            with open(self.path, "ab+") as file:
                file.write((_line_end(file) + json.dumps(line) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise UserError(f"cannot write {self.path}: {e.strerror or e}") from e
        self.lines.append(line)
        self._values[_key(line)] = line["value"]


def _line_end(file: BinaryIO) -> str:
    """What the last line lacks, if it was cut off."""
    if not file.seek(0, os.SEEK_END):
        return ""
    file.seek(-1, os.SEEK_END)
    return "" if file.read(1) == b"\n" else "\n"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(errors="replace") if path.exists() else ""
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e
    for line in text.splitlines():
        try:
            found = json.loads(line)
            if math.isfinite(found["value"]):
                yield found
        except (KeyError, RecursionError, TypeError, ValueError):
            continue


def _key(line: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in line.items() if name != "value"}, sort_keys=True)


def _point(line: dict[str, Any]) -> Point | None:
    try:
        interval = EVERYWHERE if line["interval"] is None else tuple(map(float, line["interval"]))
        return Point(float(line["std"]), float(line["guidance"]), interval)
    except (KeyError, TypeError, ValueError):
        return None


def ranges(numbers: Sequence[int]) -> str:
    """As the command line takes them, in their order: `0-99,7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
