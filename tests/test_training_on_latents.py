"""Training on latents: drawn from their distributions, standardised by the statistics that fit, checked against what they tell."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2.config import TrainingConfig
from edm2.data import ArrayDataset, ImageDataset
from edm2.distributed import Processes
from edm2.encoding import ALONE
from edm2.image_files import ImageFiles
from edm2.latents import RAW_STATISTICS, VAE, LatentEncoder, LatentFacts
from edm2.trainer import Draws, Trainer
from tests.conftest import relative_error
from tests.dataset_files import encode, fails, make, told_of_latents
from tests.run_files import run_steps


class TestDraws:
    @pytest.fixture()
    def latents(self, config, tmp_path):
        """Standard deviations larger than the means, so that the draws of the latents matter."""
        folder, rng = tmp_path / "latents", np.random.RandomState(0)
        folder.mkdir()
        for i in range(4):
            np.save(folder / f"{i}.npy", np.concatenate([rng.randn(4, 8, 8), np.full((4, 8, 8), 5)]).astype(np.float32))
        return replace(config, data=str(folder), cond=False, batch=8, duration=16, status=8, snapshot=8, checkpoint=8)

    def test_drawn_afresh_at_each_visit(self, latents):
        trainer = run_steps(latents, steps=1)
        assert trainer.image_shape == (4, 8, 8) and trainer.net.label_dim == 0
        first = Draws.of_step(trainer, 8).normal
        trainer.step()
        assert relative_error(Draws.of_step(trainer, 8).normal, first) > 0.1

    def test_accumulation_changes_nothing(self, latents):
        whole, parts = run_steps(latents), run_steps(replace(latents, batch_gpu=2))
        for (name, a), b in zip(whole.net.named_parameters(), parts.net.parameters()):
            assert relative_error(a, b) < 1e-4, name

    def test_draws_belong_to_image_numbers(self, latents):
        whole = Draws.of_step(Trainer(latents, ALONE), 8).normal
        parts = [Draws.of_step(Trainer(latents, Processes(rank, 2, torch.device("cpu"))), 4).normal for rank in (0, 1)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)

    def test_their_pixel_range_is_recorded(self, latents):
        """In the options, which keep another out, and in the encoder of every snapshot."""
        corrected = replace(latents, pixel_range=(-1, 1))
        trainer = edm2.train(corrected)
        assert trainer.encoder.raw_std == RAW_STATISTICS[-1, 1][1]
        snapshots = list(Path(latents.outdir).glob("network-snapshot-*"))
        assert snapshots and all(edm2.load_snapshot(path).encoder.config() == trainer.encoder.config() for path in snapshots)
        edm2.train(replace(corrected, duration=24))
        with pytest.raises(edm2.UserError, match=r"pixel_range: \[-1, 1\] there, None here"):
            edm2.train(latents)

    def test_runs_that_do_not_record_it_had_the_official_one(self, latents):
        edm2.train(latents)
        path = Path(latents.outdir) / "training_options.json"
        options = json.loads(path.read_text())
        assert options.pop("pixel_range") is None
        path.write_text(json.dumps(options))
        with pytest.raises(edm2.UserError, match=r"pixel_range: None there, \[-1, 1\] here"):
            edm2.train(replace(latents, pixel_range=(-1, 1)))
        assert edm2.train(options | {"duration": 24}).nimg == 24
        path.write_text(json.dumps(options | {"pixel_range": [0, 1]}))  # as it was recorded once
        assert edm2.train(options | {"duration": 32}).nimg == 32

    def test_damaged_latents_stop_the_run(self, latents):
        np.save(Path(latents.data) / "2.npy", np.full((8, 8, 8), np.nan, np.float32))
        with pytest.raises(edm2.UserError, match="the loss is nan after 8 images"):
            edm2.train(latents)


def config(tmp_path, data, **options) -> TrainingConfig:
    options = {"batch": 8, "duration": 16, "status": 8, "snapshot": 8, "checkpoint": 8, "samples": 0} | options
    return TrainingConfig(outdir=str(tmp_path / "run"), data=str(data), preset="digits", **options)


def encoder(tmp_path, data, **options) -> LatentEncoder:
    return Trainer(config(tmp_path, data, **options), ALONE).encoder


@pytest.fixture()
def official(encoded, tmp_path):
    """The same latents, told to be of the official VAE."""
    files = ImageFiles(encoded / "latents.zip")
    latents = told_of_latents(encoded / "latents.zip") | {"vae": VAE}
    facts = {"labels": [[name, i % 3] for i, name in enumerate(files.names)], "latents": latents}
    return make(tmp_path / "official", {name: files.read(name) for name in files.names} | {"dataset.json": json.dumps(facts).encode()})


class TestFacts:
    def test_statistics(self, encoded, official, tmp_path):
        """The published ones for the official VAE, the data's for others, or as it is wanted."""
        data, facts = encoded / "latents.zip", told_of_latents(encoded / "latents.zip")
        own, published = (tuple(facts["raw_mean"]), tuple(facts["raw_std"])), RAW_STATISTICS[0, 1]
        for source, stats, expected in (
            (data, None, own),
            (data, "data", own),
            (official, None, published),
            (official, "published", published),
            (official, "data", own),
        ):
            far = pytest.warns(UserWarning, match=r"the latents will have means \[.*--latent-stats=data takes the dataset's own")
            with far if expected == published else nullcontext():
                found = encoder(tmp_path, source, latent_stats=stats)
            assert (found.raw_mean, found.raw_std) == expected and found.vae == (VAE if source == official else "tiny")
        drawn = found.encode(torch.from_numpy(ImageDataset(data).images(range(11))), torch.randn(11, 4, 4, 4))
        assert drawn.mean().abs() < 0.05 and abs(drawn.std() - 0.5) < 0.05
        with fails(f"--latent-stats=published are those of {VAE}, and these latents are of tiny"):
            encoder(tmp_path, data, latent_stats="published")

    def test_range(self, encoded, tmp_path):
        assert encoder(tmp_path, encoded / "centred.zip").pixel_range == (-1, 1)
        assert encoder(tmp_path, encoded / "centred.zip", pixel_range=(-1, 1)).pixel_range == (-1, 1)
        facts = LatentFacts(VAE, (-1, 1), *RAW_STATISTICS[-1, 1])
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32), latents=facts)
        found = Trainer(config(tmp_path, "", cond=False), ALONE, dataset).encoder
        assert found.pixel_range == (-1, 1) and (found.raw_mean, found.raw_std) == RAW_STATISTICS[-1, 1]
        with fails(r"--pixel-range 0,1: the dataset tells that its pixels were in \[-1, 1\]"):
            encoder(tmp_path, encoded / "centred.zip", pixel_range=(0, 1))

    def test_untold(self, tmp_path):
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32))
        (trainer,) = [Trainer(config(tmp_path, "", cond=False), ALONE, dataset)]
        assert trainer.encoder.config() == LatentEncoder().config()
        with fails("--latent-stats=data: this dataset does not tell its statistics"):
            Trainer(config(tmp_path, "", cond=False, latent_stats="data"), ALONE, dataset)
        facts = LatentFacts("mine", (0, 1), (1.0,) * 4, (2.0,) * 4)
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32), latents=facts)
        assert Trainer(config(tmp_path, "", cond=False), ALONE, dataset).encoder.vae == "mine"

    def test_another_network_to_begin_with(self, encoded, official, tmp_path):
        """It knows its latents only as they were standardised for it."""
        theirs = LatentEncoder((0.0,) * 4, (1.0,) * 4, vae="tiny")
        edm2.save_snapshot(tmp_path / "net.safetensors", edm2.build("digits", 4, 4, 3), encoder=theirs)
        init, data = str(tmp_path / "net.safetensors"), encoded / "latents.zip"
        for source, text in (
            (encoded / "images.zip", "is another network"), (official, "vae tiny and"),
            (encoded / "centred.zip", r"pixel_range \[0, 1\] and \[-1, 1\]"),
            (data, rf"was trained on other data than these \(raw_mean \[0.0, .*give --latent-stats={init}"),
        ):  # fmt: skip
            with pytest.warns(UserWarning, match="the latents will have means") if source == official else nullcontext():
                start = Trainer(config(tmp_path, source, init=init), ALONE).start
            with fails(text):
                start()
        for source in (encoded / "centred.zip", official, encoded / "images.zip"):
            with fails(f"--latent-stats {init}: its latents are others"):
                encoder(tmp_path, source, latent_stats=init)
        assert encoder(tmp_path, data, latent_stats=init).config() == theirs.config()

    def test_held_out_images(self, encoded, official, tmp_path):
        data = encoded / "latents.zip"
        assert Trainer(config(tmp_path, data, held_out=str(data)), ALONE).held_out
        with fails("the held-out latents are of .*, those to train on of"):
            Trainer(config(tmp_path, data, held_out=str(encoded / "centred.zip")), ALONE)
        unchecked = ArrayDataset(ImageDataset(data).images(range(11)), latents=LatentFacts("tiny", (0, 1), (0.0,) * 4, (1.0,) * 4))
        assert Trainer(config(tmp_path, data), ALONE, held_out=unchecked).held_out  # by the name

    def test_mirror(self, encoded, tmp_path):
        with fails("--mirror is for pixels: mirrored latents are not those of a mirrored image"):
            encoder(tmp_path, encoded / "latents.zip", mirror=True)

    def test_other_data_later(self, encoded, tmp_path):
        """A run goes on with what it began with, and its snapshots tell of it."""
        data = tmp_path / "data.zip"
        data.write_bytes((encoded / "latents.zip").read_bytes())
        trainer = edm2.train(config(tmp_path, data))
        path = max((tmp_path / "run").glob("network-snapshot-*.safetensors"))
        assert edm2.load_snapshot(path).encoder.config() == trainer.encoder.config()
        assert edm2.train(config(tmp_path, data, duration=24)).nimg == 24
        data.write_bytes((encoded / "centred.zip").read_bytes())
        with fails(r"began with other data \(pixel_range \[0, 1\] and \[-1, 1\]"):
            edm2.train(config(tmp_path, data, duration=32))
        with fails("another run .latent_stats: None there, data here"):
            edm2.train(replace(config(tmp_path, data, duration=32), latent_stats="data"))


