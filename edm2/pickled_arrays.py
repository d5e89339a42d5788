"""NumPy's arrays in pickles that are read as data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from edm2.pickled import Object, Refused, Span

KINDS = "b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"


class DType(Object):
    """Of numbers, little-endian."""

    def __init__(self, name: str, *_: Any):
        super().__init__("numpy.dtype")
        if name not in KINDS:
            raise Refused("an array of other things than numbers")
        self.dtype = np.dtype(name)

    def build(self, state: Any) -> None:
        super().build(state)
        if state[1] not in ("<", "|", "="):
            raise Refused("an array that is not little-endian")


class Room:
    """Bytes that arrays may still take, all in all."""

    def __init__(self, size: int):
        self.size = self.left = size

    def take(self, data: Any) -> bytes:
        if not isinstance(data, bytes | Span):
            raise Refused("damaged: bytes that are none")
        self.left -= data.length if isinstance(data, Span) else len(data)
        if self.left < 0:
            raise Refused(f"arrays of more than {self.size:,} bytes")
        return data.read() if isinstance(data, Span) else data


class Array(Object):
    """An array: empty until it has its state."""

    def __init__(self, room: Room, *_: Any):
        super().__init__("numpy.ndarray")
        self.array, self.room = np.empty(0), room

    def build(self, state: Any) -> None:
        super().build(state)
        _, shape, dtype, by_columns, data = state
        self.fill(data, dtype, shape, by_columns)

    def fill(self, data: Any, dtype: Any, shape: Any, by_columns: bool) -> "Array":
        if not isinstance(dtype, DType):
            raise Refused("an array in a form that this reader does not know")
        self.array = np.frombuffer(self.room.take(data), dtype.dtype).reshape(sizes(shape), order="F" if by_columns else "C")
        return self


def array_names(size: int) -> dict[tuple[str, str], Callable[..., Any]]:
    """What pickles call to make arrays, of `size` bytes at most in all: an allow-list for `read_pickle`."""
    room = Room(size)
    names: dict[tuple[str, str], Callable[..., Any]] = {("numpy", "dtype"): DType, ("numpy", "ndarray"): partial(Array, room)}
    for core in ("numpy.core", "numpy._core"):  # before NumPy 2 and since
        names[f"{core}.multiarray", "_reconstruct"] = partial(Array, room)
        names[f"{core}.multiarray", "scalar"] = lambda dtype, data: Array(room).fill(data, dtype, (), False)
        names[f"{core}.numeric", "_frombuffer"] = lambda data, dtype, shape, order: Array(room).fill(data, dtype, shape, order == "F")
    return names


def sizes(shape: Any) -> tuple[int, ...]:
    """As it is. Refused if it is none."""
    if not isinstance(shape, tuple) or len(shape) > 16 or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
        raise Refused("damaged: sizes that are none")
    return shape
