"""Image datasets, and the endless, resumable stream of training batches drawn from them."""

import itertools
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from edm2.errors import UserError
from edm2.image_files import ImageFiles
from edm2.latents import LatentFacts


class Dataset(Protocol):
    """What training reads. `image_shape` is (C, H, W), `dtype` uint8 or float32 (latents: means, then standard deviations),
    `nbytes` the size of all images in memory; indices are integers `[k]`. `load` may bring them there. Without an attribute
    `latents` (`LatentFacts`) latents are taken for those of the official VAE."""

    image_shape: tuple[int, ...]
    dtype: np.dtype
    label_dim: int
    nbytes: int

    def __len__(self) -> int: ...

    def load(self) -> None: ...

    def images(self, indices: Sequence[int]) -> np.ndarray: ...

    def labels(self, indices: Sequence[int]) -> np.ndarray: ...


class ArrayDataset:
    """A `Dataset` of arrays: images uint8 `[n, C, H, W]` (or float32 latents), labels int `[n]`, float32 `[n, label_dim]` or None.

    `latents` tells of which VAE they are, default the official one's. UserError if their shapes or types are others.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray | None = None, latents: LatentFacts | None = None):
        if images.ndim != 4 or images.dtype not in (np.uint8, np.float32) or not len(images):
            raise UserError(f"images: expected uint8 or float32 [n, C, H, W], got {images.dtype} {list(images.shape)}")
        labels = np.zeros((len(images), 0), np.float32) if labels is None else np.asarray(labels)
        if labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) == len(images) and labels.min() >= 0:
            labels = np.eye(int(labels.max()) + 1, dtype=np.float32)[labels]
        if labels.ndim != 2 or labels.dtype != np.float32 or len(labels) != len(images):
            raise UserError(f"labels: expected int [n] from 0 on or float32 [n, label_dim], got {labels.dtype} {list(labels.shape)}")
        self._images, self._labels, self.latents = images, labels, latents
        self.image_shape, self.dtype, self.label_dim, self.nbytes = images.shape[1:], images.dtype, labels.shape[1], images.nbytes

    def __len__(self) -> int:
        return len(self._images)

    def load(self) -> None:
        """They are in memory."""

    def images(self, indices: Sequence[int]) -> np.ndarray:
        return self._images[np.asarray(indices)]

    def labels(self, indices: Sequence[int]) -> np.ndarray:
        return self._labels[np.asarray(indices)]


class ImageDataset:
    """Images of one size, with their labels; items are (image [C,H,W], label vector float32 [label_dim]).

    Images are uint8 (grey: C = 1, RGB: C = 3) or what the `.npy` files hold: uint8, or float32 latents (8 channels:
    means, then standard deviations). Integer labels become one-hot vectors, label_dim = their maximum + 1; without
    labels label_dim is 0. `mirror` doubles the length: item n + i is item i flipped along the width.

    Attributes: path, names (of the files, sorted), image_shape (C, H, W), dtype, label_dim, latents (what is told of them).
    UserError in one line for any bad input; sizes are compared when an image is read, not all at the start.
    """

    def __init__(self, path: str | Path, use_labels: bool = True, mirror: bool = False):
        self._files = ImageFiles(path)
        self.path, self.names, self.mirror = self._files.path, self._files.names, mirror
        self._labels = self._files.labels() if use_labels else None
        if use_labels and self._labels is None:
            lacks = "the labels in dataset.json are null" if self._files.has_json else "it has no dataset.json"
            raise UserError(f"--cond needs labels: in {path} {lacks}; add them or pass --cond=False")
        first = self._files.array(self.names[0])
        self.image_shape, self.dtype = first.shape, first.dtype
        self.latents = latent_facts(self._files) if first.dtype == np.float32 else None
        self.label_dim = _label_dim(self._labels)
        self._loaded = None  # [n,C,H,W] once load() was called

    def __len__(self) -> int:
        return len(self.names) * (2 if self.mirror else 1)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.image(i), self.label(i)

    @property
    def nbytes(self) -> int:
        """Size of all decoded images in memory, in bytes."""
        return len(self.names) * math.prod(self.image_shape) * self.dtype.itemsize

    def load(self) -> None:
        """Decode all images into memory once; UserError for the first damaged or differently sized one."""
        if self._loaded is None:
            loaded = np.empty((len(self.names), *self.image_shape), self.dtype)
            for i in range(len(self.names)):
                loaded[i] = self._read(i)
            self._loaded = loaded

    def image(self, i: int) -> np.ndarray:
        """Image i, [C,H,W]."""
        return self.images([i])[0]

    def label(self, i: int) -> np.ndarray:
        """Label vector i, float32 [label_dim]."""
        return self.labels([i])[0]

    def images(self, indices: Sequence[int]) -> np.ndarray:
        """Images of the given indices, [k,C,H,W]."""
        files, flipped = self._locate(indices)
        images = np.stack([self._read(i) for i in files]) if self._loaded is None else self._loaded[files]
        images[flipped] = images[flipped, ..., ::-1]
        return images

    def labels(self, indices: Sequence[int]) -> np.ndarray:
        """Label vectors of the given indices, float32 [k,label_dim]."""
        files, _ = self._locate(indices)
        if self._labels is not None and self._labels.ndim == 2:
            return self._labels[files]
        vectors = np.zeros((len(files), self.label_dim), np.float32)
        if self._labels is not None:
            vectors[np.arange(len(files)), self._labels[files]] = 1
        return vectors

    def _locate(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """File numbers [k], and which of them are to be flipped, bool [k]."""
        indices = np.asarray(indices)
        if len(indices) and not (0 <= indices.min() and indices.max() < len(self)):
            raise IndexError(f"dataset index out of range 0..{len(self) - 1}")
        return indices % len(self.names), indices >= len(self.names)

    def _read(self, i: int) -> np.ndarray:
        image = self._files.array(self.names[i])
        if (image.shape, image.dtype) != (self.image_shape, self.dtype):
            raise UserError(
                f"{self._files.where(self.names[i])} is {_describe(image.shape, image.dtype)} but {self.names[0]} is "
                f"{_describe(self.image_shape, self.dtype)}; `python -m edm2 dataset convert` makes images alike"
            )
        return image


def latent_facts(files: ImageFiles) -> LatentFacts | None:
    """What a dataset tells of its latents; None if nothing. UserError for what makes no sense."""
    facts = files.latents()
    try:
        return None if facts is None else LatentFacts.from_json(facts)
    except ValueError as e:
        raise UserError(f"{files.where('dataset.json')} is malformed in what it tells of latents: {e}") from e


def _label_dim(labels: np.ndarray | None) -> int:
    if labels is None:
        return 0
    return labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    channels, height, width = shape
    return f"{width}x{height} with {channels} channel{'s' * (channels > 1)} ({dtype})"


def data_order(size: int, seed: int, start: int, count: int) -> np.ndarray:
    """Entries start .. start+count-1 of the endless order of a dataset of `size` items; int64 [count].

    Epoch e is a permutation of range(size) drawn from (seed, e). The order depends on the position alone, so it
    survives a resume and a change in the number of processes.
    """
    parts = []
    while count > 0:
        epoch, offset = divmod(start, size)
        part = _permutation(size, seed, epoch)[offset : offset + count]
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


@lru_cache(maxsize=2)  # 10 MB each for ImageNet; a batch may span two epochs
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, since NumPy never changes its stream.
    return np.random.RandomState([seed % 2**32, epoch]).permutation(size).astype(np.int64)


def batches(
    dataset: Dataset,
    seed: int,
    start_nimg: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int | None = None,
    workers: int | None = None,
    cache_bytes: int = 2**30,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The endless micro batches of one process: images [b,C,H,W] uint8 or float32, labels float32 [b,label_dim].

    Global batch k holds entries start_nimg + k·batch_size ... of `data_order`; process `rank` owns one contiguous
    share of it, cut into micro batches of `micro_batch` (default: one). A dataset of at most `cache_bytes` decoded is
    loaded once; a larger one is read by `workers` processes (default 2; 0: in this process), to the same batches.
    Tensors are on the CPU, pinned where CUDA is available. UserError for sizes that do not divide and for damaged
    files, whichever process met them.
    """
    if batch_size < 1 or batch_size % world_size:
        raise UserError(f"batch size {batch_size} must be a positive multiple of the {world_size} processes")
    share = batch_size // world_size
    micro = share if micro_batch is None else micro_batch
    if micro < 1 or share % micro:
        raise UserError(f"a micro batch of {micro} does not divide the {share} images per process and batch")
    if dataset.nbytes <= cache_bytes:
        dataset.load()
        workers = 0
    elif workers is None:
        workers = min(2, os.cpu_count() or 1)
    indices = _indices(len(dataset), seed, start_nimg + rank * share, batch_size, share, micro)
    return _read_batches(_BatchReader(dataset), indices, workers)