FACTS = {"vae": "tiny", "pixel_range": [0, 1], "raw_mean": [0.0] * 4, "raw_std": [1.0] * 4}


@pytest.mark.parametrize(
    "change",
    [
        {"vae": ""}, {"vae": 3}, {"pixel_range": [0, 255]}, {"pixel_range": 1}, {"raw_std": [1.0] * 3}, {"raw_std": [0.0] * 4},
        {"raw_mean": ["a"] * 4}, {"raw_mean": []}, {"raw_std": [float("inf")] * 4}, {"raw_mean": [float("nan")] * 4},
        {"vae_sha256": "abc"}, {"other": 1}, {"raw_mean": 1},
    ],
)  # fmt: skip
def test_senseless_facts(tmp_path, change):
    array = encode(np.ones((8, 4, 4), np.float32), "npy")
    make(tmp_path / "a", {"0.npy": array, "dataset.json": json.dumps({"labels": None, "latents": FACTS | change}).encode()})
    with fails("a/dataset.json is malformed in what it tells of latents"):
        ImageDataset(tmp_path / "a", use_labels=False)
    make(tmp_path / "a", {"dataset.json": json.dumps({"labels": None, "latents": FACTS}).encode()})
    assert ImageDataset(tmp_path / "a", use_labels=False).latents.vae_sha256 is None


def test_other_channels_than_told(tmp_path):
    array = encode(np.ones((6, 8, 8), np.float32), "npy")
    make(tmp_path / "a", {"0.npy": array, "dataset.json": json.dumps({"labels": None, "latents": FACTS}).encode()})
    with fails("the arrays have 6 channels, and dataset.json tells of 4 means and deviations"):
        encoder(tmp_path, tmp_path / "a", cond=False)
