"""Datasets of images ↔ datasets of VAE latents. Under `torchrun` the processes share the work, and the first one writes."""

import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edm2.dataset_writer import DatasetWriter
from edm2.dataset_zip import encode_png
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.image_files import ImageFiles
from edm2.latent_statistics import LatentSums
from edm2.latents import LatentFacts
from edm2.vae import VAEEncoder

Progress = Callable[[int], Any]
ALONE = Processes(0, 1, torch.device("cpu"))


def encode_dataset(
    files: ImageFiles,
    dest: str | Path,
    vae: VAEEncoder,
    batch: int = 32,
    procs: Processes = ALONE,
    progress: Progress = lambda images: None,
) -> None:
    """Write the ZIP `dest` of the means ⊕ standard deviations of each image's latents, float32 `[2C, H/8, W/8]`, with the labels that
    there are and `LatentFacts`.

    It appears when it is complete. After an interruption the same call goes on where it was; `progress` is told of images made,
    first of those that were there. The bits depend on neither `batch` nor the number of processes. UserError for images that are
    damaged, not RGB, or of different sizes, and where it cannot be written; then nothing stays.
    """
    labels = _labels(files)
    job = ["encode", files.identity(), vae.config(), vae.sha256, str(vae.vae.dtype), vae.device.type, vae.fast]
    with DatasetWriter(dest, "npy", job) if procs.rank == 0 else nullcontext() as writer:
        sums = LatentSums(*(writer and writer.state or ()))
        for latents in _in_turn(files, partial(_encoded, vae), batch, procs, writer, progress):
            sums = sums.plus(latents)
            writer.add(_npy(latents), sums)
        if writer:
            facts = _facts(vae, sums)
            writer.finish({**labels, "latents": facts.to_json()})


def decode_dataset(
    files: ImageFiles,
    dest: str | Path,
    vae: VAEEncoder,
    batch: int = 32,
    procs: Processes = ALONE,
    progress: Progress = lambda images: None,
) -> None:
    """Write the ZIP `dest` of the images that the VAE makes of the means of stored latents: what it keeps of the originals.

    As `encode_dataset` otherwise. UserError for files that are no latents of this VAE.
    """
    labels = _labels(files)
    job = ["decode", files.identity(), vae.config(), vae.sha256, str(vae.vae.dtype), vae.device.type, vae.fast]
    with DatasetWriter(dest, "png", job) if procs.rank == 0 else nullcontext() as writer:
        for image in _in_turn(files, partial(_decoded, vae), batch, procs, writer, progress):
            writer.add(encode_png(image))
        if writer:
            writer.finish(labels)


def _labels(files: ImageFiles) -> dict[str, Any]:
    """As they were, with the names of the classes."""
    labels, classes = files.labels(), files.class_names()
    return {"labels": None if labels is None else labels.tolist()} | ({} if classes is None else {"classes": classes})


def _facts(vae: VAEEncoder, sums: LatentSums) -> LatentFacts:
    """UserError for latents that are all alike."""
    try:
        return LatentFacts(vae.latents.vae, vae.latents.pixel_range, *map(tuple, sums.statistics), vae.sha256)
    except ValueError as e:
        raise UserError(f"the VAE {vae.latents.vae} makes latents that cannot be trained on: {e}") from e


def _in_turn(
    files: ImageFiles,
    evaluate: Callable[[NDArray], NDArray],
    batch: int,
    procs: Processes,
    writer: DatasetWriter | None,
    progress: Progress,
) -> Iterator[NDArray]:
    """In the first process what `evaluate` makes of each file that is not written yet, in order; nothing in the others, which make
    their part of it: of each `batch` times processes files one batch."""
    if writer:
        writer.tell(progress)
    names, first = files.names[procs.share(writer and writer.count) :], files.array(files.names[0])
    stride = batch * procs.world_size
    rounds = range(procs.rank * batch, len(names) + procs.rank * batch, stride)
    mine = files.arrays([name for start in rounds for name in names[start : start + batch]])
    for start in rounds:
        made = _evaluated(files, evaluate, first, [next(mine) for _ in names[start : start + batch]])
        for part in procs.gather(made) or []:
            if isinstance(part, UserError):
                raise part
            for array in part:
                yield array
                progress(1)


def _evaluated(
    files: ImageFiles, evaluate: Callable[[NDArray], NDArray], first: NDArray, found: list[tuple[str, Any]]
) -> NDArray | list | UserError:
    """Of one batch; what is wrong is returned, for the first process to tell."""
    if not found:
        return []
    for name, array in found:
        if isinstance(array, UserError):
            return array
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            here, there = (f"{x.dtype} {list(x.shape)}" for x in (array, first))
            return UserError(f"{files.where(name)} is {here}, and {files.names[0]} is {there}; `dataset convert` makes images alike")
    try:
        return evaluate(np.stack([array for _, array in found]))
    except UserError as e:
        return UserError(f"{files.where(found[0][0])}: {e}")


def _encoded(vae: VAEEncoder, images: NDArray) -> NDArray:
    if images.dtype != np.uint8 or images.shape[1] != 3:
        raise UserError(f"expected an RGB image, got {images.dtype} {list(images.shape[1:])}; `dataset convert` makes it one")
    latents = vae.encode_pixels(torch.from_numpy(images)).cpu().numpy()
    if not np.isfinite(latents).all():
        raise UserError(f"the VAE {vae.latents.vae} makes latents of this image, or of the next {len(images) - 1}, that are not finite")
    return latents


def _decoded(vae: VAEEncoder, latents: NDArray) -> NDArray:
    channels = 2 * len(vae.latents.raw_mean)
    if latents.dtype != np.float32 or latents.shape[1] != channels:
        raise UserError(f"expected latents, float32 of {channels} channels, got {latents.dtype} {list(latents.shape[1:])}")
    images = vae.decode_raw(torch.from_numpy(latents[:, : channels // 2]))
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).cpu().numpy())


def _npy(array: NDArray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