def read_parts(dataset: Dataset, parts: Iterable[Sequence[int]], workers: int | None = None) -> Iterator[np.ndarray]:
    """The images of each part, given by its indices: `[k, H, W, C]`. `workers` processes read ahead (default: 2 for a dataset of more
    than a GiB decoded, else 0: this one). UserError for damaged files."""
    if workers is None:
        workers = 2 if dataset.nbytes > 2**30 else 0
    arrays = map(np.asarray, parts)
    return (np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy()) for x, _ in _read_batches(_BatchReader(dataset), arrays, workers))


def _indices(size: int, seed: int, start: int, stride: int, share: int, micro: int) -> Iterator[np.ndarray]:
    for first in itertools.count(start, stride):
        for offset in range(0, share, micro):
            yield data_order(size, seed, first + offset, micro)


class _BatchReader(torch.utils.data.Dataset):
    """Reads one batch per array of indices. A UserError is returned: raised in a worker, it would reach the parent
    process as the text of a traceback."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, indices: np.ndarray):
        try:
            return torch.from_numpy(self.dataset.images(indices)), torch.from_numpy(self.dataset.labels(indices))
        except UserError as e:
            return e


def _outlive_signals(_: int) -> None:
    """One to the whole group of processes is for the one that trains, which still needs its workers; it ends them by its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # which tells who sent it; on Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_asked, daemon=True).start()


def _end_when_asked() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _read_batches(reader: _BatchReader, indices: Iterator[np.ndarray], workers: int):
    pin = torch.cuda.is_available()
    source = map(reader.__getitem__, indices)
    if workers:
        # batch_size=None: each "index" is a whole batch. A generator of its own: the loader draws a seed for its
        # workers, which must not disturb the global random state.
        source = torch.utils.data.DataLoader(
            reader, sampler=indices, batch_size=None, num_workers=workers, pin_memory=pin, generator=torch.Generator(),
            worker_init_fn=_outlive_signals,
        )  # fmt: skip
    for batch in source:
        if isinstance(batch, UserError):
            raise batch
        images, labels = batch
        yield (images.pin_memory(), labels.pin_memory()) if pin else (images, labels)
