"""The training loop: resuming, sharing among processes, accumulating, starting from other weights."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2.checkpoint import load_newest_checkpoint
from edm2.config import TrainingConfig
from edm2.dataset_zip import write_zip
from edm2.distributed import Processes
from edm2.names import kimg_name
from edm2.stats import NonfiniteGuard, read_stats
from edm2.trainer import Draws, Trainer
from tests.conftest import relative_error
from tests.run_files import equal, names, run_steps

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
OFFICIAL_KEYS = """Progress/kimg Timing/total_sec Timing/sec_per_tick Timing/sec_per_kimg Timing/maintenance_sec
Resources/cpu_mem_gb Resources/peak_gpu_mem_gb Resources/peak_gpu_mem_reserved_gb Loss/loss Loss/learning_rate
timestamp""".split()


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
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(edm2.UserError, match="none of the 1"):
        load_newest_checkpoint(Path(config.outdir))


def test_another_runs_folder_is_refused(config):
    edm2.train(replace(config, duration=64))
    before = {path: path.read_bytes() for path in Path(config.outdir).iterdir()}
    with pytest.raises(edm2.UserError, match=r"holds another run \(lr: 0.02 there, 0.01 here; seed: 0 there, 1 here\)"):
        edm2.train(replace(config, lr=0.01, seed=1))
    assert {path: path.read_bytes() for path in Path(config.outdir).iterdir()} == before
    edm2.train(replace(config, batch_gpu=8, status=64, workers=1))  # none of these changes the steps


def test_the_optimizer_prepares_the_weights_of_the_run(config):
    trainer = Trainer(config, Processes(0, 1, CPU))
    assert trainer.optimizer.weights is trainer.weights and trainer.weights.net is trainer.net


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


class TestLabelDropout:
    def test_dropped_labels_belong_to_image_numbers(self, config):
        """The other draws are as without."""
        config = replace(config, label_dropout=0.3)
        whole, *parts = (Draws.of_step(Trainer(config, Processes(i, n, CPU)), 16 // n) for i, n in ((0, 1), (0, 2), (1, 2)))
        assert 0 < whole.kept.sum() < 16 and torch.equal(torch.cat([part.kept for part in parts]), whole.kept)
        plain = Draws.of_step(Trainer(replace(config, label_dropout=0.0), Processes(0, 1, CPU)), 16)
        assert plain.kept is None and torch.equal(plain.sigma, whole.sigma) and torch.equal(plain.noise, whole.noise)

    def test_share(self, config):
        counts = dict.fromkeys(("batch", "duration", "status", "snapshot", "checkpoint"), 4096)
        trainer = Trainer(replace(config, label_dropout=0.1, **counts), Processes(0, 1, CPU))
        assert (~Draws.of_step(trainer, 4096).kept).float().mean().item() == pytest.approx(0.1, abs=0.02)

    def test_the_loss_sees_zeros_in_their_place(self, config):
        seen = []

        def loss(net, images, sigma, noise, labels, sigma_data):
            seen.append(labels)
            return edm2.denoising_loss(net, images, sigma, noise, labels, sigma_data)

        trainer = Trainer(replace(config, label_dropout=0.3, batch_gpu=8), Processes(0, 1, CPU), loss=loss)
        trainer.start()
        trainer.step()
        trainer.nimg = 0
        kept = Draws.of_step(trainer, 16).kept
        assert torch.equal(torch.cat(seen).sum(dim=1), kept.float())

    def test_it_is_recorded(self, config):
        """A snapshot tells that its network can guide itself; a run from before goes on, one with another share does not."""
        edm2.train(replace(config, label_dropout=0.1))
        snapshots = sorted(Path(config.outdir).glob("*.safetensors"))
        assert all(edm2.load_snapshot(path).meta["label_dropout"] == 0.1 for path in snapshots) and snapshots
        with pytest.raises(edm2.UserError, match="label_dropout: 0.1 there, 0.2 here"):
            edm2.train(replace(config, label_dropout=0.2))
        options = Path(config.outdir) / "training_options.json"
        kept = {key: value for key, value in json.loads(options.read_text()).items() if key != "label_dropout"}
        options.write_text(json.dumps(kept))
        with pytest.raises(edm2.UserError, match="label_dropout: 0.0 there, 0.1 here"):
            edm2.train(replace(config, label_dropout=0.1))
        edm2.train(config)


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


def test_every_option_reaches_its_place(config, monkeypatch):
    options = dict(channels=64, dropout=0.2, P_mean=-0.3, P_std=0.7, fp16=False, bench=False)
    trainer = Trainer(replace(config, **options), Processes(0, 1, CPU))
    trainer.start()
    block = trainer.net.unet.enc["8x8_block0"]
    assert block.conv_res0.weight.shape[0] == 64 and block.dropout == 0.2 and trainer.net.use_fp16 is False
    assert Trainer(config, Processes(0, 1, CPU)).net.use_fp16 is True
    draws = trainer.loss.sigma(torch.tensor([0.0, 1.0])).log()
    torch.testing.assert_close(draws, torch.tensor([-0.3, 0.4]))
    sigma = Draws.of_step(trainer, 16).sigma.log()
    assert -1.5 < sigma.mean() < 0.5 and sigma.std() < 1.3  # the loss's, of 16 draws
    assert TrainingConfig(outdir="", data="").snapshot_dtype == "fp16"
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert not (cudnn.benchmark or cudnn.allow_tf32 or cuda.allow_tf32)
    assert not (cuda.allow_fp16_reduced_precision_reduction or cuda.allow_bf16_reduced_precision_reduction)


@pytest.mark.parametrize("change", [dict(lr=0.01), dict(decay=2.0), dict(rampup_Mimg=1.0)])
def test_learning_rate_options(config, change):
    """After 6 steps of 16: past the ramp-up, and past a decay that begins after 2."""
    config = replace(config, decay=1000.0)
    rates = [run_steps(c, steps=6).lr for c in (config, replace(config, **change))]
    changed = replace(config.resolved(), **change)
    expected = edm2.learning_rate_schedule(80, 16, changed.lr, changed.decay, changed.rampup_Mimg)
    assert rates == pytest.approx([0.02, expected]) and rates[1] < 0.019


def test_limit_on_the_images_per_gpu_above_the_share_is_no_limit(config):
    assert replace(config, batch_gpu=64).resolved().micro_batch(2) == 8


class TestRunFolders:
    """Nothing that a run has left is overwritten by mistake."""

    def kept(self, config, message, **changes):
        before = {path: path.read_bytes() for path in Path(config.outdir).iterdir()}
        with warnings.catch_warnings(), pytest.raises(edm2.UserError, match=message):
            warnings.simplefilter("ignore")
            edm2.train(replace(config, **changes))
        assert {path: path.read_bytes() for path in Path(config.outdir).iterdir()} == before

    def test_all_states_damaged(self, config):
        edm2.train(config)
        for path in Path(config.outdir).glob("training-state-*"):
            path.write_bytes(path.read_bytes()[:1000])
        self.kept(config, "none of the 2 training states .* can be read")

    @pytest.mark.parametrize("gone", ["training_options.json", "training_options.json training-state-*"])
    def test_options_lost(self, config, gone):
        edm2.train(replace(config, duration=64))
        for pattern in gone.split():
            for path in Path(config.outdir).glob(pattern):
                path.unlink()
        self.kept(config, "but no training_options.json", seed=5)

    @pytest.mark.parametrize("content", ["[1,2]", "{", "5"])
    def test_options_damaged(self, config, content):
        edm2.train(replace(config, duration=64))
        (Path(config.outdir) / "training_options.json").write_text(content)
        self.kept(config, "training_options.json cannot be read")

    def test_state_of_another_network(self, config, tmp_path):
        edm2.train(replace(config, duration=64))
        other = replace(config, duration=64, channels=64, outdir=str(tmp_path / "other"))
        edm2.train(other)
        state = "training-state-0000000.064.pt"
        (Path(config.outdir) / state).write_bytes((Path(other.outdir) / state).read_bytes())
        self.kept(config, "is of another network")

    @pytest.mark.parametrize("line", ["5", '{"Progress/kimg": null}', "[]", "\x00"])
    def test_damaged_status_lines_are_dropped(self, config, line):
        edm2.train(replace(config, duration=64))
        with open(Path(config.outdir) / "stats.jsonl", "a") as file:
            file.write(line + "\n")
        edm2.train(config)
        assert len(read_stats(config.outdir)) == 4


class TestNonfiniteGradients:
    """Of a loss scaled beyond fp32, which itself stays finite."""

    def test_they_stop_a_run(self, config):
        with pytest.raises(edm2.UserError, match="up to image 48, 3 in a row had non-finite gradients"):
            edm2.train(replace(config, ls=1e39, max_nonfinite=3))
        assert "training-state-0000000.064.pt" not in names(config.outdir)

    @pytest.mark.parametrize("limit", [0, 9])
    def test_they_are_reported(self, config, limit):
        trainer = edm2.train(replace(config, ls=1e39, max_nonfinite=limit))
        counts = [s["Loss/nonfinite_gradients"] for s in read_stats(config.outdir)]
        assert min(counts) > 0 and sum(counts) <= 8 * sum(p.numel() for p in trainer.net.parameters())

    @pytest.mark.parametrize(
        ("steps", "stops_at"),
        [("xxx", 3), (".xxx..", 6), ("...xxx", 6), ("xx.xx.xx.", None), ("....xxx..", 9), (".........", None), ("x.x.xxxx.", 9)],
    )
    def test_only_steps_in_a_row_count(self, steps, stops_at):
        guard, stopped = NonfiniteGuard(3, CPU), None
        for i, step in enumerate(steps, 1):
            try:
                guard.step(torch.tensor(5 if step == "x" else 0), i)
            except edm2.UserError as e:
                assert f"up to image {i}, 3 in a row" in str(e)
                stopped = i
                break
        assert stopped == stops_at


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
