"""A grid of samples beside each snapshot of a training run: always of the same seeds."""

import math
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from edm2.config import TrainingConfig
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.generate import ImageGenerator
from edm2.latents import Encoder, LatentEncoder
from edm2.pictures import tile, write_png
from edm2.snapshot import load_snapshot
from edm2.vae import load_vae

SAMPLES, STEPS = 64, 18
LEAST = 32  # pixels of an image's side: smaller ones are enlarged


class Preview:
    """Of `config.samples` images; None means 64 where there are pixels, and none of latents without `config.vae`.

    The first process draws. UserError for a VAE that cannot be read.
    """

    def __init__(self, config: TrainingConfig, encoder: Encoder, procs: Processes):
        latents = isinstance(encoder, LatentEncoder)
        if config.vae and not latents:
            raise UserError(f"--vae decodes latents, and {config.data or 'the dataset'} holds pixels")
        default = SAMPLES if config.vae or not latents else 0
        self.count = default if config.samples is None else config.samples
        self.device, draws = procs.device, self.count > 0 and procs.rank == 0
        self.encoder = load_vae(encoder, config.vae, self.device) if latents and draws else encoder

    def draw(self, snapshot: Path) -> np.ndarray | None:
        """Write the grid of a snapshot's samples to a file named after it; also returned, uint8 `[H, W, C]`.

        None, and nothing is written, if none are wanted or, with a warning, where the memory of the GPU does not suffice.
        """
        if self.count == 0:
            return None
        images = None
        with suppress(torch.OutOfMemoryError):
            images = self._images(snapshot)
        if images is None:
            torch.cuda.empty_cache()  # here, where the error holds on to nothing
            warnings.warn(f"no samples of {snapshot.name}: the GPU's memory does not suffice; --samples=0 asks for none", stacklevel=2)
            return None
        grid = tile(images, math.ceil(math.sqrt(self.count)), math.ceil(LEAST / images.shape[1]))
        write_png(snapshot.parent / snapshot.name.replace("network-snapshot", "samples").replace(".safetensors", ".png"), grid)
        return grid

    def _images(self, snapshot: Path) -> np.ndarray:
        generate = ImageGenerator(load_snapshot(snapshot, self.device).net, encoder=self.encoder)
        return np.concatenate([batch.images for batch in generate(range(self.count), num_steps=STEPS)])
