"""Downloads from a server on this machine that behaves well, and badly."""

import hashlib
import ssl
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

import edm2
from edm2 import download
from edm2.download import fetch, is_url
from tests.local_server import DATA, Server


@pytest.fixture()
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def left(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".a-1.0.pkl.lock", ".a-1.0.pkl.url"}


def test_once(server, tmp_path):
    path = fetch(server.url, tmp_path / "new")
    assert path == tmp_path / "new" / "a-1.0.pkl" and path.read_bytes() == DATA and left(path.parent) == {path.name}
    assert fetch(server.url, tmp_path / "new") == path and server.requests == [None]


def test_cut_connections(server, tmp_path):
    """Continued each time where they ended."""
    server.cut, server.cuts = 2_000_000, 2
    assert fetch(server.url, tmp_path).read_bytes() == DATA
    assert server.requests == [None, "bytes=2000000-", "bytes=4000000-"] and left(tmp_path) == {"a-1.0.pkl"}


def test_a_later_command_continues(server, tmp_path):
    server.cut, server.cuts = 1_000_000, 1
    server.errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "TRIES", 1)
        with pytest.raises(edm2.UserError, match="the connection ended after 1,000,000 of 5,120,000 bytes"):
            fetch(server.url, tmp_path)
    assert fetch(server.url, tmp_path).read_bytes() == DATA and server.requests[-1] == "bytes=1000000-"


def test_another_file_by_then(server, tmp_path):
    """Of which nothing is put behind the first one's part; nor where the server does not tell them apart."""
    for etag in ('"2"', None):
        server.cut, server.cuts, server.etag = 1_000_000, 1, '"1"' if etag else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(download, "TRIES", 1)
            with pytest.raises(edm2.UserError):
                fetch(server.url, tmp_path)
        server.etag, server.data = etag, bytes(reversed(DATA))
        path = fetch(server.url, tmp_path)
        assert path.read_bytes() == server.data
        path.unlink()


def test_another_address(server, tmp_path):
    """Of a file of the same name, which are many."""
    fetch(server.url, tmp_path)
    with pytest.raises(edm2.UserError, match="a-1.0.pkl is there already, from another address: http://127.0.0.1:.*/networks/"):
        fetch(server.url.replace("networks", "others"), tmp_path)


def test_parts_by_address(server, tmp_path):
    """Files of one name, size and version are not mixed, though a server tells them apart by their addresses alone."""
    server.cut, server.cuts = 1_000_000, 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "TRIES", 1)
        with pytest.raises(edm2.UserError):
            fetch(server.url, tmp_path)
    server.data = bytes(reversed(DATA))
    assert fetch(server.url.replace("networks", "others"), tmp_path).read_bytes() == server.data


@pytest.mark.parametrize("ranged", ["bytes 0-5119999/5120000", "bytes 1000000-1499999/5120000", "bytes 1000000-", "bytes 1000000-/*"])
def test_another_part_than_asked_for(server, tmp_path, ranged):
    server.cut, server.cuts, server.ranged = 1_000_000, 1, ranged
    with pytest.raises(edm2.UserError, match="the server sent another part than asked for: bytes "):
        fetch(server.url, tmp_path)
    assert not (tmp_path / "a-1.0.pkl").exists()


@pytest.mark.parametrize(("status", "encoding"), [(202, None), (204, None), (203, None), (200, "gzip")])
def test_other_answers(server, tmp_path, status, encoding):
    server.status, server.encoding = status, encoding
    with pytest.raises(edm2.UserError, match=f"the server answers {status}, with {encoding or 'identity'} data"):
        fetch(server.url, tmp_path)
    assert not left(tmp_path)


def test_pages(server, tmp_path):
    """In the place of a file: not kept under its name."""
    server.data = b"<html>" + DATA
    with pytest.raises(edm2.UserError, match="is no file of the wanted kind: is the address right"):
        fetch(server.url, tmp_path, known=lambda start: start[:1] == b"\x80")
    assert left(tmp_path) == {".a-1.0.pkl.version"}


