"""Runs that end before their time, in every way, and go on: nothing is lost, and no bit differs."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import psutil
import pytest
import torch

import edm2
from edm2 import checkpoint
from edm2.checkpoint import load_newest_checkpoint
from edm2.config import TrainingConfig
from edm2.distributed import Processes
from edm2.interruption import RESUME_ME, Interruption
from edm2.stats import read_stats
from tests.command_lines import ROOT
from tests.run_files import equal, names


@pytest.fixture()
def config(tmp_path, digits_zip) -> TrainingConfig:
    """Twelve steps of 16 images, a state after every third."""
    return TrainingConfig(
        outdir=str(tmp_path / "run"), data=str(digits_zip), preset="digits", batch=16, duration=192, status=16,
        snapshot=96, checkpoint=48, rampup_Mimg=64e-6, snapshot_dtype="fp32", samples=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(digits_zip, tmp_path_factory) -> Callable[[TrainingConfig], dict]:
    """The state at the end of a run that nothing disturbed, in a process of one thread as `command` starts them."""

    @cache
    def run(duration: int) -> dict:
        outdir = str(tmp_path_factory.mktemp("undisturbed"))
        config = TrainingConfig(outdir, str(digits_zip), preset="digits", batch=16, duration=duration, status=16, snapshot=0, checkpoint=48)
        subprocess.run(command(config), cwd=ROOT, env=one_thread(), check=True, capture_output=True)
        return state_of(config)

    return lambda config: run(config.duration)


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def command(config: TrainingConfig, *more: str) -> list[str]:
    options = [f"--{name}={getattr(config, name)}" for name in ("outdir", "data", "preset", "batch", "duration", "status", "snapshot")]
    script = "import sys, train; from edm2.presets import PRESETS; from dataclasses import replace\n"
    script += "PRESETS['digits'] = replace(PRESETS['digits'], rampup_Mimg=64e-6)\ntrain.main(sys.argv[1:])"
    return [sys.executable, "-c", script, *options, f"--checkpoint={config.checkpoint}", "--snapshot-dtype=fp32", "--samples=0", *more]


def state_of(config: TrainingConfig) -> dict:
    """All that the newest training state holds, but for the seconds."""
    return load_newest_checkpoint(Path(config.outdir)) | {"elapsed": 0}


def finish(config: TrainingConfig) -> None:
    """Without an error or a warning about a file."""
    result = subprocess.run(command(config), cwd=ROOT, env=one_thread(), capture_output=True, text=True)
    assert result.returncode == 0 and "cannot be read" not in result.stderr, result.stderr
    for path in Path(config.outdir).glob("*.safetensors"):
        edm2.load_snapshot(path)
    read_stats(config.outdir)
    assert not list(Path(config.outdir).glob(".*"))


def test_a_signal_saves_the_run(config, undisturbed):
    """After the step that it met; the exit code says that it can be resumed."""
    process = subprocess.Popen(command(config), cwd=ROOT, env=one_thread(), stderr=subprocess.PIPE, text=True)
    stats = Path(config.outdir) / "stats.jsonl"
    while not stats.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == RESUME_ME == 75, errors
    assert f"SIGTERM: the run is saved in {config.outdir}, and the same command resumes it" in errors
    assert load_newest_checkpoint(Path(config.outdir))["nimg"] in range(16, 192, 16)
    finish(config)
    assert equal(state_of(config), undisturbed(config))


def test_time_is_up(config):
    """After every step of this run. A run that was to end then has ended."""
    config = replace(config, max_time=0.0, checkpoint=0, duration=48)
    reasons = [edm2.train(config).interrupted for _ in range(4)]
    assert reasons == ["--max-time", "--max-time", None, None]
    whole = edm2.train(replace(config, max_time=None, outdir=config.outdir + "2"))
    resumed = edm2.train(config)
    assert resumed.nimg == 48 and equal(resumed.state_dict(0) | {"nimg": 0}, whole.state_dict(0) | {"nimg": 0})


def test_a_second_signal_does_what_it_did_before():
    with Interruption(Processes(0, 1, torch.device("cpu"))) as interruption:
        assert interruption.asked() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.asked() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


ONE_OF_TWO = """
import os, signal, sys
import torch, edm2
from edm2.config import TrainingConfig
from edm2.trainer import Trainer
fault, options = sys.argv[1], eval(sys.argv[2])
step = Trainer.step
def faulty_step(self):
    loss = step(self)
    if os.environ["RANK"] == "1" and self.nimg == 32:
        if fault == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.net.unet.out_gain.data += 1e-7
    return loss
