"""A folder of samples, one file for each seed, that know how they were made: PNG images, or VAE latents as arrays."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edm2.generate import Batch
from edm2.latents import Encoder
from edm2.pictures import Writers, read_facts, read_png, write_array, write_png


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