def test_trouble_within(server, tmp_path, monkeypatch):
    """Of the network: what has arrived is kept, and continued."""
    read, seen = download.HTTPResponse.read, []

    def trouble(response, count):
        seen.append(count)
        if len(seen) == 3:
            raise ssl.SSLError(1, "decryption failed")
        return read(response, count)

    monkeypatch.setattr(download.HTTPResponse, "read", trouble)
    assert fetch(server.url, tmp_path).read_bytes() == DATA and server.requests == [None, "bytes=2097152-"]


def test_a_part_that_was_all(server, tmp_path):
    (tmp_path / ".a-1.0.pkl.part").write_bytes(DATA)
    (tmp_path / ".a-1.0.pkl.version").write_text('"1"')
    (tmp_path / ".a-1.0.pkl.url").write_text(server.url)
    assert fetch(server.url, tmp_path).read_bytes() == DATA and server.requests == ["bytes=5120000-", None]


def test_a_server_in_trouble(server, tmp_path):
    server.errors = [503, 500]
    assert fetch(server.url, tmp_path).read_bytes() == DATA
    server.errors = [503] * 10
    with pytest.raises(edm2.UserError, match="b.pkl cannot be downloaded: 503"):
        fetch(server.url.replace("a-1.0", "b"), tmp_path)
    assert len(server.requests) == 3 + download.TRIES


def test_not_found(server, tmp_path):
    server.errors = [404]
    with pytest.raises(edm2.UserError, match="a-1.0.pkl cannot be downloaded: 404 Not Found"):
        fetch(server.url, tmp_path)
    assert len(server.requests) == 1 and not left(tmp_path)


def test_no_server_and_no_answer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TRIES", 2)
    with pytest.raises(edm2.UserError, match="cannot be downloaded: .*refused"):
        fetch("http://127.0.0.1:9/a.pkl", tmp_path)
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    server.stalls = True
    with pytest.raises(edm2.UserError, match="cannot be downloaded: .*timed out"):
        fetch(server.url, tmp_path)


def test_checksums(server, tmp_path):
    with pytest.raises(edm2.UserError, match="'0000' is no SHA-256: it has 64 hexadecimal digits"):
        fetch(server.url, tmp_path, "0000")
    assert not server.requests
    good, bad = hashlib.sha256(DATA).hexdigest(), "0" * 64
    with pytest.raises(edm2.UserError, match=f"is another file than expected: its SHA-256 is {good}, not {bad}"):
        fetch(server.url, tmp_path, bad)
    assert not left(tmp_path) - {".a-1.0.pkl.version"}
    path = fetch(server.url, tmp_path, good.upper())
    with pytest.raises(edm2.UserError, match="is another file than expected"):
        fetch(server.url, tmp_path, bad)
    assert path.read_bytes() == DATA  # a user's file is not deleted


def test_several_at_once(server, tmp_path):
    """Download it once. (In threads: a lock is a file's that each opens for itself.)"""
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda _: fetch(server.url, tmp_path), range(4)))
    assert {path.read_bytes() == DATA for path in paths} == {True} and len(server.requests) == 1


@pytest.mark.parametrize("length", ["", "abc", "-5"])
def test_no_length(server, tmp_path, length):
    """Nobody could tell whether the file is whole, but by its checksum."""
    server.length = length
    with pytest.raises(edm2.UserError, match="the server does not tell its length; give its --sha256"):
        fetch(server.url, tmp_path)
    assert not left(tmp_path)
    server.cut, server.cuts = 1_000_000, 1
    checksum = hashlib.sha256(DATA).hexdigest()
    with pytest.raises(edm2.UserError, match="another file than expected"):
        fetch(server.url, tmp_path, checksum)
    assert fetch(server.url, tmp_path, checksum).read_bytes() == DATA


