"""Datasets written file by file, so that a command that was interrupted goes on where it was."""

import json
import os
import struct
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from edm2.dataset_zip import add_file, file_info, file_name
from edm2.errors import Unfinished, UserError
from edm2.files import make_folder

RECORDED = 20.0  # seconds between records of what is on the disk
SENT = 2**26  # bytes that are sent there at a time
HEADER = struct.Struct("<4s5H3I2H")  # of a file in a ZIP


class DatasetWriter:
    """The ZIP `path`: 00000/img00000000.png (or another `suffix`), ..., and at the end dataset.json.

    Until `finish` it grows in a hidden file beside `path`. An interruption leaves that, and so does any fault that is not the user's;
    the next writer of the same `job` (all that the files depend on, for JSON) finds `count` files there, with the `state` (for
    JSON) that was given with the last of them. A UserError (bad input, a full disk) removes it, but for `Unfinished`. `anew`: what
    was there was of another job. The same files make the same bytes. UserError where it cannot be written, and while another
    process writes it.
    """

    def __init__(self, path: str | Path, suffix: str, job: Any):
        self.path, self.suffix, self.job = Path(path), suffix, json.loads(json.dumps(job))
        hidden = [self.path.with_name(f".{self.path.name}.{kind}") for kind in ("part", "part.json", "part.json.new", "lock")]
        self.part, self.record, self.new_record, _ = hidden
        self.lock = FileLock(hidden[-1])
        self.count, self.state, self.anew, self.finished = 0, None, False, False
        self.unsent, self.sender, self.sending = 0, ThreadPoolExecutor(1), Future()
        self.sending.set_result(None)

    def __enter__(self) -> "DatasetWriter":
        make_folder(self.path.parent)
        try:
            self.lock.acquire(timeout=0)
        except Timeout as e:
            raise UserError(f"{self.path} is being written by another process") from e
        except OSError as e:
            raise self._refused(e) from e
        try:
            self._open()
        except BaseException:
            self._unlock()
            raise
        return self

    def tell(self, progress: Callable[[int], Any]) -> None:
        """How many files are there already; a warning if some were not of this job."""
        if self.anew:
            warnings.warn(f"{self.path} is begun anew: what was there was made otherwise, or of other files", stacklevel=3)
        progress(self.count)

    def add(self, data: bytes, state: Any = None) -> None:
        """The next file."""
        try:
            add_file(self.archive, file_name(self.count, self.suffix), data)
            self.count, self.state = self.count + 1, state
            self._send(len(data))
            if time.monotonic() - self.recorded > RECORDED:
                self._write_record()
        except OSError as e:
            raise self._refused(e) from e

    def finish(self, facts: dict[str, Any]) -> None:
        """Write dataset.json of these facts, where `labels` are one for each file or None. ValueError for another number of them."""
        labels = facts["labels"]
        names = (file_name(i, self.suffix) for i in range(self.count))
        entries = None if labels is None else list(zip(names, labels, strict=True))
        try:
            add_file(self.archive, "dataset.json", json.dumps(facts | {"labels": entries}).encode())
            self.archive.close()
            self.sending.result()
            self._flush()
            self.file.close()
            os.replace(self.part, self.path)
        except OSError as e:
            raise self._refused(e) from e
        self.finished = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        kept = kind is not None and (issubclass(kind, Unfinished) or not issubclass(kind, UserError))
        if kept and not self.file.closed:
            with suppress(OSError):  # an older record serves
                self._write_record()
        self.sender.shutdown()
        self.archive.fp = None  # else it would write its directory when it is let go
        with suppress(OSError):  # of what a full disk did not take
            self.file.close()
        for path in () if kept else (self.new_record, self.record, self.part):
            path.unlink(missing_ok=True)
        self._unlock()
        if kind is None and not self.finished:
            raise ValueError(f"{self.path} was not finished")

    def _open(self) -> None:
        try:
            found, there = self._read_record(), self.part.exists()
            self.file = open(self.part, "r+b" if found else "w+b")
            if found:
                entries = list(_entries(self.file, found["size"]))
                found = found if len(entries) == found["count"] else None
            self.anew = found is None and there and self.record.exists()
            self.file.seek(found["size"] if found else 0)
            self.file.truncate()
        except OSError as e:
            raise self._refused(e) from e
        self.archive = zipfile.ZipFile(self.file, "w", zipfile.ZIP_STORED)
        self.recorded = time.monotonic()
        if found:
            self.archive.filelist.extend(entries)
            self.archive.NameToInfo.update((entry.filename, entry) for entry in entries)
            self.count, self.state = found["count"], found["state"]

    def _read_record(self) -> dict[str, Any] | None:
        """Of what is there of the same job; None where there is nothing, or no sense in it."""
        try:
            found = json.loads(self.record.read_text())
            count, size = found["count"], found["size"]
            same = found["job"] == self.job and found["suffix"] == self.suffix
            whole = type(count) is type(size) is int and 0 <= size <= self.part.stat().st_size
            return {"count": count, "size": size, "state": found["state"]} if same and whole else None
        except (OSError, LookupError, RecursionError, TypeError, ValueError):
            return None

    def _write_record(self) -> None:
        """What is on the disk by now."""
        self._flush()
        facts = {"job": self.job, "suffix": self.suffix, "count": self.count, "size": self.file.tell(), "state": self.state}
        with open(self.new_record, "w") as file:
            json.dump(facts, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.new_record, self.record)
        self.recorded = time.monotonic()

    def _send(self, size: int) -> None:
        """Begin to bring to the disk what was written: at the end there is little left to wait for."""
        self.unsent += size
        if self.unsent > SENT and self.sending.done():
            self.unsent = 0
            self.file.flush()
            self.sending = self.sender.submit(os.fsync, self.file.fileno())

    def _flush(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def _refused(self, e: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {e.strerror or e}")

    def _unlock(self) -> None:
        Path(self.lock.lock_file).unlink(missing_ok=True)  # while it is still ours
        self.lock.release()


def _entries(file: BinaryIO, size: int) -> Iterator[zipfile.ZipInfo]:
    """Of the files in the first `size` bytes of a ZIP that has no directory yet, none compressed; up to the first that makes no sense."""
    start = 0
    while start < size:
        file.seek(start)
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(b"PK\3\4"):
            return
        *_, checksum, packed, length, name_length, extra = HEADER.unpack(header)
        info = file_info(file.read(name_length).decode("ascii", "replace"))
        info.header_offset, info.CRC, info.compress_size, info.file_size = start, checksum, packed, length
        start += HEADER.size + name_length + extra + packed
        if start > size:
            return
        yield info
