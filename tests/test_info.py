"""What `python -m edm2 info` tells of every kind of file."""

import json
import os
import pickle
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import edm2
import sample
from edm2.cli.main import main
from edm2.frechet import Moments
from edm2.info import describe
from edm2.references import Reference, write_reference
from tests.command_lines import call, refused
from tests.conftest import GOLDEN, tiny_net


class Unread:
    """A safetensors file whose tensors may not be read."""

    def __init__(self, *arguments, **kwargs):
        self.file = safe_open(*arguments, **kwargs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name: str):
        return pytest.fail("read") if name == "get_tensor" else getattr(self.file, name)


@pytest.fixture()
def run(config) -> Path:
    edm2.train(replace(config, duration=64))
    return Path(config.outdir)


def test_a_run(run, config):
    facts = describe(run)
    assert (facts["kind"], facts["Progress/kimg"], facts["options"]["preset"]) == ("training run", 0.064, "digits")
    assert facts["snapshots"] == "2, the last network-snapshot-0000000.064-0.100.safetensors"
    assert facts["training states"] == "1, the last training-state-0000000.064.pt"


def test_what_it_holds(run, monkeypatch):
    """Without loading tensors."""
    parameters = sum(p.numel() for p in edm2.build("digits", 8, 1, 10).parameters())
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("edm2.snapshot.safetensors.safe_open", Unread)
    snapshot = describe(run / "network-snapshot-0000000.064-0.050.safetensors")
    assert (snapshot["kind"], snapshot["parameters"], snapshot["stored as"]) == ("network snapshot", parameters, "F32")
    assert (snapshot["nimg"], snapshot["std"], snapshot["encoder"]) == (64, 0.05, {"type": "rgb"})
    state = describe(run / "training-state-0000000.064.pt")
    assert (state["kind"], state["parameters"], state["images"], state["steps"]) == ("training state", parameters, 64, 4)
    assert state["averages of width"] == [0.05, 0.1]


def test_an_official_pickle():
    facts = describe(GOLDEN / "official_snapshot.pkl")
    assert facts["kind"] == "network pickle of the official release" and facts["stored as"] == "float16"
    assert facts["parameters"] == sum(p.numel() for p in edm2.load_official_snapshot(GOLDEN / "official_snapshot.pkl").net.parameters())
    assert facts["config"]["model_channels"] == 8 and "CC BY-NC-SA" in facts["licence"]


def test_datasets(digits_zip, tmp_path):
    facts = describe(digits_zip)
    assert (facts["kind"], facts["images"], facts["size"], facts["labels"]) == ("dataset", 1797, "8x8, 1 channels, uint8", 10)
    np.save(tmp_path / "a.npy", np.zeros((8, 4, 4), np.float32))
    facts = describe(tmp_path)
    assert (facts["latents"], facts["size"], facts["labels"]) == (1, "4x4, 8 channels, float32", "none")


def test_the_command(run):
    lines = call(main, "info", str(run / "training-state-0000000.064.pt")).output.splitlines()
    assert lines[0].split() == ["kind", "training", "state"] and "parameters               1,008,239" in lines
    assert json.loads(call(main, "info", "--json", str(run)).output)["options"]["lr"] == 0.02


def test_what_is_none_of_these(tmp_path):
    assert "does not exist" in refused(main, "info", str(tmp_path / "none"))
    assert "holds no images" in refused(main, "info", str(tmp_path))
    (tmp_path / "a").write_text("text")
    assert "a is no snapshot, pickle, training state, dataset, or statistics of one" in refused(main, "info", str(tmp_path / "a"))
    (tmp_path / "a.safetensors").write_text("text")
    assert "is truncated or no safetensors file" in refused(main, "info", str(tmp_path / "a.safetensors"))
    (tmp_path / "training_options.json").write_text("{")
    assert "training_options.json cannot be read" in refused(main, "info", str(tmp_path))
    torch.save({"nimg": 5}, tmp_path / "b.pt")
    assert "is no training state of this project" in refused(main, "info", str(tmp_path / "b.pt"))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_states_are_data(run, tmp_path, monkeypatch):
    """Neither executed nor loaded: tensors may promise any size."""
    monkeypatch.chdir(tmp_path)
    torch.save({"nimg": Hostile()}, tmp_path / "a.pt")
    assert "is no training state of this project (it asks for posix.mkdir)" in refused(main, "info", str(tmp_path / "a.pt"))
    assert not (tmp_path / "executed").exists()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded"))
    assert describe(run / "training-state-0000000.064.pt")["steps"] == 4


