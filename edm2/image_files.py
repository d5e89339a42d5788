"""Image files on disk: a folder or a ZIP of images (or `.npy` arrays) with a `dataset.json`.

`dataset.json` is {"labels": [[file name, label], ...] or null}. Integer labels are class indices, lists of numbers
are label vectors. This is the layout of the official release's datasets.
"""

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from edm2.ahead import in_order
from edm2.errors import UserError

LARGEST = 2**30  # bytes of a file in a ZIP, which may be compressed a thousandfold
READ_AHEAD = 64  # files that are read before they are looked at
EXPECTED = 'expected {"labels": [[file name, label], ...]} or null'
BY_OTHERS = "EPS", "PDF", "WMF", "MPEG", "HDF5", "GRIB", "BUFR"  # formats that run a program, or that Pillow but knows by name
MAX_CLASSES = 2**20  # a class index beyond is a mistake: one-hot labels would not fit in memory


class ImageFiles:
    """The image files of a folder (with its sub-folders) or ZIP: `names` sorted, relative to `path`.

    Hidden files and files of other kinds are skipped. Safe to fork and to pickle: each process opens the ZIP anew.
    UserError if the path does not exist, is neither folder nor ZIP, holds no image, files whose names lead out of it, or folders
    that cannot be read to their end.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._zip, self._zip_pid = None, None
        if not self.path.exists():
            raise UserError(f"dataset {path} does not exist; give a folder or ZIP of images")
        found = set(_walk(self.path) if self.path.is_dir() else self._names_in_zip())
        suffixes = _image_suffixes()
        visible = (name for name in found if "/." not in f"/{name}")
        self.names = sorted(name for name in visible if os.path.splitext(name)[1].lower() in suffixes)
        self.has_json = "dataset.json" in found
        if not self.names:
            raise UserError(f"{path} holds no images; expected PNG, JPEG, ... or .npy files")

    def __getstate__(self):
        return {**self.__dict__, "_zip": None}

    def _open_zip(self) -> zipfile.ZipFile:
        # A forked process shares its parent's file position, so a handle serves only the process that opened it.
        if self._zip is None or self._zip_pid != os.getpid():
            try:
                self._zip, self._zip_pid = zipfile.ZipFile(self.path), os.getpid()
            except Exception as e:  # of a damaged one it raises almost anything
                raise UserError(f"{self.path} is neither a folder nor a readable ZIP ({e})") from e
        return self._zip

    def _names_in_zip(self) -> list[str]:
        names = self._open_zip().namelist()
        for name in filter(_leads_out, names):
            raise UserError(f"{self.path} holds {name!r}, which is no path inside it; remove or rename that")
        return names

    def where(self, name: str) -> str:
        """The file's full name, for messages."""
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes:
        """The file's bytes; UserError if they cannot be read."""
        with _reading(self.where(name)):
            if self.path.is_dir():
                return (self.path / name).read_bytes()
            info = self._open_zip().getinfo(name)
            if info.file_size > LARGEST:
                raise ValueError(f"{info.file_size / 2**30:.1f} GiB, which no image has")
            return self._open_zip().read(info)

    def image(self, name: str, upright: bool = False) -> Image.Image:
        """The decoded image, mode L (grey) or RGB; palettes become RGB, alpha is dropped; turned as its EXIF data say if `upright`.
        UserError if damaged."""
        data = self.read(name)
        with _reading(self.where(name)), Image.open(io.BytesIO(data), formats=_formats()) as image:
            if upright:
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode[0] in "IF":
                raise ValueError(f"{image.mode} pixels would lose precision; store 8 bits per channel")
            if image.mode in ("P", "PA"):
                image = image.convert("RGBA")  # straight to RGB, Pillow warns about transparent palettes
            return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")

    def array(self, name: str) -> np.ndarray:
        """The file as [C,H,W]: uint8 for images, uint8 or float32 as stored for `.npy`. UserError if damaged."""
        if not name.lower().endswith(".npy"):
            pixels = np.array(self.image(name))  # [H,W] or [H,W,C]
            return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))
        data = self.read(name)
        with _reading(self.where(name)):
            array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if array.ndim != 3 or array.dtype not in (np.uint8, np.float32):
                raise ValueError(f"expected uint8 or float32 [C,H,W], got {array.dtype} {list(array.shape)}")
            if not array.size or array.dtype == np.uint8 and len(array) not in (1, 3):
                raise ValueError(f"expected pixels of 1 or 3 channels, or latents, got {array.dtype} {list(array.shape)}")
            return np.ascontiguousarray(array)

    def identity(self) -> str:
        """A checksum of the files' names, sizes and times (in a ZIP: checksums)."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(repr((name, *self._stamp(name))).encode())
        return digest.hexdigest()

    def _stamp(self, name: str) -> tuple[int, int]:
        with _reading(self.where(name)):
            if self.path.is_dir():
                stat = (self.path / name).stat()
                return stat.st_size, stat.st_mtime_ns
            info = self._open_zip().getinfo(name)
            return info.file_size, info.CRC

    def arrays(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, np.ndarray | UserError]]:
        """Each file's name and `array`, or what is wrong with it, in order; read by several threads, a few ahead. Default: all."""

        def read(name: str) -> np.ndarray | UserError:
            try:
                return self.array(name)
            except UserError as e:
                return e

        names = self.names if names is None else names
        return zip(names, in_order(ThreadPoolExecutor(os.cpu_count()), read, names, READ_AHEAD))

    def labels(self) -> np.ndarray | None:
        """Class indices int64 [n] or label vectors float32 [n,L] in the order of `names`; None if there are none.

        UserError if dataset.json is malformed, lacks a file or mixes kinds of label.
        """
        if not self.has_json:
            return None
        entries = self._label_entries()
        if entries is None:
            return None
        for fault in self._label_faults(entries):
            raise UserError(fault)
        table = dict(entries)
        labels = [table[name] for name in self.names]
        return np.array(labels, np.float32 if isinstance(labels[0], list) else np.int64)

    def label_faults(self) -> Iterator[str]:
        """A line for each that `labels` would refuse, and for each label of a file that is not there."""
        try:
            entries = self._label_entries() if self.has_json else None
        except UserError as e:
            yield str(e)
            return
        if entries is not None:
            yield from self._label_faults(entries)
            where, there = self.where("dataset.json"), set(self.names)
            yield from (f"{where} has a label for {name}, which is not there" for name, _ in entries if name not in there)

    def _label_entries(self) -> list[tuple[str, Any]] | None:
        try:
            entries = self._facts()["labels"]
            return None if entries is None else [(name.replace("\\", "/"), label) for name, label in entries]
        except UserError:
            raise
        except Exception as e:  # no such key, not pairs, not a name, ...
            raise UserError(f"{self.where('dataset.json')} is malformed; {EXPECTED}") from e

    def _label_faults(self, entries: list[tuple[str, Any]]) -> Iterator[str]:
        where = self.where("dataset.json")
        table: dict[str, Any] = {}
        for name, label in entries:
            if table.setdefault(name, label) != label:
                yield f"{where} has two labels for {name}: {repr(table[name])[:50]} and {repr(label)[:50]}"
        first = table.get(self.names[0])
        length = len(first) if isinstance(first, list) and first else None
        wanted = f"an integer from 0 to {MAX_CLASSES - 1}" if length is None else f"a list of {length} finite numbers"
        for name in self.names:
            if name not in table:
                yield f"{where} has no label for {name}; add one or remove the file"
            elif not _is_label(table[name], length):
                yield f"{where}: the label of {name} is {repr(table[name])[:50]}; expected {wanted}, as for all images"


    def class_names(self) -> list[str] | None:
        """Those of the classes, by index, if dataset.json tells them. UserError if it is malformed."""
        names = self._facts().get("classes") if self.has_json else None
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None

    def latents(self) -> Any:
        """What dataset.json tells of latents, as it stands there; None if nothing. UserError if it is malformed."""
        return self._facts().get("latents") if self.has_json else None

    def _facts(self) -> dict[str, Any]:
        text = self.read("dataset.json")
        try:
            return dict(json.loads(text))
        except (RecursionError, TypeError, ValueError) as e:  # not JSON, not a dictionary
            raise UserError(f"{self.where('dataset.json')} is malformed; {EXPECTED}") from e


