"""The training loop: resuming, sharing among processes, accumulating, starting from other weights."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2.checkpoint import kimg_name, load_newest_checkpoint
from edm2.config import TrainingConfig
from edm2.distributed import Processes
from edm2.image_files import write_zip
from edm2.stats import read_stats
from edm2.training import Draws, Trainer
from tests.conftest import relative_error

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
OFFICIAL_KEYS = """Progress/kimg Timing/total_sec Timing/sec_per_tick Timing/sec_per_kimg Timing/maintenance_sec
Resources/cpu_mem_gb Resources/peak_gpu_mem_gb Resources/peak_gpu_mem_reserved_gb Loss/loss Loss/learning_rate
timestamp""".split()


@pytest.fixture()
def config(tmp_path, digits_zip) -> TrainingConfig:
    """Eight steps of 16 images; the learning rate is high from the start, so that an error in it shows."""
    return TrainingConfig(
        outdir=str(tmp_path / "run"), data=str(digits_zip), preset="digits", batch=16, duration=128, status=32,
        snapshot=64, checkpoint=64, rampup_Mimg=64e-6, snapshot_dtype="fp32",
    )  # fmt: skip


def names(outdir) -> set[str]:
    return {path.name for path in Path(outdir).iterdir()}


def equal(a, b) -> bool:
    """Nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_what_a_run_leaves(config):
    trainer = edm2.train(config)
    snapshots = {f"network-snapshot-{kimg}-{std}.safetensors" for kimg in ("0000000.064", "0000000.128") for std in ("0.050", "0.100")}
    states = {"training-state-0000000.064.pt", "training-state-0000000.128.pt"}
    assert names(config.outdir) == snapshots | states | {"stats.jsonl", "training_options.json"}
    stats = read_stats(config.outdir)
    assert [s["Progress/kimg"] for s in stats] == [0.032, 0.064, 0.096, 0.128]
    assert all(key in line for line in stats for key in OFFICIAL_KEYS)
    assert all(np.isfinite(s["Loss/loss"]) and s["Loss/nonfinite_gradients"] == 0 for s in stats)
    snapshot = edm2.load_snapshot(Path(config.outdir) / "network-snapshot-0000000.128-0.050.safetensors")
    assert snapshot.meta["nimg"] == 128 and snapshot.meta["std"] == 0.05 and snapshot.encoder.kind == "rgb"
    for name, average in trainer.optimizer.ema(0.05).items():
        torch.testing.assert_close(snapshot.net.state_dict()[name], average, rtol=0, atol=0)


