"""`python -m edm2 dataset check` and `stats`."""

import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from edm2.cli.main import main
from edm2.dataset_zip import write_zip
from edm2.inspection import faults
from edm2.latent_statistics import latent_statistics
from edm2.latents import LatentEncoder
from tests.command_lines import call, refused


@pytest.fixture()
def images(tmp_path):
    """A folder of 100 RGB images, more than are read at a time."""
    write_zip(tmp_path / "a.zip", [np.full((4, 6, 3), i, np.uint8) for i in range(100)], [i % 3 for i in range(100)])
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        file.extractall(tmp_path / "folder")
    return tmp_path / "folder"


class TestCheck:
    def test_a_good_one(self, images, digits_zip):
        assert list(faults(images)) == list(faults(digits_zip)) == []
        assert call(main, "dataset", "check", str(images)).output == f"{images}: 100 files, no fault\n"

    def test_every_fault(self, images):
        """In order, each in one line that names the file; the rest is read all the same."""
        names = sorted(path for path in images.rglob("*.png"))
        names[3].write_bytes(names[3].read_bytes()[:40])
        names[70].write_bytes(b"text")
        write_zip(images / "b.zip", [np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6), np.uint8)])
        with zipfile.ZipFile(images / "b.zip") as file:
            for name, path in zip(file.namelist(), (names[80], names[90])):
                path.write_bytes(file.read(name))
        (images / "b.zip").unlink()
        labels = [[f"00000/{path.name}", 0] for path in names]
        labels[7][1], labels[8][1], labels[9][0], labels[10:11] = -1, "a", "00000/none.png", [labels[10], [labels[10][0], 4]]
        (images / "dataset.json").write_text(json.dumps({"labels": labels}))
        found = list(faults(images))
        of_labels = (
            "two labels for 00000/img00000010.png: 0 and 4",
            "img00000007.png is -1;",
            "img00000008.png is 'a'",
            "no label for 00000/img00000009.png",
            "a label for 00000/none.png, which is not there",
        )
        for line, words in zip(found, of_labels):
            assert "dataset.json" in line and words in line
        assert [str(names[i]) in line for i, line in zip((3, 70, 80, 90), found[5:])] == [True] * 4
        assert found[7].endswith("is uint8 [3, 4, 4], and 00000/img00000000.png is uint8 [3, 4, 6]") and len(found) == 9
        result = call(main, "dataset", "check", str(images))
        assert result.exit_code == 1 and f"Error: {images}: 9 faults in 100 files" in result.output.splitlines()

    def test_any_size(self, images):
        """As `convert` takes them; what it does not is a fault all the same, and a malformed dataset.json one."""
        names = sorted(images.rglob("*.png"))
        for path, image in zip(names[50:], (np.zeros((5, 9, 3)), np.zeros((4, 6)))):
            Image.fromarray(image.astype(np.uint8)).save(path)
        names[3].write_bytes(b"text")
        np.save(images / "latents.npy", np.zeros((8, 2, 2), np.float32))
        (images / "dataset.json").write_text("{")
        result, told = call(main, "dataset", "check", str(images), "--any-size"), list(faults(images, any_size=True))
        assert "dataset.json is malformed" in told[0] and "img00000003.png: not an image" in told[1] and "latents.npy is float32" in told[2]
        assert result.exit_code == 1 and "3 faults in 101 files" in result.output and len(told) == 3
        assert "5 faults in 101" in call(main, "dataset", "check", str(images)).output

    def test_numbers(self, tmp_path):
        for i, value in enumerate((0, np.nan, np.inf)):
            np.save(tmp_path / f"{i}.npy", np.full((8, 2, 2), value, np.float32))
        assert [line.split("/")[-1] for line in faults(tmp_path)] == [f"{i}.npy has numbers that are not finite" for i in (1, 2)]

    def test_latents(self, tmp_path):
        """Deviations below zero, no deviations, and what dataset.json tells."""
        for i, (channels, value) in enumerate(((4, 1.0), (4, -1.0), (4, 1.0))):
            np.save(tmp_path / f"{i}.npy", np.full((channels, 2, 2), value, np.float32))
        assert [line.split("/")[-1] for line in faults(tmp_path)] == ["1.npy has standard deviations below zero"]
        for mean, std, expected in (
            ([1.0, 1.0], [1.0, 1.0], []),
            ([1.0, 9.0], [1.0, 1.0], ["tells of a mean of [1.0, 9.0], and the files' is [1.0, 1.0]"]),
            ([1.0], [1.0], ["tells of a mean of [1.0]", "tells of a standard deviation of [1.0]"]),
            ([1.0], [-1.0], ["is malformed in what it tells of latents: their standard deviations are not positive"]),
        ):
            told = {"vae": "a", "pixel_range": [0, 1], "raw_mean": mean, "raw_std": std}
            (tmp_path / "dataset.json").write_text(json.dumps({"labels": None, "latents": told}))
            found = [line for line in faults(tmp_path) if "1.npy" not in line]
            assert len(found) == len(expected) and all(words in line for words, line in zip(expected, found)), found
        (tmp_path / "odd").mkdir()
        np.save(tmp_path / "odd" / "0.npy", np.ones((3, 2, 2), np.float32))
        assert [line.split("/")[-1] for line in faults(tmp_path / "odd")][0].startswith("0.npy has 3 channels, and latents have means and")

    def test_none(self, tmp_path):
        assert "holds no images" in refused(main, "dataset", "check", str(tmp_path))
        assert "does not exist" in refused(main, "dataset", "check", str(tmp_path / "none"))


class TestStatistics:
    def test_values(self, tmp_path):
        """Those of very many draws."""
        rng = np.random.default_rng(0)
        mean = rng.normal([[[1]], [[-2]]], 1.5, (70, 2, 8, 8)).astype(np.float32)
        std = rng.uniform(0.1, 2, (70, 2, 8, 8)).astype(np.float32)
        for i, (a, b) in enumerate(zip(mean, std)):
            np.save(tmp_path / f"{i:03}.npy", np.concatenate([a, b]))
        draws = mean + std * rng.standard_normal((200, *mean.shape), np.float32)
        found = latent_statistics(tmp_path)
        np.testing.assert_allclose(found.raw_mean, draws.mean(axis=(0, 1, 3, 4)), atol=0.01)
        np.testing.assert_allclose(found.raw_std, draws.std(axis=(0, 1, 3, 4)), rtol=0.01)
        assert json.loads(call(main, "dataset", "stats", str(tmp_path)).output) == found._asdict()
        latents = LatentEncoder(*found).encode(torch.from_numpy(np.concatenate([mean, std], axis=1)), torch.zeros(70, 2, 8, 8))
        assert abs(latents.mean().item()) < 0.01

    def test_no_latents(self, images, tmp_path):
        assert "and no latents: float32 means, then deviations" in refused(main, "dataset", "stats", str(images))
        np.save(tmp_path / "a.npy", np.zeros((8, 2, 2), np.float32))
        np.save(tmp_path / "b.npy", np.zeros((4, 2, 2), np.float32))
        (tmp_path / "a.zip").unlink()
        for path in images.rglob("*.png"):
            path.unlink()
        assert "b.npy has 4 channels, and others have 8" in refused(main, "dataset", "stats", str(tmp_path))
