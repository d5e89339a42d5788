"""Datasets written file by file: interruptions at any moment, and what is left."""

import json
import os
import resource
import signal
import time
import zipfile
from pathlib import Path

import pytest

import edm2
from edm2 import dataset_writer
from edm2.dataset_writer import DatasetWriter
from edm2.errors import Unfinished
from edm2.image_files import ImageFiles
from tests.dataset_files import encode, fails, pixels

FILES = [encode(pixels(i, 4 + i % 3, 5, 3)) for i in range(30)]
LABELS = {"labels": list(range(30))}


@pytest.fixture(params=[0.0, 1e9], ids=["recorded each time", "recorded when interrupted"])
def recorded(request, monkeypatch):
    monkeypatch.setattr(dataset_writer, "RECORDED", request.param)


def write(path, until=30, job="a", error=None, suffix="png") -> int:
    """Those that are not there yet; returns how many were."""
    with DatasetWriter(path, suffix, job) as writer:
        there = writer.count
        for i in range(there, until):
            assert writer.state == (None if i == 0 else {"i": i - 1})
            writer.add(FILES[i], {"i": i})
        if error is not None:
            raise error
        writer.finish(LABELS)
    return there


def left(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a.zip"
    assert write(path) == 0 and left(path.parent) == {"a.zip"}
    return path.read_bytes()


def test_contents(whole, tmp_path):
    (tmp_path / "a.zip").write_bytes(whole)
    files = ImageFiles(tmp_path / "a.zip")
    assert [files.read(name) for name in files.names] == FILES and files.labels().tolist() == LABELS["labels"]
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        assert file.testzip() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_interruptions(whole, tmp_path, recorded, error):
    """One after the other; the bytes are those of a writer that was not interrupted."""
    for until in (10, 10, 23, 30):
        with pytest.raises(type(error)):
            write(tmp_path / "a.zip", until=until, error=error)
        assert left(tmp_path) == {".a.zip.part", ".a.zip.part.json"}
        assert json.loads((tmp_path / ".a.zip.part.json").read_text())["count"] == until
    assert write(tmp_path / "a.zip") == 30
    assert (tmp_path / "a.zip").read_bytes() == whole and left(tmp_path) == {"a.zip"}


@pytest.mark.parametrize("error", [Unfinished("killed"), ValueError("a fault"), RuntimeError("another process is gone")])
def test_what_is_not_the_users_fault_loses_nothing(whole, tmp_path, recorded, error):
    with pytest.raises(type(error)):
        write(tmp_path / "a.zip", until=20, error=error)
    assert write(tmp_path / "a.zip") == 20 and (tmp_path / "a.zip").read_bytes() == whole


@pytest.mark.parametrize("error", [edm2.UserError("damaged")])
def test_errors_leave_nothing(tmp_path, recorded, error):
    (tmp_path / "a.zip").write_bytes(b"precious")
    with pytest.raises(type(error)):
        write(tmp_path / "a.zip", until=20, error=error)
    assert left(tmp_path) == {"a.zip"} and (tmp_path / "a.zip").read_bytes() == b"precious"


def interrupted(tmp_path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.zip", until=20, error=KeyboardInterrupt())
    return tmp_path / ".a.zip.part"


def test_more_than_was_recorded(whole, tmp_path):
    """After a power cut, or a kill, there may be anything behind."""
    part = interrupted(tmp_path)
    with open(part, "ab") as file:
        file.write(b"half a file" * 1000)
    assert write(tmp_path / "a.zip") == 20
    assert (tmp_path / "a.zip").read_bytes() == whole


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "no record", "half a record", "other count", "no part"])
def test_damage(whole, tmp_path, damage):
    """Then it is written anew."""
    part = interrupted(tmp_path)
    record = tmp_path / ".a.zip.part.json"
    text = record.read_text()
    if damage == "shorter":
        os.truncate(part, part.stat().st_size - 1)
    elif damage == "other bytes":
        part.write_bytes(bytes(part.stat().st_size))
    elif damage == "no record":
        record.unlink()
    elif damage == "no part":
        part.unlink()
    else:
        record.write_text(text[:50] if damage == "half a record" else text.replace('"count": 20', '"count": 19'))
    with DatasetWriter(tmp_path / "a.zip", "png", "a") as writer:
        assert (writer.count, writer.state, writer.anew) == (0, None, damage not in ("no record", "no part"))
        for data in FILES:
            writer.add(data)
        writer.finish(LABELS)
    assert (tmp_path / "a.zip").read_bytes() == whole


