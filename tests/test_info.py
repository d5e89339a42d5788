"""What `python -m edm2 info` tells of every kind of file."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2.cli.main import main
from edm2.info import describe
from tests.command_lines import call, refused
from tests.conftest import GOLDEN, tiny_net


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
    assert "is truncated or no safetensors file" in refused(main, "info", str(tmp_path / "a"))
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
