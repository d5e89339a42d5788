"""PyTorch's archives (`torch.save`) read as data: containers, numbers and words, and of each tensor what it is."""

import io
import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edm2.errors import UserError
from edm2.pickled import Object, read_pickle

DATA = "data.pkl"  # all but the tensors' numbers
LARGEST = 2**26  # bytes of it; that of a training state of EDM2-XXL has less than a twentieth
TYPES = {"FloatStorage": "f4", "DoubleStorage": "f8", "HalfStorage": "f2", "LongStorage": "i8", "IntStorage": "i4", "BoolStorage": "?"}
SMALL = 64  # bytes of a storage that is read too


class Stored(NamedTuple):
    """A tensor in a file: its shape, and its only number if it is a scalar, else None."""

    shape: tuple[int, ...]
    value: float | None


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int


class _Ordered(dict, Object):
    """An OrderedDict, which may have attributes."""

    def __init__(self):
        Object.__init__(self, "collections.OrderedDict")


def is_zip(path: Path) -> bool:
    """Does it begin as ZIPs do?"""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"PK"
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e


def is_archive(path: Path) -> bool:
    """Does this ZIP hold what `torch.save` writes? UserError for a damaged one."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith(f"/{DATA}") for name in file.namelist())
    except Exception as e:  # the reader raises almost anything
        raise UserError(f"{path} is a damaged ZIP ({e})") from e


def read_archive(path: Path) -> Any:
    """What was saved, with a `Stored` for each tensor. Nothing in the file is executed. May raise any exception for a file that
    is damaged, or holds more than data."""
    with zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith(f"/{DATA}"))

        def part(name: str, most: int) -> bytes:
            info = file.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
                raise ValueError(f"{name[-40:]} is compressed or too large")
            return file.read(info)

        def tensor(storage: _Storage, offset: int, shape: tuple[int, ...], *_: Any) -> Stored:
            sizes = offset, storage.size, *shape
            if len(sizes) > 18 or not all(type(n) is int and 0 <= n < 2**48 for n in sizes) or offset + math.prod(shape) > storage.size:
                raise ValueError("a tensor beyond its numbers")
            dtype = np.dtype(TYPES.get(storage.kind, "V1"))
            if shape or dtype.kind == "V" or storage.size * dtype.itemsize > SMALL:
                return Stored(shape, None)
            numbers = part(f"{name.removesuffix(DATA)}data/{storage.key}", SMALL)
            return Stored(shape, np.frombuffer(numbers, dtype)[offset].item())

        def persistent(what: Any) -> _Storage:
            _, kind, key, _, size = what
            if not isinstance(key, str) or len(key) > 100:
                raise ValueError("numbers without a name")
            return _Storage(kind.name.removeprefix("torch."), key, size)

        allowed = {("torch", kind): lambda: None for kind in (*TYPES, "BFloat16Storage", "ByteStorage")}
        allowed |= {("torch._utils", "_rebuild_tensor_v2"): tensor, ("collections", "OrderedDict"): _Ordered}
        data = part(name, LARGEST)
        return read_pickle(io.BytesIO(data), len(data), allowed, persistent, numbered=True)
