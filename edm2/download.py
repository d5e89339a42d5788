"""Files from the web into a folder, once: with progress, continued after interruptions, compared with a checksum."""

import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout
from tqdm import tqdm

from edm2.errors import UserError
from edm2.files import check_hexadecimal, check_sha256, make_folder, sha256, user_path

TIMEOUT = 30  # seconds without a byte
TRIES, PAUSE = 5, 1.0  # in a row without any; seconds before the second one, more before others
CHUNK = 2**20


def is_url(source: str | Path) -> bool:
    return isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE) is not None


def fetch(url: str, folder: str | Path, checksum: str | None = None, known: Callable[[bytes], bool] = lambda _: True) -> Path:
    """The file at `url`, in `folder` under its own name: downloaded unless it is there.

    `checksum`: SHA-256 that it must have, hexadecimal; `known`: is it a wanted kind of file, by its first bytes? What has arrived
    of an interrupted download is kept and continued, if the file is still the same. Processes that want the same file wait for
    the first. UserError if it cannot be had.
    """
    path = place(url, folder)
    if checksum is not None:
        check_hexadecimal(checksum)
    if not path.is_file():
        make_folder(path.parent)
        with _alone(path):
            if not path.is_file():  # nor has another process brought it
                _bring(url, path, checksum, known)
                return path
    origin = _beside(path, "url")
    try:
        came_from = origin.read_text(errors="replace") if origin.exists() else url
    except OSError as e:
        raise UserError(f"cannot read {origin}: {e.strerror or e}") from e
    if came_from != url:
        raise UserError(f"{path} is there already, from another address: {came_from}")
    if checksum is not None:
        check_sha256(path, checksum)
    return path


def place(url: str, folder: str | Path) -> Path:
    """Where `fetch` puts the file at `url`. UserError for an address that is none."""
    return user_path(folder) / _file_name(url)


def _file_name(url: str) -> str:
    try:
        parts = urlsplit(url)
        parts.hostname.encode("idna")  # AttributeError if there is none
        name = unquote(parts.path.rsplit("/", 1)[-1])
        fine = parts.scheme.lower() in SCHEMES and (parts.port is None or parts.port > 0)
    except (AttributeError, ValueError):
        fine = False
    if not fine or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"{url!r} is no address that begins with https:// or http://, in ASCII")
    if not re.fullmatch(r"\w[\w.+-]{0,199}", name):
        raise UserError(f"{url} ends with no file name")
    return name


SCHEMES = "http", "https"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    lock = FileLock(_beside(path, "lock"))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process, which downloads {path.name}", file=sys.stderr)
            lock.acquire()
    except (OSError, NotImplementedError) as e:
        raise UserError(f"cannot lock {lock.lock_file}: {e}") from e
    try:
        yield
    finally:
        lock.release()


def _bring(url: str, path: Path, checksum: str | None, known: Callable[[bytes], bool]) -> None:
    partial, origin = _beside(path, "part"), _beside(path, "url")
    with _on_disk(path):
        if not origin.exists() or origin.read_text(errors="replace") != url:
            partial.unlink(missing_ok=True)  # of another file of this name
            _write(origin, url)
    _download(url, partial, checksum is not None)
    with _on_disk(path):
        with open(partial, "rb") as file:
            if not known(file.read(16)):
                partial.unlink()
                raise UserError(f"{url} is no file of the wanted kind: is the address right, and not that of a page?")
        if checksum is not None and (found := sha256(partial)) != checksum.lower():
            partial.unlink()
            raise UserError(f"{url} is another file than expected: its SHA-256 is {found}, not {checksum.lower()}")
        os.replace(partial, path)
        _beside(path, "version").unlink(missing_ok=True)


@contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """OSErrors in it are the disk's, and not the network's."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}") from e


def _beside(path: Path, what: str) -> Path:
    """A file that belongs to `path`: its `lock`, its `url`, the `part` of it that has arrived, of which `version` of it."""
    return path.with_name(f".{path.name}.{what}")


def _download(url: str, partial: Path, will_be_checked: bool) -> None:
    """All of it. UserError if nothing more comes, though asked for again and again."""
    failures = 0
    while True:
        before = _size(partial)
        try:
            _continue(url, partial, will_be_checked)
            return
        except urllib.error.HTTPError as e:
            if e.code < 500:
                raise UserError(f"{url} cannot be downloaded: {e.code} {_one_line(e.reason)}") from e
            reason = f"{e.code} {e.reason}"
        except (OSError, HTTPException) as e:
            reason = str(getattr(e, "reason", e)) or type(e).__name__
        failures = failures + 1 if _size(partial) <= before else 1
        if failures == TRIES:
            kept = f"; {before / 2**20:.1f} MiB are kept, and the same command continues" if before else ""
            raise UserError(f"{url} cannot be downloaded: {_one_line(reason)}{kept}")
        time.sleep(PAUSE * failures)


def _one_line(words: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(words))[:300]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To other addresses of the web, and from secure ones to secure ones only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        scheme = urlsplit(newurl).scheme
        if scheme != "https" and (scheme != "http" or req.type == "https"):
            raise UserError(f"{req.full_url} cannot be downloaded: it redirects to {_one_line(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, headers: dict[str, str]) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "edm2-triton"} | headers)
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=TIMEOUT)
    except UserError:
        raise
    except ValueError as e:  # of an address that it redirects to
        raise UserError(f"{url} cannot be downloaded: {_one_line(e)}") from e


def _continue(url: str, partial: Path, will_be_checked: bool) -> None:
    """From where `partial` ends, if the file is the one that it began with; else from its beginning."""
    mark, start = partial.with_suffix(".version"), _size(partial)
    with _on_disk(partial):
        version = mark.read_text(errors="replace") if mark.exists() else ""
    known = start and version and version.isascii() and version.isprintable()
    try:
        response = _open(url, {"Range": f"bytes={start}-", "If-Range": version} if known else {})
    except urllib.error.HTTPError as e:
        if e.code != 416 or not known:
            raise
        partial.unlink()  # there is nothing behind its end: it is another file's, or was complete
        return _continue(url, partial, will_be_checked)
    with response:
        encoding = response.headers.get("Content-Encoding", "identity")
        if response.status not in (200, 206) or encoding != "identity":
            raise UserError(f"{url} cannot be downloaded: the server answers {response.status}, with {_one_line(encoding)} data")
        if response.status == 206 and not (known and _is_rest(response.headers.get("Content-Range", ""), start)):
            raise HTTPException(f"the server sent another part than asked for: {response.headers.get('Content-Range')}")
        if response.length is None and not response.chunked and not will_be_checked:
            raise UserError(f"{url} cannot be downloaded: the server does not tell its length; give its --sha256")
        with _on_disk(partial):
            if response.status != 206:
                start = 0
                partial.unlink(missing_ok=True)  # before another version's mark stands beside it
            _write(mark, response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
            file = open(partial, "ab" if start else "wb", opener=_no_link)
        total = None if response.length is None else start + response.length
        bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=partial.name[1:-5], disable=None)
        with file, bar:
            try:
                while data := response.read(CHUNK):
                    with _on_disk(partial):
                        file.write(data)
                    bar.update(len(data))
            finally:
                with _on_disk(partial):
                    file.flush()
                    os.fsync(file.fileno())
            if total is not None and file.tell() < total:
                raise ConnectionError(f"the connection ended after {file.tell():,} of {total:,} bytes")


def _is_rest(content_range: str, start: int) -> bool:
    """All from `start` on?"""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range)
    return match is not None and int(match[1]) == start and int(match[2]) + 1 == int(match[3])


def _write(path: Path, text: str) -> None:
    with open(path, "w", opener=_no_link, errors="replace") as file:
        file.write(text)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
