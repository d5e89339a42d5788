"""Files from the web into a folder, once: with progress, continued after interruptions, compared with a checksum."""

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from edm2.errors import UserError
from edm2.files import make_folder, sha256

TIMEOUT = 30  # seconds without a byte
TRIES, PAUSE = 5, 1.0  # in a row without any; seconds before the second one, more before others
CHUNK = 2**20
LOCK = ".lock"  # of a folder; it stays there: who waits for it must wait for the same one as others


def is_url(source: str | Path) -> bool:
    return isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE) is not None


def fetch(url: str, folder: str | Path, checksum: str | None = None) -> Path:
    """The file at `url`, in `folder` under its own name: downloaded unless it is there.

    `checksum`: SHA-256 that it must have, hexadecimal. What has arrived of an interrupted download is kept and continued, if
    the file is still the same. Processes that want the same file wait for the first. UserError if it cannot be had.
    """
    path = make_folder(Path(folder).expanduser()) / _file_name(url)
    partial = path.with_name(f".{path.name}.part")
    origin = path.with_name(f".{path.name}.url")
    with _alone(path.with_name(LOCK)):
        if not path.exists():
            _download(url, partial)
            _compare(partial, checksum, url)
            origin.write_text(url)
            os.replace(partial, path)
            _mark_of(partial).unlink(missing_ok=True)
        elif origin.exists() and origin.read_text() != url:
            raise UserError(f"{path} is there already, from another address: {origin.read_text()}")
        else:
            _compare(path, checksum, path)
    return path


def _file_name(url: str) -> str:
    parts = urlsplit(url)
    name = unquote(parts.path.rsplit("/", 1)[-1])
    if parts.scheme.lower() not in ("http", "https") or not parts.netloc:
        raise UserError(f"{url} is no address that begins with https:// or http://")
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(f"{url} ends with no file name")
    return name


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(url: str, partial: Path) -> None:
    """All of it. UserError if nothing more comes, though asked for again and again."""
    failures = 0
    while True:
        before = _size(partial)
        try:
            _continue(url, partial)
            return
        except urllib.error.HTTPError as e:
            if e.code < 500:
                raise UserError(f"{url} cannot be downloaded: {e.code} {e.reason}") from e
            reason = f"{e.code} {e.reason}"
        except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError) as e:
            reason = str(getattr(e, "reason", e)) or type(e).__name__
        except OSError as e:
            raise UserError(f"cannot write {partial}: {e.strerror or e}") from e
        failures = failures + 1 if _size(partial) <= before else 1
        if failures == TRIES:
            kept = f"; {before / 2**20:.1f} MiB are kept, and the same command continues" if before else ""
            raise UserError(f"{url} cannot be downloaded: {reason}{kept}")
        time.sleep(PAUSE * failures)


def _continue(url: str, partial: Path) -> None:
    """From where `partial` ends, if the file is the one that it began with; else from its beginning."""
    mark, start = _mark_of(partial), _size(partial)
    version = mark.read_text() if mark.exists() else ""
    request = urllib.request.Request(url, headers={"User-Agent": "edm2-triton"})
    if start and version:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", version)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        partial.unlink()  # there is nothing behind its end: it is another file's, or was complete
        return _continue(url, partial)
    with response:
        there = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if response.status == 206 and not there:
            raise HTTPException(f"the server sent another part than asked for: {response.headers.get('Content-Range')}")
        if response.status != 206:
            start = 0
            partial.unlink(missing_ok=True)  # before another version's mark stands beside it
        mark.write_text(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=partial.name[1:-5], disable=None)
        with open(partial, "ab" if start else "wb") as file, bar:
            while data := response.read(CHUNK):
                file.write(data)
                bar.update(len(data))
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() < total:
                raise ConnectionError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def _compare(path: Path, checksum: str | None, source: str | Path) -> None:
    if checksum is not None and (found := sha256(path)) != checksum.lower():
        if is_url(source):
            path.unlink()
        raise UserError(f"{source} is another file than expected: its SHA-256 is {found}, not {checksum.lower()}")


def _mark_of(partial: Path) -> Path:
    """Where stands which version of the file `partial` is a part of."""
    return partial.with_suffix(".version")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
