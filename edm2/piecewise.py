"""Snapshots read and written piece by piece: of many at a time, only what is being computed with lies in memory."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from edm2.errors import UserError
from edm2.latents import Encoder, encoder_from_config
from edm2.snapshot import read_file

T = TypeVar("T")
TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass
class OpenSnapshot(Generic[T]):
    """A file's header, and by name where the tensors are: `T` has a `shape`, a `dtype`, and `read(start, count)`, which returns
    so many of its numbers, by default all, in one row."""

    config: dict[str, Any]
    tensors: dict[str, T]
    encoder: Encoder | None
    meta: dict[str, Any]


class Slice(NamedTuple):
    """A tensor in a file."""

    file: BinaryIO
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int = 0, count: int | None = None) -> Tensor:
        x = torch.empty(math.prod(self.shape) - start if count is None else count, dtype=self.dtype)
        self.file.seek(self.offset + start * self.dtype.itemsize)
        data = memoryview(x.view(torch.uint8).numpy())
        if self.file.readinto(data) != len(data):
            raise UserError(f"{self.file.name} is truncated")
        return x


@contextmanager
def open_tensors(path: str | Path) -> Iterator[OpenSnapshot[Slice]]:
    """A snapshot whose tensors are read piece by piece, without what a mapping of the file would keep in memory. UserError as
    `load_snapshot`, but for what its network says of its tensors."""
    header, _ = read_file(path, lambda _: None)
    try:
        with open(path, "rb", buffering=0) as file:
            length = int.from_bytes(file.read(8), "little")
            places = json.loads(file.read(length))  # which the library has found to be right
            places.pop("__metadata__", None)
            tensors = {
                name: Slice(file, 8 + length + place["data_offsets"][0], TYPES[place["dtype"]], tuple(place["shape"]))
                for name, place in places.items()
            }
            encoder = header["encoder"] and encoder_from_config(header["encoder"])
            yield OpenSnapshot(header["config"], tensors, encoder or None, header["meta"])
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e


class Writer:
    """A snapshot file written piece by piece: tensors of these shapes and types, in the order in which they stand."""

    def __init__(self, path: Path, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]):
        kinds, places, end = {dtype: name for name, dtype in TYPES.items()}, {}, 0
        for name, (shape, dtype) in forms.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            places[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header = json.dumps({"__metadata__": metadata} | places).encode()
        header += b" " * (-len(header) % 8)
        self.path, self.left, self.file = path, end, open(path, "wb")
        self.file.write(len(header).to_bytes(8, "little") + header)

    def write(self, x: Tensor) -> None:
        """The next numbers, in their type."""
        data = memoryview(x.contiguous().view(torch.uint8).numpy())
        self.left -= len(data)
        self.file.write(data)

    def close(self) -> None:
        self.file.close()

    def finish(self) -> None:
        """OSError where the disk is full; UserError if it is not of the size that its tensors take."""
        self.close()
        if self.left:
            lack = f"{abs(self.left):,} bytes {'too few' if self.left > 0 else 'too many'}"
            raise UserError(f"cannot write {self.path}: {lack}; were the snapshots changed meanwhile? Give the command again")