def test_resume_equals_no_interruption(config, tmp_path):
    """Weights, optimizer, averages, data order and noise, bit for bit; with dropout."""
    config = replace(config, dropout=0.1)
    whole = edm2.train(config)
    parts = replace(config, outdir=str(tmp_path / "parts"))
    edm2.train(replace(parts, duration=64))
    resumed = edm2.train(parts)
    assert equal(resumed.state_dict(0), whole.state_dict(0))
    losses = [[s["Loss/loss"] for s in read_stats(c.outdir)] for c in (config, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_an_interrupted_run_repeats_what_it_had_not_saved(config):
    """Killed after 96 images, resumed from 64: the status line of 96 must not appear twice."""
    whole = edm2.train(config)
    outdir = Path(config.outdir)
    for path in outdir.glob("*0000000.128*"):
        path.unlink()
    lines = (outdir / "stats.jsonl").read_text().splitlines()
    (outdir / "stats.jsonl").write_text("\n".join(lines[:3]) + '\n{"Progress/ki')
    assert equal(edm2.train(config).state_dict(0), whole.state_dict(0))
    assert [s["Progress/kimg"] for s in read_stats(outdir)] == [0.032, 0.064, 0.096, 0.128]


def test_a_damaged_checkpoint_is_named_and_skipped(config):
    whole = edm2.train(config)
    newest = Path(config.outdir) / "training-state-0000000.128.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="training-state-0000000.128.pt cannot be read"):
        resumed = edm2.train(config)
    assert equal(resumed.state_dict(0), whole.state_dict(0))


def test_a_finished_run_stays_as_it_is(config):
    edm2.train(config)
    before = {path: path.read_bytes() for path in Path(config.outdir).iterdir()}
    edm2.train(config)
    assert {path: path.read_bytes() for path in Path(config.outdir).iterdir()} == before


def test_checkpoints_are_read_without_executing_anything(config):
    edm2.train(replace(config, duration=64))
    path = Path(config.outdir) / "training-state-0000000.064.pt"
    assert torch.load(path, weights_only=True)["nimg"] == 64
    torch.save({"net": TrainingConfig}, path)  # a class: needs pickle
    with pytest.warns(UserWarning, match="cannot be read"):
        assert load_newest_checkpoint(Path(config.outdir), CPU) is None


def test_another_runs_folder_is_refused(config):
    edm2.train(replace(config, duration=64))
    before = {path: path.read_bytes() for path in Path(config.outdir).iterdir()}
    with pytest.raises(edm2.UserError, match=r"holds another run \(lr: 0.02 there, 0.01 here; seed: 0 there, 1 here\)"):
        edm2.train(replace(config, lr=0.01, seed=1))
    assert {path: path.read_bytes() for path in Path(config.outdir).iterdir()} == before
    edm2.train(replace(config, batch_gpu=8, status=64, workers=1))  # none of these changes the steps


def run_steps(config, steps=3, procs=Processes(0, 1, CPU)):
    trainer = Trainer(config, procs)
    trainer.start()
    for _ in range(steps):
        trainer.step()
    return trainer


def test_accumulation_changes_nothing(config):
    whole, parts = run_steps(config), run_steps(replace(config, batch_gpu=4))
    for (name, a), b in zip(whole.net.named_parameters(), parts.net.parameters()):
        assert relative_error(a, b) < 1e-4, name
    other = run_steps(replace(config, seed=1))
    assert relative_error(whole.net.unet.out_conv.weight, other.net.unet.out_conv.weight) > 0.1


def test_loss_scaling_changes_nothing_but_the_gradient(config):
    plain, scaled = run_steps(config), run_steps(replace(config, ls=64.0))
    for (name, a), b in zip(plain.net.named_parameters(), scaled.net.named_parameters()):
        torch.testing.assert_close(b[1].grad, a.grad * 64, rtol=1e-3, atol=1e-3 * b[1].grad.abs().max().item(), msg=name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_draws_belong_to_image_numbers(config, world_size):
    def draws(rank, world_size):
        trainer = Trainer(config, Processes(rank, world_size, CPU))
        return Draws.of_step(trainer, 16 // world_size)

    whole, parts = draws(0, 1), [draws(rank, world_size) for rank in range(world_size)]
    for name in ("sigma", "noise"):
        torch.testing.assert_close(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name), rtol=0, atol=0)


def test_two_processes_equal_one(config, tmp_path, one_thread_env):
    """Through torchrun and train.py, with accumulation; to rounding."""
    options = "--preset=digits --batch=16 --duration=64 --status=32 --snapshot=0 --checkpoint=64 --batch-gpu=4".split()

    def launch(name, *launcher):
        outdir = tmp_path / name
        command = [sys.executable, *launcher, "train.py", f"--outdir={outdir}", f"--data={config.data}", *options]
        result = subprocess.run(command, cwd=ROOT, env=one_thread_env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return load_newest_checkpoint(outdir, CPU), read_stats(outdir)

    one, one_stats = launch("one")
    two, two_stats = launch("two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    for name, tensor in one["net"].items():
        assert relative_error(two["net"][name], tensor) < 1e-5, name
    for std, averages in one["optimizer"]["emas"].items():
        for name, tensor in averages.items():
            assert relative_error(two["optimizer"]["emas"][std][name], tensor) < 1e-5, name
    assert [s["Loss/loss"] for s in two_stats] == pytest.approx([s["Loss/loss"] for s in one_stats], rel=1e-5)


class TestInit:
    @pytest.fixture()
    def snapshot(self, config, tmp_path):
        trainer = run_steps(config)
        edm2.save_snapshot(tmp_path / "a.safetensors", trainer.net, dtype=torch.float32)
        return trainer.net, str(tmp_path / "a.safetensors")

    def started(self, config, path, **changes):
        trainer = Trainer(replace(config, init=path, **changes), Processes(0, 1, CPU))
        trainer.start()
        return trainer.net

    def test_same_labels(self, config, snapshot):
        net, path = snapshot
        for (name, a), b in zip(net.named_parameters(), self.started(config, path).parameters()):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)  # one forced normalisation more

    def test_other_labels(self, config, snapshot, tmp_path):
        net, path = snapshot
        write_zip(tmp_path / "few.zip", np.zeros((4, 8, 8), np.uint8), [0, 1, 2, 0])
        few = self.started(config, path, data=str(tmp_path / "few.zip"))
        assert few.unet.emb_label.weight.shape == (64, 3)
        torch.testing.assert_close(few.unet.out_conv.weight, net.unet.out_conv.weight, rtol=1e-3, atol=1e-3)
        none = self.started(config, path, cond=False)
        torch.testing.assert_close(none.unet.out_conv.weight, net.unet.out_conv.weight, rtol=1e-3, atol=1e-3)

    def test_another_network(self, config, snapshot):
        with pytest.raises(edm2.UserError, match="is another network"):
            edm2.train(replace(config, init=snapshot[1], channels=64))
        assert not Path(config.outdir).exists()


def test_training_learns(config):
    """80 steps of the digits preset as it is: from chance, where the loss is about 2, to well below 1."""
    trainer = Trainer(TrainingConfig(outdir="", data=config.data, preset="digits"), Processes(0, 1, CPU))
    trainer.start()
    losses = [trainer.step().item() / 128 for _ in range(80)]
    assert np.mean(losses[:5]) > 1.5 and np.mean(losses[-10:]) < 1.0


def test_latents_are_drawn_afresh_at_each_visit(config, tmp_path):
    folder = tmp_path / "latents"
    folder.mkdir()
    rng = np.random.RandomState(0)
    for i in range(4):
        np.save(folder / f"{i}.npy", np.abs(rng.randn(8, 8, 8)).astype(np.float32))
    trainer = run_steps(replace(config, data=str(folder), cond=False, batch=4, duration=16))
    assert trainer.image_shape == (4, 8, 8) and trainer.net.label_dim == 0
    first = Draws.of_step(trainer, 4).normal
    trainer.step()
    assert relative_error(Draws.of_step(trainer, 4).normal, first) > 0.1


def test_mirrored_data(config):
    trainer = run_steps(replace(config, mirror=True), steps=1)
    assert len(trainer.dataset) == 2 * 1797


@pytest.mark.parametrize(("nimg", "name"), [(1024, "0000001"), (2**31, "2147483"), (19200, "0000019.200"), (64, "0000000.064")])
def test_file_names(nimg, name):
    """Official counts are multiples of 1024 and keep their official names; others never collide."""
    assert kimg_name(nimg) == name


def test_all_names_differ():
    with warnings.catch_warnings():
        assert len({kimg_name(n) for n in range(0, 200_000, 8)}) == 25_000


def test_options_are_recorded(config):
    edm2.train(replace(config, duration=32))
    options = json.loads((Path(config.outdir) / "training_options.json").read_text())
    assert options["preset"] == "digits" and options["lr"] == 0.02 and options["decay"] == 1000