def test_states_that_mean_much(run, tmp_path):
    """Of few bytes: shared lists, names and sizes of tensors, lists in themselves."""
    laugh = 0
    for _ in range(9):
        laugh = [laugh] * 20
    cycle: list = []
    cycle.append(cycle)
    state = torch.load(run / "training-state-0000000.064.pt", weights_only=True)
    for value in (laugh, cycle, 10**5000, "64", None, float("nan")):
        torch.save(state | {"nimg": value}, tmp_path / "a.pt")
        assert "is no training state of this project" in refused(main, "info", str(tmp_path / "a.pt"))
    pickled = pickle_of(run / "training-state-0000000.064.pt")
    for old, new in ((b"X\x03\x00\x00\x00cpu", b"]"), (b"X\x01\x00\x00\x000", b"]"), (b"K \x85", b"\x8a\xff" + b"\x7f" * 255 + b"\x85")):
        assert old in pickled
        rewrite(run / "training-state-0000000.064.pt", tmp_path / "b.pt", pickled.replace(old, new, 1))
        if new != b"]" or old.endswith(b"0"):
            assert "is no training state of this project" in refused(main, "info", str(tmp_path / "b.pt"))


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def rewrite(path: Path, out: Path, data: bytes) -> None:
    """The archive with another pickle."""
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(out, "w") as other:
        for name in file.namelist():
            other.writestr(name, data if name.endswith("data.pkl") else file.read(name))


def test_damaged_labels(digits_zip, tmp_path):
    """Are not taken for none; nor are files read that say they are huge."""
    for text in ('{"labels": [[', '{"labels": [["a.png", -3]]}'):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as file, zipfile.ZipFile(digits_zip) as other:
            file.writestr("a.png", other.read(other.namelist()[0]))
            file.writestr("dataset.json", text)
        assert "dataset.json" in refused(main, "info", str(tmp_path / "a.zip"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as file, file.open("dataset.json", "w", force_zip64=True) as large:
        for _ in range(65):
            large.write(bytes(2**24))
    with zipfile.ZipFile(tmp_path / "b.zip", "a") as file, zipfile.ZipFile(digits_zip) as other:
        file.writestr("a.png", other.read(other.namelist()[0]))
    assert "dataset.json: 1.0 GiB, which no image has" in refused(main, "info", str(tmp_path / "b.zip"))


def test_damaged_zips(run, digits_zip, tmp_path):
    """Are described, or refused in one line."""
    for seed in range(100):
        rng = random.Random(seed)
        data = bytearray((run / "training-state-0000000.064.pt" if seed % 2 else digits_zip).read_bytes())
        for _ in range(rng.choice((1, 5, 50))):  # their table of contents is at their end, what they hold all before
            data[rng.randrange(len(data) - 5000 if rng.random() < 0.5 else 0, len(data))] ^= 1 << rng.randrange(8)
        path = tmp_path / "a"
        path.write_bytes(data[: rng.choice((len(data), len(data), len(data) // 2))])
        result = call(main, "info", str(path))
        assert result.exit_code == 0 or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 0 or len(result.output.splitlines()) == 1


def test_words_of_a_file(tmp_path):
    """Say nothing to a terminal, and do not pass for facts."""
    meta = {"kind": "another", "parameters": 5, "file": "\x1b[2J\udc80", "\x1b]0;": 1, "note": ["\x1b"]}
    edm2.save_snapshot(tmp_path / "a", tiny_net(), meta=meta)
    facts, text = describe(tmp_path / "a"), call(main, "info", str(tmp_path / "a")).output
    assert facts["kind"] == "network snapshot" and facts["parameters"] > 5
    assert "\x1b" not in text and "?[2J?" in text and r"\u001b" in text
    assert json.loads(call(main, "info", "--json", str(tmp_path / "a")).output)["file"] == meta["file"]


def test_odd_runs(run):
    """Whose status lines say nothing."""
    (run / "stats.jsonl").write_text("{}\n")
    assert describe(run)["kind"] == "training run"
    for text in ("[" * 200_000 + "\n", '{"a": 1' + "0" * 400 + "}\n"):
        (run / "stats.jsonl").write_text(text)
        assert "stats.jsonl cannot be read" in refused(main, "info", str(run))
    (run / "training_options.json").write_text("[" * 200_000)
    assert "training_options.json cannot be read" in refused(main, "info", str(run))


def test_pipes(tmp_path):
    """Would wait for somebody to write."""
    os.mkfifo(tmp_path / "a")
    assert "is neither a file nor a folder" in refused(main, "info", str(tmp_path / "a"))
    assert "is no file" in refused(sample.main, f"--net={tmp_path / 'a'}", f"--outdir={tmp_path / 'out'}")


def test_references(tmp_path):
    """Ours, and pickles that are no networks; what is neither says what a network lacks."""
    moments = Moments(np.zeros(3), np.eye(3), 7)
    write_reference(tmp_path / "a.npz", Reference({"fid": moments, "mine:f": moments}, {"dataset": "digits.zip", "image_shape": [1, 8, 8]}))
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({"fid": {"mu": np.zeros(3), "sigma": np.eye(3)}}))
    assert describe(tmp_path / "a.npz") == {
        "kind": "reference statistics", "metrics": dict.fromkeys(("fid", "mine:f"), "3 features of 7 images"),
        "dataset": "digits.zip", "image_shape": [1, 8, 8],
    }  # fmt: skip
    assert describe(tmp_path / "b.pkl") == {"kind": "reference statistics", "metrics": {"fid": "3 features of unknown images"}}
    (tmp_path / "c.pkl").write_bytes(pickle.dumps({"fid": 3}))
    (tmp_path / "c.npz").write_bytes(b"PK")
    assert "c.pkl is refused" in refused(main, "info", f"{tmp_path}/c.pkl")
    assert "c.npz is refused, it is no reference statistics" in refused(main, "info", f"{tmp_path}/c.npz")
