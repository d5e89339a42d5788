"""Reading training data: batches of latents from an archive, as the training loop gets them."""

import io
import json
import shutil
import weakref
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from bench.case import Candidates, Case
from edm2.data import ImageDataset, batches

FILES = 2048  # 268 MB of latents
WORKERS = 2


def reading_case(batch: int, files: int = FILES) -> Case:
    """A batch of ImageNet-512 latents: means and standard deviations, 131 KB each, labels among 1,000.

    From files by worker processes, as of a dataset that is too large for memory (`edm2`), and from memory.
    """

    def build(device: torch.device) -> Candidates:
        folder = _Folder()
        archive = write_archive(folder.path / "latents.zip", files)

        def reader(**how: int) -> Callable[[], tuple]:
            stream = batches(ImageDataset(archive), 0, 0, batch, **how)
            return partial(_next, stream, folder)

        return {"edm2": reader(cache_bytes=0, workers=WORKERS), "edm2 from memory": reader()}

    return Case(f"data/latents/n{batch}", build, images=batch, facts={"batch": batch}, needs_gpu=False, flush=False, dtype="float32")


class _Folder:
    """A temporary one, removed when its last reader goes."""

    def __init__(self):
        self.path = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _next(stream: Iterator[tuple], folder: _Folder) -> tuple:
    return next(stream)


def write_archive(path: Path, files: int) -> Path:
    """As `edm2 dataset` writes them: an uncompressed ZIP of arrays and dataset.json."""
    random, names = np.random.RandomState(0), [f"{i:08d}.npy" for i in range(files)]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            buffer = io.BytesIO()
            np.save(buffer, random.rand(8, 64, 64).astype(np.float32))
            archive.writestr(name, buffer.getvalue())
        archive.writestr("dataset.json", json.dumps({"labels": [[name, i % 1000] for i, name in enumerate(names)]}))
    return path
