"""Images of any kind made alike: decoded, cropped, scaled and encoded, by several processes, in order."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edm2.ahead import in_order
from edm2.backends import keep_freed_memory
from edm2.dataset_writer import DatasetWriter
from edm2.dataset_zip import encode_png
from edm2.errors import Unfinished, UserError
from edm2.image_files import ImageFiles

CHUNK, AHEAD = 16, 4  # images that a process is given at a time; times so many for each process
Transform = Callable[[Image.Image, int, int], Image.Image]  # of a width and height in pixels


class Encoded(NamedTuple):
    """A PNG and its size in pixels."""

    data: bytes
    width: int
    height: int


Convert = Callable[[list[str]], list[Encoded]]  # of files' names


def center_crop(image: Image.Image, width: int, height: int) -> Image.Image:
    """The largest area of that shape in the centre, scaled by Lanczos' filter."""
    w = min(image.width, round(image.height * width / height))
    h = min(image.height, round(image.width * height / width))
    left, top = (image.width - w) // 2, (image.height - h) // 2
    return image.crop((left, top, left + w, top + h)).resize((width, height), Image.Resampling.LANCZOS)


def center_crop_wide(image: Image.Image, width: int, height: int) -> Image.Image:
    """`center_crop`, with black above and below that makes it width x width. UserError unless it is wider than high."""
    if width < height:
        raise UserError(f"center-crop-wide is for images wider than high, and not {width}x{height}")
    square = Image.new(image.mode, (width, width))
    square.paste(center_crop(image, width, height), (0, (width - height) // 2))
    return square


def center_crop_dhariwal(image: Image.Image, width: int, height: int) -> Image.Image:
    """ADM's preprocessing (Dhariwal & Nichol 2021): halved with a box filter while the short side is at least twice the target,
    brought to it bicubically, the centre cropped. UserError unless it is square."""
    if width != height:
        raise UserError(f"center-crop-dhariwal makes square images, and not {width}x{height}")
    while min(image.size) >= 2 * width:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = width / min(image.size)
    scaled = round(image.width * scale), round(image.height * scale)
    left, top = (scaled[0] - width) // 2, (scaled[1] - width) // 2
    if image.width > image.height:
        # Pillow scales these along rows, then along columns: what the crop takes off the rows' ends need not be scaled twice.
        image = image.resize((scaled[0], image.height), Image.Resampling.BICUBIC).crop((left, 0, left + width, image.height))
        return image.resize((width, width), Image.Resampling.BICUBIC)
    return image.resize(scaled, Image.Resampling.BICUBIC).crop((left, top, left + width, top + width))


TRANSFORMS: dict[str, Transform] = {
    "center-crop": center_crop,
    "center-crop-wide": center_crop_wide,
    "center-crop-dhariwal": center_crop_dhariwal,
}


def convert_dataset(
    files: ImageFiles,
    dest: str | Path,
    labels: NDArray | None = None,
    mode: str = "RGB",
    transform: str | None = None,
    size: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Callable[[int], Any] = lambda images: None,
    upright: bool = False,
    classes: Sequence[str] | None = None,
) -> None:
    """Write the ZIP `dest` of all images as `converted` makes them, and one label for each (int `[n]` or float32 `[n, L]`) or none,
    with the names of the classes if they are given.

    It appears when it is complete. After an interruption the same call goes on where it was; `progress` is told of images made,
    first of those that were there. UserError for bad images and where it cannot be written; then nothing stays.
    """
    job = [files.identity(), mode, transform, size, upright]
    with DatasetWriter(dest, "png", job) as writer:
        writer.tell(progress)
        first = None if writer.state is None else (writer.state[0], writer.state[1])
        with closing(converted(files, mode, transform, size, workers, writer.count, first, upright)) as images:
            for image in images:
                writer.add(image.data, [image.width, image.height])
                progress(1)
        named = {} if classes is None else {"classes": list(classes)}
        writer.finish({"labels": None if labels is None else labels.tolist()} | named)


def converted(
    files: ImageFiles,
    mode: str = "RGB",
    transform: str | None = None,
    size: tuple[int, int] | None = None,
    workers: int | None = None,
    start: int = 0,
    first: tuple[int, int] | None = None,
    upright: bool = False,
) -> Iterator[Encoded]:
    """Each image from number `start` on as a PNG of `mode` (RGB or L), turned as a camera's note says if `upright`, cropped and scaled
    to `size` (width, height) by the `transform` of that name, or as it is. The same bytes for any number of `workers`, default the
    processor's cores. UserError for damaged ones, and for a size that is not that of the `first`."""
    names = files.names[start:]
    convert = partial(_convert, files, mode, transform, size, upright)
    chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
    workers = min(len(chunks), _cores() if workers is None else workers)
    for chunk, images in zip(chunks, map(convert, chunks) if workers < 2 else _by_workers(convert, chunks, workers)):
        for name, image in zip(chunk, images):
            first = first or image[1:]
            if image[1:] != first:
                sizes = "{}x{} but {} is {}x{}".format(*image[1:], files.names[0], *first)
                raise UserError(f"{files.where(name)} is {sizes}; give --resolution")
            yield image


def _convert(
    files: ImageFiles, mode: str, transform: str | None, size: tuple[int, int] | None, upright: bool, names: list[str]
) -> list[Encoded]:
    found = []
    for name in names:
        image = _opened(files, name, upright).convert(mode)
        if transform is not None and size is not None:
            image = TRANSFORMS[transform](image, *size)
        found.append(Encoded(encode_png(np.asarray(image)), *image.size))
    return found


def _opened(files: ImageFiles, name: str, upright: bool) -> Image.Image:
    if not name.lower().endswith(".npy"):
        return files.image(name, upright)
    array = files.array(name)
    if array.dtype != np.uint8:
        raise UserError(f"{files.where(name)} holds no pixels but {array.dtype}: `dataset decode` makes images of latents")
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def _by_workers(convert: Convert, chunks: list[list[str]], workers: int) -> Iterator[list[Encoded]]:
    """Each is given `convert` once: it holds the names of all files."""
    pool = ProcessPoolExecutor(workers, initializer=_serve, initargs=(convert,))
    try:
        yield from in_order(pool, _served, chunks, AHEAD * workers)
    except BrokenProcessPool as e:
        raise Unfinished("a process that converts images was killed (for want of memory?); the same command goes on") from e


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_convert_here: Convert  # in a worker


def _served(names: list[str]) -> list[Encoded]:
    return _convert_here(names)


def _serve(convert: Convert) -> None:
    """In a worker: an interruption is for the process that asks, with which this one ends."""
    global _convert_here
    _convert_here = convert
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()  # of large images, which a new one takes: a third of the time were page faults
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait([parent_process().sentinel])
    os._exit(1)
