"""What shows how a run is doing beside its loss: images held out, grids of samples, TensorBoard."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import edm2
from edm2 import held_out, preview
from edm2.data import ArrayDataset, ImageDataset
from edm2.dataset_zip import write_zip
from edm2.diagnostics import NoiseLevels
from edm2.distributed import Processes
from edm2.held_out import HeldOut
from edm2.latents import RGBEncoder
from edm2.pictures import read_png
from edm2.stats import read_stats
from edm2.tensorboard import TensorBoard, scalars
from tests.conftest import tiny_net
from tests.run_files import equal

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)


class TestHeldOut:
    def of(self, net, images=40, rank=0, processes=1, at_once=8, loss=edm2.denoising_loss) -> HeldOut:
        generator = np.random.default_rng(0)
        dataset = ArrayDataset(generator.integers(0, 256, (images, 2, 8, 8), np.uint8), generator.integers(0, 4, images))
        procs = Processes(rank, processes, CPU)
        return HeldOut(dataset, net, RGBEncoder(), loss, edm2.EDM2Loss(-0.8, 1.4), NoiseLevels(Processes(0, 1, CPU)), procs, at_once)

    def test_it_is_the_same_each_time(self):
        """Whatever the rounds, without dropout, and the random numbers of training go on as they were."""
        net = tiny_net(dropout=0.5).train()
        state = torch.get_rng_state()
        first = self.of(net).measure()
        assert all(self.of(net, at_once=n).measure()["Loss/held_out"] == pytest.approx(first["Loss/held_out"], rel=1e-6) for n in (3, 64))
        assert torch.equal(torch.get_rng_state(), state) and net.training
        assert sum(first["Loss/held_out_by_noise_level"]["images"]) == 40

    def test_processes_share_the_images(self):
        net = tiny_net()
        whole, parts = self.of(net).measure(), [self.of(net, rank=i, processes=3).measure() for i in range(3)]
        counts = [sum(part["Loss/held_out_by_noise_level"]["images"]) for part in parts]
        mean = sum(n * part["Loss/held_out"] for n, part in zip(counts, parts)) / 40
        assert sorted(counts) == [13, 13, 14] and mean == pytest.approx(whole["Loss/held_out"], rel=1e-6)

    def test_noise_levels_are_those_of_training(self):
        """At equal distances of probability, in no order."""
        log_sigma = self.of(tiny_net(), 1000).sigma.log()
        assert log_sigma.mean().item() == pytest.approx(-0.8, abs=1e-3) and log_sigma.std().item() == pytest.approx(1.4, abs=1e-2)
        assert abs(np.corrcoef(log_sigma, np.arange(1000))[0, 1]) < 0.1

    def test_of_a_large_set_a_part(self, monkeypatch):
        """From its beginning to its end."""
        monkeypatch.setattr(held_out, "IMAGES", 5)
        images = torch.arange(41, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 2, 8, 8).numpy()
        found = HeldOut(
            ArrayDataset(images), tiny_net(0), RGBEncoder(), edm2.denoising_loss, edm2.EDM2Loss(), NoiseLevels(Processes(0, 1, CPU)),
            Processes(0, 1, CPU), 2,
        )  # fmt: skip
        assert [int(image[0, 0, 0]) for part in found.images for image in part] == [0, 10, 20, 30, 40]

    def test_a_run_tells_it(self, config):
        """And is what it is without; the last classes may be missing in the held-out set."""
        images = ImageDataset(config.data)
        few = [i for i in range(40) if images.label(i)[9] == 0]
        write_zip(config.outdir + ".zip", images.images(few).transpose(0, 2, 3, 1)[..., 0], [int(images.label(i).argmax()) for i in few])
        told = edm2.train(replace(config, duration=64, held_out=config.outdir + ".zip"))
        plain = edm2.train(replace(config, duration=64, outdir=config.outdir + "2"))
        assert equal(told.state_dict(0), plain.state_dict(0)) and "Loss/held_out" not in read_stats(plain.config.outdir)[0]
        first, last = (line["Loss/held_out"] for line in read_stats(config.outdir))
        assert last < first

    def test_other_images(self, config):
        others = ArrayDataset(np.zeros((4, 3, 8, 8), np.uint8))
        with pytest.raises(edm2.UserError, match=r"held-out images are \(3, 8, 8\) of uint8, those to train on \(1, 8, 8\) of uint8"):
            edm2.train(config, held_out=others)
        more = ArrayDataset(np.zeros((4, 1, 8, 8), np.uint8), np.eye(4, 12, dtype=np.float32))
        with pytest.raises(edm2.UserError, match="held-out images know 12 labels, those to train on 10"):
            edm2.train(config, held_out=more)
        assert not Path(config.outdir).exists()


class TestSamples:
    def test_a_grid_beside_each_snapshot(self, config):
        """Of the same seeds: the noise, and so the pictures, stay; training is what it is without."""
        shown = edm2.train(replace(config, samples=5))
        plain = edm2.train(replace(config, outdir=config.outdir + "2"))
        assert equal(shown.state_dict(0), plain.state_dict(0)) and not list(Path(plain.config.outdir).glob("*.png"))
        files = sorted(path.name for path in Path(config.outdir).glob("*.png"))
        assert files == ["samples-0000000.064-0.100.png", "samples-0000000.128-0.100.png"]
        grid = read_png(Path(config.outdir) / files[1])
        assert grid.shape == (2 * 36 + 4, 3 * 36 + 4, 1)  # of 5 in rows of 3, pixels enlarged four times
        snapshot = edm2.load_snapshot(Path(config.outdir) / "network-snapshot-0000000.128-0.100.safetensors")
        (batch,) = edm2.generate_images(snapshot.net, range(5), num_steps=18)
        assert np.array_equal(grid[4:36:4, 4:36:4], batch.images[0])

    def test_by_default(self, config):
        """64 of pixels; of latents none, but by a VAE."""
        counts = [
            preview.Preview(replace(config, samples=samples), encoder, ALONE).count
            for encoder, samples in (
                (RGBEncoder(), None),
                (RGBEncoder(), 7),
                (edm2.latents.LatentEncoder(), None),
                (edm2.latents.LatentEncoder(), 0),
            )
        ]
        assert counts == [64, 7, 0, 0]
        with pytest.raises(edm2.UserError, match="--vae decodes latents, and .* holds pixels"):
            edm2.train(replace(config, vae="some"))
        assert not Path(config.outdir).exists()

    @pytest.mark.parametrize(("samples", "vae"), [(None, "folder"), (3, None)])
    def test_of_latents(self, config, monkeypatch, samples, vae):
        """By the VAE that is given, or that which the encoder names."""
        encoder, asked = edm2.latents.LatentEncoder(), []
        monkeypatch.setattr(preview, "load_vae", lambda *arguments: asked.append(arguments) or RGBEncoder())
        found = preview.Preview(replace(config, samples=samples, vae=vae), encoder, ALONE)
        assert isinstance(found.encoder, RGBEncoder) and asked == [(encoder, vae, CPU)]
        preview.Preview(replace(config, samples=samples, vae=vae), encoder, Processes(1, 2, CPU))  # which draws none
        assert len(asked) == 1

    def test_too_little_memory(self, config, monkeypatch):
        """Costs the picture, not the run."""

        def fails(*arguments, **options):
            raise torch.OutOfMemoryError("no")

        monkeypatch.setattr(preview.ImageGenerator, "__call__", fails)
        with pytest.warns(UserWarning, match="no samples of network-snapshot-0000000.064-0.100.safetensors: the GPU's memory"):
            trainer = edm2.train(replace(config, duration=64, samples=4))
        assert trainer.nimg == 64 and not list(Path(config.outdir).glob("*.png"))


class Writer:
    """In place of TensorBoard's."""

    def __init__(self, folder: Path, purge_step: int):
        self.folder, self.purge_step, self.scalars, self.pictures, self.closed = folder, purge_step, {}, [], False
        Writer.last = self

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_image(self, tag, image, step, dataformats):
        self.pictures.append((tag, image.shape, step, dataformats))

    def close(self):
        self.closed = True


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        monkeypatch.setattr("edm2.tensorboard.find_spec", lambda name: name == "tensorboard")
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))

    def test_a_run(self, config):
        """Every number of every status line, pictures of samples; a resumed run drops what it will do again."""
        edm2.train(replace(config, duration=64, samples=4))
        written = Writer.last
        assert (written.folder, written.purge_step, written.closed) == (Path(config.outdir) / "tensorboard", 1, True)
        for line in read_stats(config.outdir):
            nimg = round(line["Progress/kimg"] * 1000)
            assert written.scalars["Loss/loss", nimg] == line["Loss/loss"]
            assert written.scalars["Magnitudes/gains/dec.8x8_block0", nimg] == line["Magnitudes/gains"]["dec.8x8_block0"]
        assert [(tag, step, form) for tag, _, step, form in written.pictures] == [("samples", 64, "HWC")]
        edm2.train(replace(config, samples=4))
        assert Writer.last.purge_step == 65

    def test_names(self):
        levels = {"sigma": [0.00213, 70.0], "images": [3.0, 0.0], "loss": [0.5, None]}
        stats = {"Loss/loss": 1.0, "Throughput/MFU": None, "timestamp": 5.0, "Loss/by_noise_level": levels, "Magnitudes/gains": {"a": 2.0}}
        assert dict(scalars(stats)) == {"Loss/loss": 1.0, "Loss/by_noise_level/loss/0.00213": 0.5, "Magnitudes/gains/a": 2.0}

    def test_other_processes_write_nothing(self, tmp_path):
        Writer.last = None
        with TensorBoard(tmp_path, 0, Processes(1, 2, CPU)) as board:
            board.write({"Loss/loss": 1.0}, 1)
            board.show(np.zeros((2, 2, 1), np.uint8), 1)
        assert Writer.last is None
