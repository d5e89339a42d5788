"""train.py and `python -m edm2` as a user calls them: options, files, and one clear line for each mistake. sample.py: `test_sample.py`."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from edm2.cli.main import main as tools
from edm2.latents import VAE
from tests.command_lines import call, refused


@pytest.fixture()
def digits(tmp_path, digits_zip):
    """Arguments of a two-step run on the digits."""
    out = tmp_path / "run"
    return [f"--outdir={out}", f"--data={digits_zip}", "--preset=digits", "--batch=8", "--duration=16", "--status=8",
            "--snapshot=16", "--checkpoint=16"]  # fmt: skip


class TestTrain:
    def test_a_run(self, digits, tmp_path):
        result = call(train.main, *digits)
        assert result.exit_code == 0, result.output
        assert (tmp_path / "run" / "network-snapshot-0000000.016-0.100.safetensors").exists()
        status = [line for line in result.output.splitlines() if line.startswith("kimg")]
        assert len(status) == 2 and all(word in status[0] for word in ("loss", "lr", "img/s", "time"))

    def test_dry_run(self, digits_zip, tmp_path):
        out = tmp_path / "run"
        result = call(train.main, f"--outdir={out}", f"--data={digits_zip}", "--preset=digits", "--dry-run")
        assert result.exit_code == 0 and not out.exists(), result.output
        for text in ("1,008,239", "0.026 G", "115200", "1797 images, 10 labels", "GiB"):
            assert text in result.output

    def test_counts_with_units(self, digits, tmp_path):
        call(train.main, *digits, "--duration=1Ki", "--batch=512", "--status=1Ki", "--snapshot=1Ki", "--checkpoint=0", "-n")
        result = call(train.main, *digits, "--batch=1Ki", "--duration=8Mi", "--status=128Ki", "--snapshot=0", "--checkpoint=0", "-n")
        assert "8388608" in result.output and "131072" in result.output

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--preset=digit"], "unknown preset 'digit'; did you mean digits?"),
            (["--preset=nothing-like-it"], "choose from edm2-img512-xxs"),
            (["--batch=9", "--batch-gpu=2"], "--batch 9 is not a multiple of 1 process(es) × 2"),
            (["--batch=0"], "--batch 0"),
            (["--batch-gpu=0"], "choose another --batch-gpu"),
            (["--snapshot=12"], "--snapshot 12 is not a multiple of the batch of 8"),
            (["--checkpoint=9"], "--checkpoint 9"),
            (["--status=9"], "--status 9"),
            (["--duration=9"], "--duration 9"),
            (["--data=/no/such/place"], "/no/such/place does not exist"),
            (["--preset=edm2-img512-xxs", "--channels=8"], "preset edm2-img512-xxs with 8 channels cannot take 8x8"),
            (["--init=/no/such/file"], "/no/such/file does not exist"),
            (["--batch=8Gb"], "no count of images"),
            (["--label-dropout=1"], "--label-dropout"),
            (["--label-dropout=0.1", "--cond=False"], "--label-dropout needs labels"),
            (["--pixel-range=-1,1"], "--pixel-range and --latent-stats are for datasets of VAE latents; this one holds pixels"),
            (["--pixel-range=0,255"], "--pixel-range"),
            (["--lr=-1"], "--lr"),
            (["--lr=nan"], "nan is no finite number"),
            (["--ls=inf"], "inf is no finite number"),
            (["--max-nonfinite=-1"], "--max-nonfinite"),
            (["--seed=99999999999999999999"], "--seed"),
            (["--outdir=/dev/null/x"], "/dev/null/x"),
        ],
    )
    def test_bad_options(self, digits, tmp_path, args, words):
        assert words in refused(train.main, *digits, *args)
        assert not (tmp_path / "run").exists()

    def test_pixel_range_of_latents(self, digits, tmp_path):
        (tmp_path / "latents").mkdir()
        np.save(tmp_path / "latents" / "0.npy", np.ones((8, 8, 8), np.float32))
        latents = [*digits, f"--data={tmp_path}/latents", "--cond=False", "-n"]
        for args, expected in ([], "[0, 1]"), (["--pixel-range", "-1,1"], "[-1, 1]"), (["--pixel-range=0,1"], "[0, 1]"):
            result = call(train.main, *latents, *args)
            lines = result.output.splitlines()
            assert result.exit_code == 0 and f"latents          of {VAE}, of pixels in {expected}" in lines, result.output

    def test_rampup(self, digits):
        for args, expected in ([], "0.01"), (["--rampup=128Ki"], "0.131072"), (["--rampup=0"], "0.0"):
            assert f"rampup_Mimg      {expected}\n" in call(train.main, *digits, "-n", *args).output

    def test_another_runs_folder(self, digits, tmp_path):
        call(train.main, *digits)
        line = refused(train.main, *digits, "--lr=0.5", "--seed=3")
        assert "lr: 0.02 there, 0.5 here" in line and "seed: 0 there, 3 here" in line

    def images(self, folder: Path, sizes, labels=None) -> list[str]:
        folder.mkdir()
        for i, size in enumerate(sizes):
            Image.new("L", size).save(folder / f"{i}.png")
        if labels is not None:
            (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
        return [f"--data={folder}"]

    def test_bad_datasets(self, digits, tmp_path):
        def line(name, *images, cond=False, **kwargs):
            return refused(train.main, *digits, *self.images(tmp_path / name, *images, **kwargs), f"--cond={cond}")

        assert "holds no images" in line("empty", [])
        assert "mixed/1.png is 16x16" in line("mixed", [(8, 8), (16, 16)])
        assert "9x9 images: img_resolution 9 is not a multiple of 2" in line("odd", [(9, 9)])
        assert "needs square ones" in line("oblong", [(8, 16)])
        assert "pass --cond=False" in line("unlabelled", [(8, 8)], cond=True)
        assert "no label for 1.png" in line("partly", [(8, 8)] * 2, cond=True, labels=[["0.png", 3]])
        folder = tmp_path / "damaged"
        arguments = self.images(folder, [(8, 8)] * 3)
        (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:40])
        assert "damaged/1.png" in refused(train.main, *digits, *arguments, "--cond=False")
        assert not (tmp_path / "run").exists()


class TestTools:
    def test_plot(self, digits, tmp_path):
        call(train.main, *digits)
        result = call(tools, "plot", tmp_path / "run")
        assert result.exit_code == 0, result.output
        with Image.open(tmp_path / "run" / "loss.png") as image:
            assert image.size == (840, 1440)
        stats = tmp_path / "run" / "stats.jsonl"
        keys = "Progress/kimg", "Loss/loss", "Loss/learning_rate"  # all that runs of before told
        lines = [{key: json.loads(line)[key] for key in keys} for line in stats.read_text().splitlines()]
        stats.write_text("\n".join(map(json.dumps, lines)))
        assert call(tools, "plot", tmp_path / "run", f"--out={tmp_path}/new/old.png").exit_code == 0
        with Image.open(tmp_path / "new" / "old.png") as image:
            assert image.size == (840, 480)

    def test_plot_of_nothing(self, tmp_path):
        assert "stats.jsonl cannot be read" in refused(tools, "plot", tmp_path)
        (tmp_path / "stats.jsonl").write_bytes(b"\xff\xfe")
        assert "stats.jsonl cannot be read" in refused(tools, "plot", tmp_path)

    def test_recognise(self, digits_zip, digits, tmp_path):
        """An untrained network is recognised at about the rate of chance; the real images nearly always."""
        call(train.main, *digits)
        net = tmp_path / "run" / "network-snapshot-0000000.016-0.100.safetensors"
        result = call(tools, "metrics", "recognise", f"--net={net}", f"--data={digits_zip}", "--seeds=0-49", "--steps=1")
        assert result.exit_code == 0, result.output
        share, held_out = (float(word.strip("%")) for word in result.output.replace("(", " ").split() if word.endswith("%"))
        assert share < 40 and held_out > 95

    def test_recognise_with_other_data(self, digits, tmp_path, net, digits_zip):
        line = refused(tools, "metrics", "recognise", f"--net={net}", f"--data={digits_zip}")
        assert "differ in image size" in line

    def test_errors_are_one_line(self, tmp_path):
        assert "does not exist" in refused(tools, "dataset", "convert", tmp_path / "none", tmp_path / "a.zip")
