"""Datasets of images ↔ datasets of latents, what they tell of themselves, and what training makes of that."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import edm2
from edm2 import encoding
from edm2.cli.main import main
from edm2.config import TrainingConfig
from edm2.data import ArrayDataset, ImageDataset
from edm2.dataset_writer import DatasetWriter
from edm2.distributed import Processes
from edm2.encoding import decode_dataset, encode_dataset
from edm2.files import sha256
from edm2.image_files import ImageFiles, write_zip
from edm2.latent_statistics import LatentSums, latent_statistics
from edm2.latents import RAW_STATISTICS, VAE, LatentEncoder, LatentFacts, encoder_from_config
from edm2.trainer import Trainer
from edm2.vae import load_vae, load_vae_to_encode
from tests.command_lines import call, refused
from tests.dataset_files import encode, fails, make, pixels
from tests.vae_files import WEIGHTS, save_tiny

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, a VAE named `tiny`, and their latents in both ranges: `latents.zip` and `centred.zip`."""
    folder = tmp_path_factory.mktemp("encoding")
    write_zip(folder / "images.zip", [pixels(i, 16, 16, 3) for i in range(11)], [i % 3 for i in range(11)])
    save_tiny(folder / "tiny")
    for name, args in (("latents", []), ("centred", ["--pixel-range=-1,1"])):
        result = call(main, "dataset", "encode", f"{folder}/images.zip", f"{folder}/{name}.zip", f"--vae={folder}/tiny", *args)
        assert result.output.endswith(f"wrote {folder}/{name}.zip: latents of 11 images by tiny\n"), result.output
    return folder


def told(path) -> dict:
    return ImageFiles(path).latents()


