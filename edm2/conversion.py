"""Images of any kind made alike: decoded, cropped, scaled and encoded, by several processes, in order."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL import Image

from edm2.errors import UserError
from edm2.image_files import ImageFiles, encode_png

CHUNK, AHEAD = 16, 4  # images that a process is given at a time; times so many for each process
Transform = Callable[[Image.Image, int, int], Image.Image]  # of a width and height in pixels


class Encoded(NamedTuple):
    """A PNG and its size in pixels."""

    data: bytes
    width: int
    height: int


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
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - width) // 2
    return image.crop((left, top, left + width, top + width))


TRANSFORMS: dict[str, Transform] = {
    "center-crop": center_crop,
    "center-crop-wide": center_crop_wide,
    "center-crop-dhariwal": center_crop_dhariwal,
}


def converted(
    files: ImageFiles, mode: str = "RGB", transform: str | None = None, size: tuple[int, int] | None = None, workers: int | None = None
) -> Iterator[bytes]:
    """Each image as a PNG of `mode` (RGB or L), cropped and scaled to `size` (width, height) by the `transform` of that name, or as
    it is. The same bytes for any number of `workers`, default the processor's cores. UserError for damaged ones, and for sizes
    that differ."""
    workers = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) if workers is None else workers
    convert = partial(_convert, files, mode, transform, size)
    chunks = [files.names[start : start + CHUNK] for start in range(0, len(files.names), CHUNK)]
    parts = map(convert, chunks) if workers <= 1 or len(chunks) < 2 else _in_order(convert, chunks, workers)
    first: Encoded | None = None
    for names, images in zip(chunks, parts):
        for name, image in zip(names, images):
            first = first or image
            if image[1:] != first[1:]:
                sizes = f"{image.width}x{image.height} but {files.names[0]} is {first.width}x{first.height}"
                raise UserError(f"{files.where(name)} is {sizes}; give --resolution")
            yield image.data


def _convert(files: ImageFiles, mode: str, transform: str | None, size: tuple[int, int] | None, names: list[str]) -> list[Encoded]:
    found = []
    for name in names:
        image = files.image(name).convert(mode)
        if transform is not None and size is not None:
            image = TRANSFORMS[transform](image, *size)
        found.append(Encoded(encode_png(np.asarray(image)), *image.size))
    return found


def _in_order(convert: Callable[[list[str]], list[Encoded]], chunks: list[list[str]], workers: int) -> Iterator[list[Encoded]]:
    """What several processes make of the chunks, of which only a few are on their way: they may be gigabytes."""
    coming: deque[Future[list[Encoded]]] = deque()
    with ProcessPoolExecutor(workers) as pool:
        try:
            for chunk in chunks:
                coming.append(pool.submit(convert, chunk))
                if len(coming) > AHEAD * workers:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