def test_other_jobs(whole, tmp_path):
    for job, suffix in (("b", "png"), ("a", "npy")):
        interrupted(tmp_path)
        with DatasetWriter(tmp_path / "a.zip", suffix, job) as writer:
            assert writer.anew and writer.count == 0
            with pytest.warns(UserWarning, match="a.zip is begun anew"):
                writer.tell(lambda count: None)
            writer.finish({"labels": None})
    told = []
    interrupted(tmp_path)
    with DatasetWriter(tmp_path / "a.zip", "png", "a") as writer:
        writer.tell(told.append)
        writer.finish({"labels": None})
    assert told == [20]


def test_two_at_once(tmp_path):
    with DatasetWriter(tmp_path / "a.zip", "png", "a") as writer:
        with fails("a.zip is being written by another process"):
            write(tmp_path / "a.zip")
        writer.finish({"labels": None})
    assert left(tmp_path) == {"a.zip"}


def test_labels_and_the_end(tmp_path):
    with pytest.raises(ValueError, match="zip"), DatasetWriter(tmp_path / "a.zip", "png", "a") as writer:
        writer.add(FILES[0])
        writer.finish(LABELS)
    with pytest.raises(ValueError, match="was not finished"), DatasetWriter(tmp_path / "b.zip", "png", "a") as writer:
        writer.add(FILES[0])
    assert not {"a.zip", "b.zip"} & left(tmp_path)


def forked(run) -> int:
    """The process number of a child that calls it, and nothing else."""
    child = os.fork()
    if child == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        try:
            run()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("limit", [500, 50_000, 104_000, 110_000])
def test_a_full_disk(tmp_path, limit):
    """Among the files, and in the directory behind them: one line, and nothing left."""
    path, told = tmp_path / "a.zip", tmp_path.with_name("told")

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            with DatasetWriter(path, "png", "a") as writer:
                for _ in range(100):
                    writer.add(b"x" * 1000)
                writer.finish({"labels": None})
        except edm2.UserError as e:
            told.write_text(str(e))

    os.waitpid(forked(fill), 0)
    assert told.read_text() == f"cannot write {path}: File too large"
    assert left(tmp_path) == set()


def test_into_nowhere(tmp_path):
    (tmp_path / "file").write_text("")
    with fails("cannot create the folder"):
        write(tmp_path / "file" / "a.zip")
    (tmp_path / "b.zip").mkdir()
    with fails("cannot write .*b.zip: Is a directory"):
        write(tmp_path / "b.zip")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_kills(whole, tmp_path, monkeypatch, number):
    """At some moment; what was recorded is gone on with."""
    monkeypatch.setattr(dataset_writer, "RECORDED", 0.02)
    path = tmp_path / "a.zip"

    def slowly():
        with DatasetWriter(path, "png", "a") as writer:
            for data in FILES[:20]:
                time.sleep(0.02)
                writer.add(data)
            time.sleep(600)  # it is killed before its end, however slow this machine is

    child = forked(slowly)
    while not (tmp_path / ".a.zip.part.json").exists():
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(child, number)
    os.waitpid(child, 0)
    with DatasetWriter(path, "png", "a") as writer:
        assert 0 < writer.count < 30
        for data in FILES[writer.count :]:
            writer.add(data)
        writer.finish(LABELS)
    assert path.read_bytes() == whole and left(tmp_path) == {"a.zip"}
