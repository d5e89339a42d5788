"""Files that appear only when they are complete."""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edm2.errors import UserError

LEFTOVER = "tmp"  # how the name of a file ends that is being written, or was when its process was killed
_UMASK = os.umask(0)
os.umask(_UMASK)  # it can only be read by setting it


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`; what was written there takes the place of `path` if the block succeeds.

    The data is flushed to disk before the rename. If the block fails, `path` is as it was and the temporary file is
    gone. UserError where the file system refuses (no such folder, disk full).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.{LEFTOVER}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_UMASK)  # some writers create files that only their owner may read
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        _remove(temporary)


def make_folder(path: str | Path) -> Path:
    """Create the folder and its parents if needed; UserError where that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot create the folder {path}: {e.strerror or e}") from e
    return path


def sha256(path: str | Path) -> str:
    """Of a file's bytes, hexadecimal; UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e


def _remove(path: Path) -> None:
    with suppress(OSError):  # e.g. its folder does not exist: the error that led here says so better
        path.unlink()
