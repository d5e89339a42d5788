"""Makes the files of datasets for tests."""

import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from edm2.errors import UserError
from edm2.image_files import ImageFiles


def encode(pixels: np.ndarray, fmt: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    if fmt == "npy":
        np.save(buffer, pixels, **options)
    else:
        Image.fromarray(pixels).save(buffer, fmt, **options)
    return buffer.getvalue()


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


def make(path, files: dict[str, bytes], labels="absent"):
    """A dataset of the given files: a ZIP if the path says so, else a folder."""
    if labels != "absent":
        files = {**files, "dataset.json": json.dumps({"labels": labels}).encode()}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    return path


def told_of_latents(path) -> dict:
    """What a dataset tells of its latents."""
    return ImageFiles(path).latents()


def fails(message: str):
    """Expects a UserError of one line that contains `message`."""
    return pytest.raises(UserError, match=rf"(?s)\A(?!.*\n).*{message}")


PNG = encode(pixels(0, 32, 32, 3))