@lru_cache
def _formats() -> tuple[str, ...]:
    """Those that Pillow reads by itself."""
    Image.init()
    return tuple(name for name in Image.OPEN if name not in BY_OTHERS)


@lru_cache
def _image_suffixes() -> set[str]:
    return {suffix for suffix, name in Image.registered_extensions().items() if name in _formats()} | {".npy"}


def _leads_out(name: str) -> bool:
    """Absolute, on any system, or through a parent."""
    parts = re.split(r"[/\\]", name)
    return not parts[0] or ".." in parts or bool(re.match("[A-Za-z]:", name))


def _walk(root: Path) -> Iterator[str]:
    """Names of all files below it, also behind links. UserError for a folder that cannot be read, and for a link to one above."""

    def refuse(e: OSError):
        raise UserError(f"cannot read {e.filename}: {e.strerror}") from e

    above: dict[str, list[os.stat_result]] = {str(root): []}
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        parents = [*above.pop(folder), os.stat(folder)]
        for path in (os.path.join(folder, name) for name in subfolders):
            if os.path.islink(path) and any(os.path.samestat(os.stat(path), parent) for parent in parents):
                raise UserError(f"{path} is a link to a folder that it is in; remove it")
            above[path] = parents
        prefix = Path(folder).relative_to(root).as_posix()
        yield from names if prefix == "." else (f"{prefix}/{name}" for name in names)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Any failure inside becomes a UserError: a damaged file makes decoders raise almost anything."""
    try:
        yield
    except UserError:
        raise
    except UnidentifiedImageError as e:
        raise UserError(f"cannot read {where}: not an image; replace or remove it") from e
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"cannot read {where}: {reason}; replace or remove it") from e


def _is_label(label, length: int | None) -> bool:
    if length is None:
        return type(label) is int and 0 <= label < MAX_CLASSES
    numbers = type(label) is list and all(type(v) in (int, float) for v in label)
    return numbers and len(label) == length and all(abs(v) < 3e38 for v in label)  # finite in float32
