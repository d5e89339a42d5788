"""Images on disk: PNG files, grids of them, and threads that write while the next images are made."""

import json
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from edm2.files import make_folder, replacing

FACTS = "edm2"  # the keyword of the text chunk
GAP = 4  # pixels between the images of a grid
THREADS, WAITING = 4, 256  # that write, and files that may wait for them


class Writers:
    """A context manager whose `write(function, *arguments)` has threads call it. Leaving it waits for all of them.

    An error of a thread is raised by a later `write` or on leaving.
    """

    def __enter__(self) -> "Writers":
        self._threads = ThreadPoolExecutor(THREADS)
        self._waiting: deque[Future] = deque()
        return self

    def write(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append(self._threads.submit(function, *arguments))
        while len(self._waiting) > WAITING or self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()


def write_png(path: Path, image: np.ndarray, facts: dict[str, Any] | None = None) -> None:
    """uint8 `[H, W, C]`, grey for one channel; with `facts` as a text chunk in JSON."""
    make_folder(path.parent)
    info = PngInfo()
    if facts is not None:
        info.add_text(FACTS, json.dumps(facts))
    with replacing(path) as temporary:
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(temporary, format="png", pnginfo=info)


def read_facts(path: Path) -> dict[str, Any] | None:
    """Those that `write_png` or `write_array` was given; None where there is no such file."""
    try:
        if path.suffix == ".npy":
            with open(path, "rb") as file:
                np.load(file)
                return json.loads(str(np.load(file)))
        with Image.open(path) as image:
            return json.loads(image.info[FACTS])  # the chunk lies before the pixels, which are not read
    except (OSError, EOFError, KeyError, ValueError):
        return None


def write_array(path: Path, array: np.ndarray, facts: dict[str, Any] | None = None) -> None:
    """As `.npy`; with `facts` in JSON as a second array behind it, which `numpy.load(path)` does not read."""
    make_folder(path.parent)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array)
        if facts is not None:
            np.save(file, np.array(json.dumps(facts)))


def read_png(path: Path) -> np.ndarray:
    """uint8 `[H, W, C]`, as `write_png` took it."""
    with Image.open(path) as image:
        pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def tile(images: np.ndarray, columns: int, scale: int) -> np.ndarray:
    """`[N, H, W, C]` → one picture, row by row, pixels enlarged `scale` times, with `GAP` grey pixels between."""
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    n, h, w, c = images.shape
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + GAP) + GAP, columns * (w + GAP) + GAP, c), 128, np.uint8)
    for i, image in enumerate(images):
        y, x = (GAP + (size + GAP) * k for size, k in zip((h, w), divmod(i, columns)))
        sheet[y : y + h, x : x + w] = image
    return sheet
