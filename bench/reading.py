"""Reading training data: batches of latents from an archive, as the training loop gets them."""

import io
import json
import shutil
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from torch import Tensor

from bench.case import Candidates, Case, data_size
from bench.models import macs
from edm2.config import TrainingConfig
from edm2.data import ImageDataset, batches
from edm2.distributed import Processes
from edm2.prefetch import Prefetcher
from edm2.trainer import Trainer

FILES = 2048  # 268 MB of latents
WORKERS = 2
IN_A_ROW = 16  # batches


def reading_case(batch: int, files: int = FILES) -> Case:
    """Batches of ImageNet-512 latents: means and standard deviations, 131 KB each, labels among 1,000.

    From files by worker processes, as of a dataset that is too large for memory (`edm2`), and from memory; as many in a row as
    make up for what the workers had ready.
    """

    def build(device: torch.device) -> Candidates:
        folder = _Folder()
        archive = write_archive(folder.path / "latents.zip", files)

        def reader(**how: int) -> Callable[[], tuple]:
            stream = batches(ImageDataset(archive), 0, 0, batch, **how)
            return partial(_last_of, IN_A_ROW, stream, folder)

        return {"edm2": reader(cache_bytes=0, workers=WORKERS), "edm2 from memory": reader()}

    return Case(
        f"data/latents/n{batch}",
        build,
        images=batch * IN_A_ROW,
        facts={"batch": batch, "in a row": IN_A_ROW},
        needs_gpu=False,
        flush=False,
        dtype="float32",
    )


def waiting_case(preset: str, batch: int, files: int = FILES, needs_gpu: bool = True) -> Case:
    """A step of the training loop whose images are read from files by worker processes; its parts tell how long it waited."""

    def build(device: torch.device) -> Candidates:
        resolution, channels, classes = data_size(preset)
        folder = _Folder()
        shape, dtype = ((8, resolution, resolution), np.float32) if channels == 4 else ((channels, resolution, resolution), np.uint8)
        return {"edm2": _ReadingStep(preset, batch, folder, write_archive(folder.path / "data.zip", files, shape, dtype, classes), device)}

    facts = {"preset": preset, "batch": batch}
    return Case(f"data/{preset}/n{batch}", build, 6.0 * macs(preset) * batch, images=batch, facts=facts, needs_gpu=needs_gpu, flush=False)


class _ReadingStep:
    def __init__(self, preset: str, batch: int, folder: "_Folder", archive: Path, device: torch.device):
        config = TrainingConfig("", str(archive), preset=preset, batch=batch, status=0, snapshot=0, checkpoint=0, duration=0)
        self.folder, self.trainer = folder, Trainer(config, Processes(0, 1, device))
        self.trainer.start()
        stream = batches(self.trainer.dataset, 0, 0, batch, workers=WORKERS, cache_bytes=0)
        self.trainer.data = Prefetcher(stream, device)

    def __call__(self) -> Tensor:
        return self.trainer.step() / self.trainer.config.batch

    def parts(self, runs: int = 10) -> dict[str, float]:
        """Mean seconds of a step that the host spent waiting for data, and the rest."""
        self.trainer.data.take_wait()
        start = time.perf_counter()
        for _ in range(runs):
            loss = self.trainer.step()
        loss.item()
        whole, waited = (time.perf_counter() - start) / runs, self.trainer.data.take_wait() / runs
        return {"waiting for data": waited, "rest": whole - waited}


class _Folder:
    """A temporary one, removed when its last reader goes."""

    def __init__(self):
        self.path = Path(mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _last_of(count: int, stream: Iterator[tuple], folder: _Folder) -> tuple:
    for _ in range(count - 1):
        next(stream)
    return next(stream)


def write_archive(path: Path, files: int, shape: tuple[int, ...] = (8, 64, 64), dtype: type = np.float32, classes: int = 1000) -> Path:
    """As `edm2 dataset` writes them: an uncompressed ZIP of arrays and dataset.json."""
    random, names = np.random.RandomState(0), [f"{i:08d}.npy" for i in range(files)]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in names:
            buffer = io.BytesIO()
            np.save(buffer, (random.rand(*shape) * (255 if dtype == np.uint8 else 1)).astype(dtype))
            archive.writestr(name, buffer.getvalue())
        archive.writestr("dataset.json", json.dumps({"labels": [[name, i % classes] for i, name in enumerate(names)]}))
    return path