Trainer.step = faulty_step
try:
    trainer = edm2.train(TrainingConfig(**options))
    print(f"<{trainer.nimg} {trainer.interrupted}>", flush=True)
except edm2.UserError as e:
    print(f"<{e}>", flush=True)
"""


@pytest.mark.parametrize(("fault", "ends"), [("signal", "<32 SIGTERM>"), ("weight", "<the processes' weights differ after 48 images")])
def test_what_happens_to_one_process_concerns_both(config, tmp_path, fault, ends):
    """Both stop after the same step; weights that have come apart are seen when they are saved, and are not."""
    (tmp_path / "script.py").write_text(ONE_OF_TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "script.py")]
    environment = one_thread() | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([*launcher, fault, repr(config.__dict__)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.count(ends) == 2, result.stdout + result.stderr
    states = [name for name in names(config.outdir) if name.startswith("training-state")]
    assert states == (["training-state-0000000.032.pt"] if fault == "signal" else [])


def test_a_chosen_number_is_kept(config):
    edm2.train(replace(config, keep=2))
    states = sorted(name for name in names(config.outdir) if name.startswith("training-state"))
    assert states == ["training-state-0000000.144.pt", "training-state-0000000.192.pt"]


class TestDisk:
    def test_full(self, config, undisturbed):
        """The state before stays whole, nothing half-written is left, and the run goes on when there is room."""
        finish(replace(config, duration=48))
        before = (Path(config.outdir) / "training-state-0000000.048.pt").read_bytes()
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (6 * 2**20, 6 * 2**20))  # a state takes 20 MB
        result = subprocess.run(command(config), cwd=ROOT, env=one_thread(), capture_output=True, text=True, preexec_fn=limit)
        assert result.returncode == 1 and "Error: cannot write" in result.stderr and "Traceback" not in result.stderr
        states = [path for path in Path(config.outdir).iterdir() if ".pt" in path.name]
        assert [path.name for path in states] == ["training-state-0000000.048.pt"] and states[0].read_bytes() == before
        finish(config)
        assert equal(state_of(config), undisturbed(config))

    def test_what_was_written_is_read_again(self, config, monkeypatch):
        """A state with a wrong bit does not take its place."""

        write = torch.save

        def save(state, path):
            write(state, path)
            with open(path, "r+b") as file:
                file.seek(2**20)
                byte = file.read(1)[0]
                file.seek(2**20)
                file.write(bytes([byte ^ 1]))

        edm2.train(replace(config, duration=48))
        monkeypatch.setattr(checkpoint.torch, "save", save)
        with pytest.raises(edm2.UserError, match="training-state-0000000.096.pt was not written as it should be"):
            edm2.train(config)
        monkeypatch.undo()
        assert not any(name.startswith(".") or ".096" in name and name.endswith("pt") for name in names(config.outdir))
        assert load_newest_checkpoint(Path(config.outdir))["nimg"] == 48

    def test_leftovers_are_removed(self, config):
        outdir = Path(config.outdir)
        edm2.train(replace(config, duration=48))
        for name in (".training-state-0000000.048.pt.123.tmp", ".tmpQ2hpLi", ".mine"):
            (outdir / name).write_bytes(b"half")
        edm2.train(replace(config, duration=48))
        assert [name for name in names(outdir) if name.startswith(".")] == [".mine"]


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.torture)])
def test_killed_at_random_moments(config, undisturbed, kills):
    """kill −9, also while files are written; the end is that of the undisturbed run, and every file can be read."""
    config, moments, met = replace(config, duration=960), random.Random(kills), 0
    while met < kills:
        process = subprocess.Popen(command(config), cwd=ROOT, env=one_thread(), stderr=subprocess.DEVNULL)
        while process.poll() is None and not started(process, config):
            time.sleep(0.01)
        try:
            process.wait(moments.uniform(0, 3))
        except subprocess.TimeoutExpired:
            process.kill()
            met += 1
        if process.wait() == 0:  # it got to the end: once more from the first state
            for path in Path(config.outdir).glob("training-state-*"):
                path.unlink() if "048" not in path.name else None
    finish(config)
    assert equal(state_of(config), undisturbed(config))


def started(process: subprocess.Popen, config: TrainingConfig) -> bool:
    """Has it begun to train? It writes its options then."""
    options = Path(config.outdir) / "training_options.json"
    return options.exists() and options.stat().st_mtime > psutil.Process(process.pid).create_time()
