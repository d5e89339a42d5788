"""Datasets of images ↔ datasets of latents, and what they tell of themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edm2 import encoding
from edm2.cli.main import main
from edm2.config import TrainingConfig
from edm2.data import ImageDataset
from edm2.dataset_writer import DatasetWriter
from edm2.dataset_zip import encode_png, write_zip
from edm2.encoding import ALONE, decode_dataset, encode_dataset
from edm2.files import sha256
from edm2.image_files import ImageFiles
from edm2.latent_statistics import LatentSums, latent_statistics
from edm2.latents import VAE, LatentEncoder, encoder_from_config
from edm2.trainer import Trainer
from edm2.vae import load_vae, load_vae_to_encode
from tests.command_lines import call, refused
from tests.dataset_files import encode, fails, make, pixels, told_of_latents
from tests.vae_files import WEIGHTS, save_tiny

ROOT = Path(__file__).parent.parent


class TestEncode:
    def test_values(self, encoded):
        """Those of diffusers, by `VAEEncoder`; labels stay."""
        images, latents = ImageDataset(encoded / "images.zip"), ImageDataset(encoded / "latents.zip")
        assert latents.image_shape == (8, 4, 4) and latents.dtype == np.float32
        vae = load_vae(LatentEncoder(vae="tiny"), encoded / "tiny")
        expected = vae.encode_pixels(torch.from_numpy(images.images(range(11)))).numpy()
        np.testing.assert_array_equal(latents.images(range(11)), expected)
        np.testing.assert_array_equal(latents.labels(range(11)), images.labels(range(11)))
        assert not np.array_equal(ImageDataset(encoded / "centred.zip").image(0), expected[0])

    def test_names_of_classes_stay(self, encoded, tmp_path):
        labels, classes = ImageFiles(encoded / "images.zip").labels(), ["a", "b", "c"]
        with DatasetWriter(tmp_path / "images.zip", "png", []) as writer:
            for _, image in ImageFiles(encoded / "images.zip").arrays():
                writer.add(encode_png(image.transpose(1, 2, 0)))
            writer.finish({"labels": labels.tolist(), "classes": classes})
        vae = load_vae_to_encode("tiny", path=encoded / "tiny")
        encode_dataset(ImageFiles(tmp_path / "images.zip"), tmp_path / "latents.zip", vae)
        decode_dataset(ImageFiles(tmp_path / "latents.zip"), tmp_path / "decoded.zip", vae)
        for name in ("latents", "decoded"):
            found = ImageFiles(tmp_path / f"{name}.zip")
            assert found.class_names() == classes and np.array_equal(found.labels(), labels)
            assert call(main, "info", f"{tmp_path}/{name}.zip").output.count("a, b, c") == 1

    def test_what_is_told(self, encoded):
        for name, pixel_range in (("latents", [0, 1]), ("centred", [-1, 1])):
            facts = told_of_latents(encoded / f"{name}.zip")
            mean, std = facts.pop("raw_mean"), facts.pop("raw_std")
            assert facts == {"vae": "tiny", "pixel_range": pixel_range, "vae_sha256": sha256(encoded / "tiny" / WEIGHTS)}
            assert (mean, std) == tuple(latent_statistics(encoded / f"{name}.zip"))
        lines = call(main, "info", f"{encoded}/latents.zip").output
        assert "tiny" in lines and facts["vae_sha256"] in lines

    def test_any_batch_and_number_of_processes(self, encoded, tmp_path, one_thread_env):
        """The same bytes."""
        latents, images = tmp_path / "a.zip", tmp_path / "b.zip"
        code = f"""
import sys, torch
from edm2.distributed import processes
from edm2.encoding import decode_dataset, encode_dataset
from edm2.image_files import ImageFiles
from edm2.vae import load_vae_to_encode
with processes() as procs:
    vae = load_vae_to_encode("tiny", path="{encoded}/tiny")
    batch = int(sys.argv[1])
    encode_dataset(ImageFiles("{encoded}/images.zip"), sys.argv[2] + "/a.zip", vae, batch, procs)
    procs.barrier()
    decode_dataset(ImageFiles(sys.argv[2] + "/a.zip"), sys.argv[2] + "/b.zip", vae, batch, procs)
