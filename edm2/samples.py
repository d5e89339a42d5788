"""A folder of samples, one file for each seed, that know how they were made: PNG images, or VAE latents as arrays."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.generate import Batch, ImageGenerator
from edm2.latents import Encoder
from edm2.pictures import Writers, read_facts, read_png, write_array, write_png
from edm2.sampler import Heun

LINE_INTERVAL = 60.0  # seconds


class Sample(NamedTuple):
    """What is asked for: a seed, and a class (None: that which the seed draws)."""

    seed: int
    class_idx: int | None


class SampleFolder:
    """`{seed:06d}.png`, with `subdirs` in a folder for every 1000 seeds. `recipe` is all that a sample's pixels depend on
    besides its seed and class, for JSON; each file carries it."""

    def __init__(self, outdir: Path, subdirs: bool, encoder: Encoder, recipe: dict[str, Any]):
        self.outdir, self.subdirs, self.encoder, self.recipe = outdir, subdirs, encoder, recipe

    def file(self, seed: int) -> Path:
        folder = self.outdir / f"{seed // 1000 * 1000:06d}" if self.subdirs else self.outdir
        return folder / f"{seed:06d}.{'png' if self.encoder.makes_pixels else 'npy'}"

    def has(self, sample: Sample) -> bool:
        """Is there one with the same recipe?"""
        return read_facts(self.file(sample.seed)) == self._facts(sample)

    def save(self, samples: Sequence[Sample], batch: Batch, writers: Writers) -> None:
        write, arrays = (write_array, batch.vae_latents) if batch.images is None else (write_png, batch.images)
        for sample, array in zip(samples, arrays, strict=True):
            writers.write(write, self.file(sample.seed), array, self._facts(sample))

    def images(self, seeds: Sequence[int]) -> np.ndarray:
        """uint8 `[N, H, W, C]`, as they are on disk."""
        return np.stack([read_png(self.file(seed)) for seed in seeds])

    def _facts(self, sample: Sample) -> dict[str, Any]:
        return json.loads(json.dumps(self.recipe | sample._asdict()))


def list_samples(seeds: list[int], class_idx: list[int] | None) -> list[Sample]:
    """Each seed once, with its class. UserError for a seed with two."""
    samples = dict.fromkeys(Sample(seed, class_idx and class_idx[i % len(class_idx)]) for i, seed in enumerate(seeds))
    classes: dict[int, int | None] = {}
    for sample in samples:
        if classes.setdefault(sample.seed, sample.class_idx) != sample.class_idx:
            raise UserError(f"--class gives seed {sample.seed} two classes: a seed has one image")
    return list(samples)


def make_samples(
    generate: ImageGenerator, folder: SampleFolder, samples: list[Sample], heun: Heun, batch: int, overwrite: bool, procs: Processes
) -> None:
    """Those samples that are not there yet, shared among the processes; says what it came to."""
    todo = procs.share([sample for sample in samples if overwrite or not folder.has(sample)] if procs.rank == 0 else None)
    replaced = sum(folder.file(sample.seed).exists() for sample in todo) if procs.rank == 0 else 0
    mine = todo[procs.rank :: procs.world_size]
    classes = [sample.class_idx for sample in mine] if mine and mine[0].class_idx is not None else None
    left = iter(mine)
    with Writers() as writers, Progress(len(mine), procs) as progress:
        for part in generate([sample.seed for sample in mine], classes, batch, **asdict(heun)):
            folder.save([next(left) for _ in part.seeds], part, writers)
            progress.update(len(part.seeds))
    procs.barrier()  # when all have written theirs
    if procs.rank == 0:
        there = len(samples) - len(todo)
        text = f"{len(todo)} images in {progress.seconds:.1f} s, {len(todo) / progress.seconds:.3g} images/s"
        text += f"; {there} were there already" if there else ""
        tqdm.write(text + (f"; {replaced} replaced files that were made otherwise" if replaced and not overwrite else ""))


class Progress:
    """A bar for the first process's share; where nobody sees one, in a log, a line every minute."""

    def __init__(self, total: int, procs: Processes):
        self.total, self.made, self.start, self.told = total, 0, time.perf_counter(), time.perf_counter()
        self.bar = tqdm(total=total, unit="img", disable=True if procs.rank else None)
        self.lines = procs.rank == 0 and self.bar.disable

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def __enter__(self) -> "Progress":
        return self

    def update(self, images: int) -> None:
        self.made += images
        self.bar.update(images)
        if self.lines and time.perf_counter() - self.told >= LINE_INTERVAL:
            self.told = time.perf_counter()
            tqdm.write(f"{self.made} of {self.total} images, {self.made / self.seconds:.3g} images/s")

    def __exit__(self, *_: object) -> None:
        self.bar.close()