class TestEncode:
    def test_values(self, folder):
        """Those of diffusers, by `VAEEncoder`; labels stay."""
        images, latents = ImageDataset(folder / "images.zip"), ImageDataset(folder / "latents.zip")
        assert latents.image_shape == (8, 4, 4) and latents.dtype == np.float32
        vae = load_vae(LatentEncoder(vae="tiny"), folder / "tiny")
        expected = vae.encode_pixels(torch.from_numpy(images.images(range(11)))).numpy()
        np.testing.assert_array_equal(latents.images(range(11)), expected)
        np.testing.assert_array_equal(latents.labels(range(11)), images.labels(range(11)))
        assert not np.array_equal(ImageDataset(folder / "centred.zip").image(0), expected[0])

    def test_what_is_told(self, folder):
        for name, pixel_range in (("latents", [0, 1]), ("centred", [-1, 1])):
            facts = told(folder / f"{name}.zip")
            mean, std = facts.pop("raw_mean"), facts.pop("raw_std")
            assert facts == {"vae": "tiny", "pixel_range": pixel_range, "vae_sha256": sha256(folder / "tiny" / WEIGHTS)}
            assert (mean, std) == tuple(latent_statistics(folder / f"{name}.zip"))
        lines = call(main, "info", f"{folder}/latents.zip").output
        assert "tiny" in lines and facts["vae_sha256"] in lines

    def test_any_batch_and_number_of_processes(self, folder, tmp_path, one_thread_env):
        """The same bytes."""
        encoded, decoded = tmp_path / "a.zip", tmp_path / "b.zip"
        code = f"""
import sys, torch
from edm2.distributed import processes
from edm2.encoding import decode_dataset, encode_dataset
from edm2.image_files import ImageFiles
from edm2.vae import load_vae_to_encode
with processes() as procs:
    vae = load_vae_to_encode("tiny", path="{folder}/tiny")
    batch = int(sys.argv[1])
    encode_dataset(ImageFiles("{folder}/images.zip"), sys.argv[2] + "/a.zip", vae, batch, procs)
    procs.barrier()
    decode_dataset(ImageFiles(sys.argv[2] + "/a.zip"), sys.argv[2] + "/b.zip", vae, batch, procs)
"""
        (tmp_path / "code.py").write_text(code)
        (tmp_path / "one").mkdir()
        env = one_thread_env | {"PYTHONPATH": str(ROOT)}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        for start, batch, out in (torchrun, 2, tmp_path), ([], 32, tmp_path / "one"):
            subprocess.run([sys.executable, *start, "code.py", str(batch), out], cwd=tmp_path, env=env, check=True, capture_output=True)
        for path in (encoded, decoded):
            assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
        assert len(ImageDataset(decoded)) == 11

    def test_interruptions(self, folder, tmp_path, monkeypatch):
        """The statistics too are those of all."""
        add, count = DatasetWriter.add, iter(range(100))

        def once(writer, data, state=None):
            if next(count) in (4, 7):
                raise KeyboardInterrupt
            add(writer, data, state)

        monkeypatch.setattr(DatasetWriter, "add", once)
        args = "dataset", "encode", f"{folder}/images.zip", f"{tmp_path}/a.zip", f"--vae={folder}/tiny", "--batch=3"
        for _ in range(2):
            result = call(main, *args)
            assert result.exit_code == 1 and "Interrupted: what is done is kept, and the same command goes on." in result.output
        progress = []
        vae = load_vae_to_encode("tiny", path=folder / "tiny")
        encode_dataset(ImageFiles(folder / "images.zip"), tmp_path / "a.zip", vae, progress=progress.append)
        assert progress == [6] + [1] * 5 and (tmp_path / "a.zip").read_bytes() == (folder / "latents.zip").read_bytes()

    def test_names(self, folder, tmp_path, monkeypatch):
        """Of a folder its own, unless another is given; of a name on the hub that."""
        args = "dataset", "encode", f"{folder}/images.zip"
        call(main, *args, f"{tmp_path}/a.zip", f"--vae={folder}/tiny", "--vae-name=some/vae")
        assert told(tmp_path / "a.zip")["vae"] == "some/vae"
        monkeypatch.setattr("edm2.vae._folder", lambda path: {VAE: folder / "tiny", "their/vae": folder / "tiny"}[path])
        call(main, *args, f"{tmp_path}/b.zip")
        call(main, *args, f"{tmp_path}/c.zip", "--vae=their/vae")
        assert [told(tmp_path / f"{name}.zip")["vae"] for name in "bc"] == [VAE, "their/vae"]

    def test_other_vaes(self, tmp_path):
        """Of 16 channels, as newer ones have: to a network of so many."""
        save_tiny(tmp_path / "sixteen", 16)
        write_zip(tmp_path / "images.zip", [pixels(i, 32, 32, 3) for i in range(4)])
        call(main, "dataset", "encode", f"{tmp_path}/images.zip", f"{tmp_path}/a.zip", f"--vae={tmp_path}/sixteen")
        trainer = Trainer(config(tmp_path, tmp_path / "a.zip", cond=False), Processes(0, 1, CPU))
        assert trainer.net.img_channels == 16 and trainer.encoder.vae == "sixteen"
        assert list(trainer.encoder.raw_std) == told(tmp_path / "a.zip")["raw_std"]

    @pytest.mark.parametrize(
        ("name", "data", "message"),
        [
            ("z.png", encode(pixels(0, 16, 16)), r"z.png is uint8 \[1, 16, 16\], and 00000/img00000000.png is uint8 \[3, 16, 16\]"),
            ("z.png", encode(pixels(0, 16, 20, 3)), r"z.png is uint8 \[3, 16, 20\], and"),
            ("0.png", encode(pixels(0, 16, 16)), r"0.png: expected an RGB image, got uint8 \[1, 16, 16\]"),
            ("0.png", encode(pixels(0, 18, 18, 3)), r"0.png: the VAE takes uint8 RGB .* multiples of 4, got"),
            ("z.png", b"text", "z.png: not an image"),
        ],
    )
    def test_bad_images(self, folder, tmp_path, name, data, message):
        files = {f"00000/img{i:08d}.png": encode(pixels(i, 16, 16, 3)) for i in range(0 if name == "0.png" else 40)}
        make(tmp_path / "bad", files | {name: data})
        with fails(message):
            encode_dataset(ImageFiles(tmp_path / "bad"), tmp_path / "a.zip", load_vae_to_encode("tiny", path=folder / "tiny"))
        assert os.listdir(tmp_path) == ["bad"]

    def test_the_official_vae_by_its_weights(self, folder, tmp_path, monkeypatch):
        """Whatever its folder is called; and no other by its name."""
        args = "dataset", "encode", f"{folder}/images.zip", f"{tmp_path}/a.zip", f"--vae={folder}/tiny"
        assert "--vae-name: this is not stabilityai/sd-vae-ft-mse" in refused(main, *args, f"--vae-name={VAE}")
        monkeypatch.setattr("edm2.cli.latents.VAE_SHA256", sha256(folder / "tiny" / WEIGHTS))
        assert call(main, *args).exit_code == 0 and told(tmp_path / "a.zip")["vae"] == VAE

    def test_a_vae_that_overflows(self, folder, tmp_path):
        """Told at the first image, in one line; and one that makes all alike, at the end."""
        vae = load_vae_to_encode("tiny", path=folder / "tiny")
        assert vae.vae.dtype == torch.float32
        with fails("the VAE tiny makes latents that cannot be trained on: their standard deviations are not positive"):
            encoding._facts(vae, LatentSums(2, [5.0] * 4, [12.5] * 4))
        vae.vae.quant_conv.weight.data.fill_(float("nan"))
        with fails("img00000000.png: the VAE tiny makes latents of this image, or of the next 10, that are not finite"):
            encode_dataset(ImageFiles(folder / "images.zip"), tmp_path / "a.zip", vae)
        assert not os.listdir(tmp_path)

    def test_what_is_there_stays(self, folder):
        before = (folder / "latents.zip").read_bytes()
        line = refused(main, "dataset", "encode", f"{folder}/images.zip", f"{folder}/latents.zip", f"--vae={folder}/tiny")
        assert "latents.zip exists" in line and (folder / "latents.zip").read_bytes() == before


