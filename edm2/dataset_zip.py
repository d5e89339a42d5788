"""How datasets are written: ZIPs of PNGs, in the layout that `image_files` reads, of equal bytes for equal images."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from edm2.files import replacing

UNCOMPRESSED = 2**16  # bytes of an image from which on it is written as it is


def write_zip(path: str | Path, images: Iterable[np.ndarray | bytes], labels: Sequence | None = None) -> None:
    """Write a dataset: an uncompressed ZIP of PNGs named 00000/img00000000.png, ..., and dataset.json.

    images: uint8 [H,W] or [H,W,C], or encoded as PNG, streamed; labels: one class index (or vector) per image, or None. The file appears
    only when complete, and equal input gives equal bytes. ValueError if the number of labels is wrong.
    """
    names = []
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for i, image in enumerate(images):
            names.append(file_name(i, "png"))
            add_file(archive, names[-1], image if isinstance(image, bytes) else encode_png(image))
        entries = None if labels is None else list(zip(names, labels, strict=True))
        add_file(archive, "dataset.json", json.dumps({"labels": entries}).encode())


def file_name(i: int, suffix: str) -> str:
    """Of the file of this number in a dataset."""
    return f"{i // 1000:05d}/img{i:08d}.{suffix}"


def file_info(name: str) -> zipfile.ZipInfo:
    """Of a file in a ZIP, not compressed; dated 1980, so that equal content gives equal bytes."""
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, 0o644 << 16  # else unzip creates unreadable files
    return info


def add_file(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(file_info(name), data)


def encode_png(image: np.ndarray) -> bytes:
    """uint8 [H,W] or [H,W,C], C = 1 or 3. Not compressed if large: photographs hardly can be, and it takes most of the time."""
    if image.dtype != np.uint8:
        raise ValueError(f"write_zip: images must be uint8, got {image.dtype}")
    image = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if image.size < UNCOMPRESSED:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        return buffer.getvalue()
    height, width = image.shape[:2]
    rows = np.zeros((height, 1 + image[0].size), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if image.ndim == 2 else 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 0)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
