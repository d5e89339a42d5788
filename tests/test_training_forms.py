"""Training compiled, in other types, and on what a user brings along in Python."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2 import step, trainer
from edm2.data import ArrayDataset
from edm2.dataset_zip import write_zip
from edm2.distributed import Processes
from edm2.stats import read_stats
from edm2.trainer import Trainer
from tests.conftest import relative_error
from tests.run_files import equal


class TestOwnParts:
    """What a user brings along in Python."""

    @pytest.fixture()
    def arrays(self):
        generator = np.random.default_rng(0)
        return generator.integers(0, 256, (40, 3, 8, 8), np.uint8), generator.integers(0, 5, 40)

    def test_arrays_are_what_files_are(self, config, arrays, tmp_path):
        images, labels = arrays
        write_zip(tmp_path / "files.zip", images.transpose(0, 2, 3, 1), labels.tolist())
        config = replace(config, duration=64)
        of_files = edm2.train(replace(config, data=str(tmp_path / "files.zip")))
        of_arrays = edm2.train(replace(config, data="", outdir=config.outdir + "2"), ArrayDataset(images, labels))
        assert equal(of_files.state_dict(0), of_arrays.state_dict(0))

    @pytest.mark.parametrize("labels", [None, np.eye(40, 7, dtype=np.float32)], ids=["no labels", "vectors"])
    def test_labels(self, config, arrays, labels):
        dataset = ArrayDataset(arrays[0], labels)
        assert edm2.train(replace(config, duration=64), dataset).net.label_dim == (0 if labels is None else 7)

    @pytest.mark.parametrize(
        ("images", "labels", "words"),
        [
            (np.zeros((4, 8, 8), np.uint8), None, r"images: expected uint8 or float32 \[n, C, H, W\], got uint8 \[4, 8, 8\]"),
            (np.zeros((4, 3, 8, 8)), None, "images: expected uint8 or float32"),
            (np.zeros((0, 3, 8, 8), np.uint8), None, "images: expected"),
            (np.zeros((4, 3, 8, 8), np.uint8), np.zeros(3, int), r"labels: expected int \[n\] from 0 on .*, got int64 \[3\]"),
            (np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, -1, 0]), "labels: expected int"),
            (np.zeros((4, 3, 8, 8), np.uint8), np.zeros((4, 2)), "labels: expected int"),
        ],
    )
    def test_what_are_no_arrays(self, images, labels, words):
        with pytest.raises(edm2.UserError, match=words):
            ArrayDataset(images, labels)

    def test_a_network(self, config, arrays):
        """With its weights; one that does not fit the data is refused."""
        net = edm2.Precond(8, 3, 5, model_channels=16, channel_mult=(1,), num_blocks=1, channels_per_head=16)
        before = net.unet.out_conv.weight.detach().clone()
        trainer = edm2.train(replace(config, lr=1e-9, duration=32), ArrayDataset(*arrays), net)
        assert trainer.net is net and relative_error(net.unet.out_conv.weight, before) < 0.1
        with pytest.raises(edm2.UserError, match=r"channels, resolution, labels of \(3, 8, 5\), and the data has \(1, 8, 10\)"):
            edm2.train(replace(config, outdir=config.outdir + "2"), net=net)

    def test_a_network_of_another_kind(self, config):
        with pytest.raises(edm2.UserError, match="net: expected an edm2.Precond, got Linear"):
            edm2.train(config, net=torch.nn.Linear(2, 2))

    def test_a_loss_without_the_uncertainty(self, config):
        """Whose head then has no gradient, and stays as it was."""

        def weighted_error(net, images, sigma, noise, labels, sigma_data):
            return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2 * (net(images + noise, sigma, labels) - images) ** 2

        trainer = edm2.train(config, loss=weighted_error)
        torch.manual_seed(config.seed)
        fresh = config.resolved().build(8, 1, 10)
        edm2.force_weight_norm_(fresh)
        assert relative_error(trainer.net.logvar_linear.weight, fresh.logvar_linear.weight) < 1e-3
        losses = [line["Loss/loss"] for line in read_stats(config.outdir)]
        assert losses[-1] < losses[0] and relative_error(trainer.net.unet.out_conv.weight, fresh.unet.out_conv.weight) > 0.03

    def test_processes_that_start_with_different_weights(self, config):
        class Unlike(Processes):
            def alike(self, x):
                return x.numel() == 1  # the number of images

        with pytest.raises(edm2.UserError, match="the processes start with different weights"):
            Trainer(config, Unlike(0, 1, torch.device("cpu"))).start()

    def test_a_loss_and_a_callback(self, config):
        """The loss has the signature of `denoising_loss`; the callback sees each line of statistics."""
        seen = []

        def doubled(*arguments):
            return 2 * edm2.denoising_loss(*arguments)

        trainer = edm2.train(config, loss=doubled, callback=lambda *arguments: seen.append(arguments))
        assert [(each, stats["Progress/kimg"]) for each, stats in seen] == [(trainer, kimg) for kimg in (0.032, 0.064, 0.096, 0.128)]
        plain = edm2.train(replace(config, outdir=config.outdir + "2", duration=64))
        losses = [read_stats(outdir)[0]["Loss/loss"] for outdir in (config.outdir, plain.config.outdir)]
        assert losses[0] == pytest.approx(2 * losses[1], rel=0.05)


class TestCompiled:
    """What torch.compile makes of forward, loss and backward: one graph for the length of a run, and the same losses."""

    @pytest.fixture(autouse=True)
    def traced(self, monkeypatch):
        """Without a C++ compiler: the graphs' own code is called."""
        monkeypatch.setattr(trainer, "BACKEND", "aot_eager")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    @pytest.mark.parametrize("options", [{"batch_gpu": 8, "label_dropout": 0.5}, {"cond": False, "dropout": 0.1}], ids=str)
    def test_a_run_is_one_graph(self, config, options, tmp_path):
        """Whatever the schedule, accumulation, dropped labels, resuming."""
        plain = edm2.train(replace(config, **options))
        other = replace(config, outdir=str(tmp_path / "compiled"), compile=True, **options)
        with torch._dynamo.config.patch(error_on_recompile=True):
            edm2.train(replace(other, duration=64))
            torch._dynamo.reset()  # a new process
            torch._dynamo.utils.counters.clear()
            compiled = edm2.train(other)
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        losses = [[line["Loss/loss"] for line in read_stats(each.outdir)] for each in (config, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for name, p in compiled.net.named_parameters():
            assert relative_error(p, plain.net.get_parameter(name)) < 1e-4, name

    def test_it_is_for_gpus_unless_asked_for(self, config):
        alone = Processes(0, 1, torch.device("cpu"))
        assert [Trainer(replace(config, compile=x), alone)._compiles for x in (None, False, True)] == [False, False, True]
        trainer = Trainer(config, alone)
        trainer.procs = Processes(0, 1, torch.device("cuda"))
        assert trainer._compiles


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # of the compiler's own
def test_a_thousand_steps_compiled_and_not(config, tmp_path):
    """With the same draws: within 0.5 % over the last hundred. Needs a C++ compiler."""
    config = replace(config, batch=32, duration=32000, status=3200, snapshot=0, checkpoint=0, rampup_Mimg=0.01)
    losses = []
    for name, compiled in (("plain", False), ("compiled", True)):
        run = replace(config, outdir=str(tmp_path / name), compile=compiled)
        edm2.train(run)
        losses.append(read_stats(run.outdir)[-1]["Loss/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.parametrize(("options", "dtype"), [({"precision": "bf16"}, torch.bfloat16), ({}, None), ({"fp16": False}, None)], ids=str)
def test_precision(config, options, dtype):
    """bf16 also on a CPU, and learns; networks are sampled in their own type."""
    config = replace(config, **options)
    trainer = edm2.train(config)
    assert trainer.net.dtype == dtype and trainer.net.use_fp16 == options.get("fp16", True)
    losses = [line["Loss/loss"] for line in read_stats(config.outdir)]
    assert losses[-1] < losses[0]
    with pytest.raises(edm2.UserError, match="precision: .* there, .* here"):
        edm2.train(replace(config, precision="fp32" if options != {"fp16": False} else "bf16", fp16=True))


def test_runs_that_do_not_record_their_precision(config):
    edm2.train(replace(config, duration=64))
    options = Path(config.outdir) / "training_options.json"
    options.write_text(json.dumps({key: value for key, value in json.loads(options.read_text()).items() if key != "precision"}))
    with pytest.raises(edm2.UserError, match="precision: fp16 there, bf16 here"):
        edm2.train(replace(config, precision="bf16"))
    edm2.train(config)


@pytest.mark.gpu
class TestOnAGPU:
    """To the bit, where cuDNN chooses nothing by its time."""

    @pytest.mark.parametrize("options", [{}, {"compile": False}, {"cuda_graph": True}, {"precision": "bf16", "batch_gpu": 4}], ids=str)
    def test_resume_equals_no_interruption(self, config, options, tmp_path):
        config = replace(config, bench=False, dropout=0.1, **options)
        whole = edm2.train(config)
        parts = replace(config, outdir=str(tmp_path / "parts"))
        edm2.train(replace(parts, duration=64))
        assert equal(edm2.train(parts).state_dict(0), whole.state_dict(0))

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_graph_equals_plain_steps(self, config, compiled, monkeypatch):
        """With accumulation and dropped labels."""
        recorded, record = [], step.record
        monkeypatch.setattr(step, "record", lambda *arguments: recorded.append(record(*arguments)) or recorded[-1])
        config = replace(config, bench=False, compile=compiled, batch_gpu=8, label_dropout=0.2, samples=4)
        plain = edm2.train(config)
        graphed = edm2.train(replace(config, outdir=config.outdir + "2", cuda_graph=True))
        assert len(recorded) == 1 and equal(graphed.state_dict(0), plain.state_dict(0))