class TestDecode:
    def test_values(self, folder, tmp_path):
        for name, pixel_range in (("latents", (0, 1)), ("centred", (-1, 1))):
            call(main, "dataset", "decode", f"{folder}/{name}.zip", f"{tmp_path}/{name}.zip", f"--vae={folder}/tiny", "--batch=4")
            images, latents = ImageDataset(tmp_path / f"{name}.zip"), ImageDataset(folder / f"{name}.zip")
            vae = load_vae(LatentEncoder(pixel_range=pixel_range), folder / "tiny")
            mean = torch.from_numpy(latents.images(range(11))[:, :4])
            expected = vae.decode(vae.encode(torch.cat([mean, mean], dim=1), torch.zeros_like(mean)))
            difference = images.images(range(11)).astype(int) - expected.numpy()
            assert abs(difference).max() <= 1 and (difference != 0).mean() < 0.01  # standardised and back: rounding
            np.testing.assert_array_equal(images.labels(range(11)), latents.labels(range(11)))

    def test_another_vae(self, folder, tmp_path):
        """Than the latents were made with: said, and recorded in every snapshot."""
        save_tiny(tmp_path / "other")
        weights = load_file(tmp_path / "other" / WEIGHTS)
        save_file({name: x + 0.01 for name, x in weights.items()}, tmp_path / "other" / WEIGHTS, {"format": "pt"})
        encoder = LatentEncoder.of(ImageDataset(folder / "latents.zip").latents)
        assert encoder_from_config(json.loads(json.dumps(encoder.config()))).vae_sha256 == sha256(folder / "tiny" / WEIGHTS)
        with pytest.warns(UserWarning, match="other holds another VAE than the latents were made with"):
            load_vae(encoder, tmp_path / "other")
        load_vae(encoder, folder / "tiny")

    def test_bad_input(self, folder, tmp_path):
        line = refused(main, "dataset", "decode", f"{folder}/latents.zip", f"{tmp_path}/a.zip")
        assert "its latents are those of the VAE 'tiny'; give that, or a folder that holds it, with --vae" in line
        vae = load_vae(LatentEncoder(), folder / "tiny")
        with fails(r"img00000000.png: expected latents, float32 of 8 channels, got uint8 \[3, 16, 16\]"):
            decode_dataset(ImageFiles(folder / "images.zip"), tmp_path / "a.zip", vae)
        assert not os.listdir(tmp_path)


def config(tmp_path, data, **options) -> TrainingConfig:
    options = {"batch": 8, "duration": 16, "status": 8, "snapshot": 8, "checkpoint": 8, "samples": 0} | options
    return TrainingConfig(outdir=str(tmp_path / "run"), data=str(data), preset="digits", **options)


def encoder(tmp_path, data, **options) -> LatentEncoder:
    return Trainer(config(tmp_path, data, **options), Processes(0, 1, CPU)).encoder


@pytest.fixture()
def official(folder, tmp_path):
    """The same latents, told to be of the official VAE."""
    files = ImageFiles(folder / "latents.zip")
    latents = told(folder / "latents.zip") | {"vae": VAE}
    facts = {"labels": [[name, i % 3] for i, name in enumerate(files.names)], "latents": latents}
    return make(tmp_path / "official", {name: files.read(name) for name in files.names} | {"dataset.json": json.dumps(facts).encode()})


