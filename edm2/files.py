"""Files that appear only when they are complete."""

import fcntl
import hashlib
import os
import re
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
    temporary = _temporary(path)
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Of several processes that want to change what is in `folder`, one at a time is within; where the file system has no locks, all."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def user_path(path: str | Path) -> Path:
    """With `~` as the shell understands it. UserError for a user who is not there, and for a name that no file can have."""
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
        return expanded
    except (OSError, RuntimeError, ValueError) as e:
        raise UserError(f"{str(path)[:300]!r} is no file's name: {getattr(e, 'strerror', None) or e}") from e


def make_folder(path: str | Path) -> Path:
    """Create the folder and its parents if needed; UserError where that cannot be."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot create the folder {path}: {e.strerror or e}") from e
    return path


def check_writable(path: str | Path) -> None:
    """Creates its folder, and sees that a file can be written there: before what takes long. UserError if not."""
    path = Path(path)
    make_folder(path.parent)
    temporary = _temporary(path)
    try:
        temporary.touch()
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        _remove(temporary)


def check_sha256(path: str | Path, checksum: str) -> None:
    """UserError unless the file has it, hexadecimal."""
    check_hexadecimal(checksum)
    if (found := sha256(path)) != checksum.lower():
        raise UserError(f"{path} is another file than expected: its SHA-256 is {found}, not {checksum.lower()}")


def check_hexadecimal(checksum: str) -> None:
    if not re.fullmatch("[0-9a-fA-F]{64}", checksum):
        raise UserError(f"{checksum!r} is no SHA-256: it has 64 hexadecimal digits")


def sha256(path: str | Path) -> str:
    """Of a file's bytes, hexadecimal; UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror or e}") from e


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.{LEFTOVER}")


def _remove(path: Path) -> None:
    with suppress(OSError):  # e.g. its folder does not exist: the error that led here says so better
        path.unlink()