"""
        (tmp_path / "code.py").write_text(code)
        (tmp_path / "one").mkdir()
        env = one_thread_env | {"PYTHONPATH": str(ROOT)}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        for start, batch, out in (torchrun, 2, tmp_path), ([], 32, tmp_path / "one"):
            subprocess.run([sys.executable, *start, "code.py", str(batch), out], cwd=tmp_path, env=env, check=True, capture_output=True)
        for path in (latents, images):
            assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
        assert len(ImageDataset(images)) == 11

    def test_interruptions(self, encoded, tmp_path, monkeypatch):
        """The statistics too are those of all."""
        add, count = DatasetWriter.add, iter(range(100))

        def once(writer, data, state=None):
            if next(count) in (4, 7):
                raise KeyboardInterrupt
            add(writer, data, state)

        monkeypatch.setattr(DatasetWriter, "add", once)
        args = "dataset", "encode", f"{encoded}/images.zip", f"{tmp_path}/a.zip", f"--vae={encoded}/tiny", "--batch=3"
        for _ in range(2):
            result = call(main, *args)
            assert result.exit_code == 1 and "Interrupted: what is done is kept, and the same command goes on." in result.output
        progress = []
        vae = load_vae_to_encode("tiny", path=encoded / "tiny")
        encode_dataset(ImageFiles(encoded / "images.zip"), tmp_path / "a.zip", vae, progress=progress.append)
        assert progress == [6] + [1] * 5 and (tmp_path / "a.zip").read_bytes() == (encoded / "latents.zip").read_bytes()

    def test_names(self, encoded, tmp_path, monkeypatch):
        """Of a folder its own, unless another is given; of a name on the hub that."""
        args = "dataset", "encode", f"{encoded}/images.zip"
        call(main, *args, f"{tmp_path}/a.zip", f"--vae={encoded}/tiny", "--vae-name=some/vae")
        assert told_of_latents(tmp_path / "a.zip")["vae"] == "some/vae"
        monkeypatch.setattr("edm2.vae._folder", lambda path: {VAE: encoded / "tiny", "their/vae": encoded / "tiny"}[path])
        call(main, *args, f"{tmp_path}/b.zip")
        call(main, *args, f"{tmp_path}/c.zip", "--vae=their/vae")
        assert [told_of_latents(tmp_path / f"{name}.zip")["vae"] for name in "bc"] == [VAE, "their/vae"]

    def test_other_vaes(self, tmp_path):
        """Of 16 channels, as newer ones have: to a network of so many."""
        save_tiny(tmp_path / "sixteen", 16)
        write_zip(tmp_path / "images.zip", [pixels(i, 32, 32, 3) for i in range(4)])
        call(main, "dataset", "encode", f"{tmp_path}/images.zip", f"{tmp_path}/a.zip", f"--vae={tmp_path}/sixteen")
        trainer = Trainer(TrainingConfig("", str(tmp_path / "a.zip"), preset="digits", cond=False), ALONE)
        assert trainer.net.img_channels == 16 and trainer.encoder.vae == "sixteen"
        assert list(trainer.encoder.raw_std) == told_of_latents(tmp_path / "a.zip")["raw_std"]

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
    def test_bad_images(self, encoded, tmp_path, name, data, message):
        files = {f"00000/img{i:08d}.png": encode(pixels(i, 16, 16, 3)) for i in range(0 if name == "0.png" else 40)}
        make(tmp_path / "bad", files | {name: data})
        with fails(message):
            encode_dataset(ImageFiles(tmp_path / "bad"), tmp_path / "a.zip", load_vae_to_encode("tiny", path=encoded / "tiny"))
        assert os.listdir(tmp_path) == ["bad"]

    def test_the_official_vae_by_its_weights(self, encoded, tmp_path, monkeypatch):
        """Whatever its folder is called; and no other by its name."""
        args = "dataset", "encode", f"{encoded}/images.zip", f"{tmp_path}/a.zip", f"--vae={encoded}/tiny"
        assert "--vae-name: this is not stabilityai/sd-vae-ft-mse" in refused(main, *args, f"--vae-name={VAE}")
        monkeypatch.setattr("edm2.cli.latents.VAE_SHA256", sha256(encoded / "tiny" / WEIGHTS))
        assert call(main, *args).exit_code == 0 and told_of_latents(tmp_path / "a.zip")["vae"] == VAE

    def test_a_vae_that_overflows(self, encoded, tmp_path):
        """Told at the first image, in one line; and one that makes all alike, at the end."""
        vae = load_vae_to_encode("tiny", path=encoded / "tiny")
        assert vae.vae.dtype == torch.float32
        with fails("the VAE tiny makes latents that cannot be trained on: their standard deviations are not positive"):
            encoding._facts(vae, LatentSums(2, [5.0] * 4, [12.5] * 4))
        vae.vae.quant_conv.weight.data.fill_(float("nan"))
        with fails("img00000000.png: the VAE tiny makes latents of this image, or of the next 10, that are not finite"):
            encode_dataset(ImageFiles(encoded / "images.zip"), tmp_path / "a.zip", vae)
        assert not os.listdir(tmp_path)

    def test_what_is_there_stays(self, encoded):
        before = (encoded / "latents.zip").read_bytes()
        line = refused(main, "dataset", "encode", f"{encoded}/images.zip", f"{encoded}/latents.zip", f"--vae={encoded}/tiny")
        assert "latents.zip exists" in line and (encoded / "latents.zip").read_bytes() == before


class TestDecode:
    def test_values(self, encoded, tmp_path):
        for name, pixel_range in (("latents", (0, 1)), ("centred", (-1, 1))):
            call(main, "dataset", "decode", f"{encoded}/{name}.zip", f"{tmp_path}/{name}.zip", f"--vae={encoded}/tiny", "--batch=4")
            images, latents = ImageDataset(tmp_path / f"{name}.zip"), ImageDataset(encoded / f"{name}.zip")
            vae = load_vae(LatentEncoder(pixel_range=pixel_range), encoded / "tiny")
            mean = torch.from_numpy(latents.images(range(11))[:, :4])
            expected = vae.decode(vae.encode(torch.cat([mean, mean], dim=1), torch.zeros_like(mean)))
            difference = images.images(range(11)).astype(int) - expected.numpy()
            assert abs(difference).max() <= 1 and (difference != 0).mean() < 0.01  # standardised and back: rounding
            np.testing.assert_array_equal(images.labels(range(11)), latents.labels(range(11)))

    def test_another_vae(self, encoded, tmp_path):
        """Than the latents were made with: said, and recorded in every snapshot."""
        save_tiny(tmp_path / "other")
        weights = load_file(tmp_path / "other" / WEIGHTS)
        save_file({name: x + 0.01 for name, x in weights.items()}, tmp_path / "other" / WEIGHTS, {"format": "pt"})
        encoder = LatentEncoder.of(ImageDataset(encoded / "latents.zip").latents)
        assert encoder_from_config(json.loads(json.dumps(encoder.config()))).vae_sha256 == sha256(encoded / "tiny" / WEIGHTS)
        with pytest.warns(UserWarning, match="other holds another VAE than the latents were made with"):
            load_vae(encoder, tmp_path / "other")
        load_vae(encoder, encoded / "tiny")

    def test_bad_input(self, encoded, tmp_path):
        line = refused(main, "dataset", "decode", f"{encoded}/latents.zip", f"{tmp_path}/a.zip")
        assert "its latents are those of the VAE 'tiny'; give that, or a folder that holds it, with --vae" in line
        vae = load_vae(LatentEncoder(), encoded / "tiny")
        with fails(r"img00000000.png: expected latents, float32 of 8 channels, got uint8 \[3, 16, 16\]"):
            decode_dataset(ImageFiles(encoded / "images.zip"), tmp_path / "a.zip", vae)
        assert not os.listdir(tmp_path)