def test_redirects(server, tmp_path):
    for to in ("file:///etc/passwd", "ftp://127.0.0.1/a.pkl", "http://[::1/a.pkl", "http://" + "a" * 70 + ".org/a.pkl"):
        server.redirect = to
        with pytest.raises(edm2.UserError, match="a-1.0.pkl cannot be downloaded"):
            fetch(server.url, tmp_path)
    assert len(server.requests) == 4 and not left(tmp_path)
    request = urllib.request.Request("https://example.org/a.pkl")
    with pytest.raises(edm2.UserError, match="it redirects to http://example.org/b.pkl"):
        download._Redirects().redirect_request(request, None, 302, "Found", {}, "http://example.org/b.pkl")
    assert download._Redirects().redirect_request(request, None, 302, "Found", {}, "https://example.org/b.pkl") is not None


def test_damaged_marks(server, tmp_path):
    """Of what a part is a part of: then it is no part of anything."""
    for mark in (b"\xff\xfe", b'"1"\r\nHost: elsewhere', b""):
        (tmp_path / ".a-1.0.pkl.part").write_bytes(b"wrong")
        (tmp_path / ".a-1.0.pkl.url").write_text(server.url)
        (tmp_path / ".a-1.0.pkl.version").write_bytes(mark)
        path = fetch(server.url, tmp_path)
        assert path.read_bytes() == DATA and server.requests.pop() is None
        path.unlink()


def test_links(server, tmp_path):
    """Whoever may write to the folder cannot make a download write elsewhere."""
    (tmp_path / "theirs").write_bytes(b"12345")
    (tmp_path / ".a-1.0.pkl.part").symlink_to(tmp_path / "theirs")
    (tmp_path / ".a-1.0.pkl.version").write_text('"1"')
    (tmp_path / ".a-1.0.pkl.url").write_text(server.url)
    with pytest.raises(edm2.UserError, match="cannot write .*a-1.0.pkl.part: "):
        fetch(server.url, tmp_path)
    assert (tmp_path / "theirs").read_bytes() == b"12345"


def test_a_folder_that_cannot_be_used(server, tmp_path):
    (tmp_path / ".a-1.0.pkl.lock").mkdir()
    with pytest.raises(edm2.UserError, match="cannot lock"):
        fetch(server.url, tmp_path)
    (tmp_path / "a-1.0.pkl").write_bytes(b"brought here by hand")
    assert fetch(server.url, tmp_path).read_bytes() == b"brought here by hand" and not server.requests
    (tmp_path / "in the way").write_text("")
    with pytest.raises(edm2.UserError, match="cannot create the folder"):
        fetch(server.url, tmp_path / "in the way")


def test_waiting(server, tmp_path, capsys):
    """Is said, since it may take long."""
    lock, held = download.FileLock(tmp_path / ".a-1.0.pkl.lock"), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.3)

    threading.Thread(target=hold).start()
    held.wait()
    assert fetch(server.url, tmp_path).read_bytes() == DATA
    assert "waiting for another process, which downloads a-1.0.pkl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "no address that begins with https"),
        ("ftp://example.org/a.pkl", "no address that begins with https"),
        ("https:///a.pkl", "no address that begins with https"),
        ("https://example.org/", "ends with no file name"),
        ("https://example.org/..", "ends with no file name"),
        ("https://example.org/.hidden", "ends with no file name"),
        ("https://example.org/a%2F..%2Fb", "ends with no file name"),
        ("https://example.org/" + "a" * 250, "ends with no file name"),
        ("https://[::1/a.pkl", "no address that begins with https"),
        ("https://example.org:99999/a.pkl", "no address that begins with https"),
        ("https://" + "a" * 70 + ".org/a.pkl", "no address that begins with https"),
        ("https://exämple.org/a.pkl", "no address that begins with https"),
        ("https://example.org/a b.pkl", "no address that begins with https"),
    ],
)
def test_addresses(url, words, tmp_path):
    with pytest.raises(edm2.UserError, match=words):
        fetch(url, tmp_path)
    assert is_url(url) and not is_url("a/b.pkl") and not is_url("C:\\a.pkl")