class TestTraining:
    def test_statistics(self, folder, official, tmp_path):
        """The published ones for the official VAE, the data's for others, or as it is wanted."""
        data, facts = folder / "latents.zip", told(folder / "latents.zip")
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

    def test_range(self, folder, tmp_path):
        assert encoder(tmp_path, folder / "centred.zip").pixel_range == (-1, 1)
        assert encoder(tmp_path, folder / "centred.zip", pixel_range=(-1, 1)).pixel_range == (-1, 1)
        facts = LatentFacts(VAE, (-1, 1), *RAW_STATISTICS[-1, 1])
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32), latents=facts)
        found = Trainer(config(tmp_path, "", cond=False), Processes(0, 1, CPU), dataset).encoder
        assert found.pixel_range == (-1, 1) and (found.raw_mean, found.raw_std) == RAW_STATISTICS[-1, 1]
        with fails(r"--pixel-range 0,1: the dataset tells that its pixels were in \[-1, 1\]"):
            encoder(tmp_path, folder / "centred.zip", pixel_range=(0, 1))

    def test_untold(self, tmp_path):
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32))
        (trainer,) = [Trainer(config(tmp_path, "", cond=False), Processes(0, 1, CPU), dataset)]
        assert trainer.encoder.config() == LatentEncoder().config()
        with fails("--latent-stats=data: this dataset does not tell its statistics"):
            Trainer(config(tmp_path, "", cond=False, latent_stats="data"), Processes(0, 1, CPU), dataset)
        facts = LatentFacts("mine", (0, 1), (1.0,) * 4, (2.0,) * 4)
        dataset = ArrayDataset(np.ones((8, 8, 8, 8), np.float32), latents=facts)
        assert Trainer(config(tmp_path, "", cond=False), Processes(0, 1, CPU), dataset).encoder.vae == "mine"

    def test_another_network_to_begin_with(self, folder, official, tmp_path):
        """It knows its latents only as they were standardised for it."""
        theirs = LatentEncoder((0.0,) * 4, (1.0,) * 4, vae="tiny")
        edm2.save_snapshot(tmp_path / "net.safetensors", edm2.build("digits", 4, 4, 3), encoder=theirs)
        init, data = str(tmp_path / "net.safetensors"), folder / "latents.zip"
        for source, text in (
            (folder / "images.zip", "is another network"), (official, "vae tiny and"),
            (folder / "centred.zip", r"pixel_range \[0, 1\] and \[-1, 1\]"),
            (data, rf"was trained on other data than these \(raw_mean \[0.0, .*give --latent-stats={init}"),
        ):  # fmt: skip
            with pytest.warns(UserWarning, match="the latents will have means") if source == official else nullcontext():
                start = Trainer(config(tmp_path, source, init=init), Processes(0, 1, CPU)).start
            with fails(text):
                start()
        for source in (folder / "centred.zip", official, folder / "images.zip"):
            with fails(f"--latent-stats {init}: its latents are others"):
                encoder(tmp_path, source, latent_stats=init)
        assert encoder(tmp_path, data, latent_stats=init).config() == theirs.config()

    def test_held_out_images(self, folder, official, tmp_path):
        data = folder / "latents.zip"
        assert Trainer(config(tmp_path, data, held_out=str(data)), Processes(0, 1, CPU)).held_out
        with fails("the held-out latents are of .*, those to train on of"):
            Trainer(config(tmp_path, data, held_out=str(folder / "centred.zip")), Processes(0, 1, CPU))
        unchecked = ArrayDataset(ImageDataset(data).images(range(11)), latents=LatentFacts("tiny", (0, 1), (0.0,) * 4, (1.0,) * 4))
        assert Trainer(config(tmp_path, data), Processes(0, 1, CPU), held_out=unchecked).held_out  # by the name

    def test_mirror(self, folder, tmp_path):
        with fails("--mirror is for pixels: mirrored latents are not those of a mirrored image"):
            encoder(tmp_path, folder / "latents.zip", mirror=True)

    def test_other_data_later(self, folder, tmp_path):
        """A run goes on with what it began with, and its snapshots tell of it."""
        data = tmp_path / "data.zip"
        data.write_bytes((folder / "latents.zip").read_bytes())
        trainer = edm2.train(config(tmp_path, data))
        path = max((tmp_path / "run").glob("network-snapshot-*.safetensors"))
        assert edm2.load_snapshot(path).encoder.config() == trainer.encoder.config()
        assert edm2.train(config(tmp_path, data, duration=24)).nimg == 24
        data.write_bytes((folder / "centred.zip").read_bytes())
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
