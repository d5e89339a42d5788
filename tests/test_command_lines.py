"""train.py and sample.py as a user calls them: options, files, and one clear line for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import edm2
import sample
import train
from edm2.cli.main import main as tools
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.pictures import GAP
from tests.conftest import tiny_net

ROOT = Path(__file__).parent.parent


def call(command, *args):
    return CliRunner().invoke(command, [str(a) for a in args])


def refused(command, *args) -> str:
    """The one line with which a command line refuses; no traceback, exit code ≠ 0."""
    result = call(command, *args)
    assert result.exit_code != 0 and not isinstance(result.exception, Exception), result.output
    errors = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert len(errors) == 1 and result.output.rstrip().endswith(errors[0]), result.output
    return errors[0]


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
            (["--pixel-range=-1,1"], "--pixel-range is for datasets of VAE latents; this one holds pixels"),
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
        for args, expected in ([], "(0, 1)"), (["--pixel-range", "-1,1"], "(-1, 1)"):
            result = call(train.main, *latents, *args)
            assert result.exit_code == 0 and f"pixel_range      {expected}\n" in result.output, result.output

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


@pytest.fixture()
def net(tmp_path):
    """A snapshot that makes RGB images of 8×8 pixels in 5 classes."""
    path = tmp_path / "net.safetensors"
    edm2.save_snapshot(path, small_net(5), encoder=RGBEncoder())
    return path


def small_net(label_dim: int) -> edm2.Precond:
    torch.manual_seed(label_dim)
    net = edm2.Precond(8, 3, label_dim, model_channels=8, channel_mult=(1,), num_blocks=1, channels_per_head=8)
    for name, p in net.named_parameters():
        if name.endswith("gain"):  # zeros: no label would count, and nothing come out
            torch.nn.init.ones_(p)
    return net


class TestSample:
    def test_files_and_grid(self, net, tmp_path):
        out, grid = tmp_path / "out", tmp_path / "grids" / "grid.png"
        args = ["--seeds=0-2,7,1005", "--steps=2", "--batch=2", "--subdirs", f"--grid={grid}", "--columns=3", "--scale=2"]
        result = call(sample.main, f"--net={net}", f"--outdir={out}", *args)
        assert result.exit_code == 0, result.output
        files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png"))
        assert files == ["000000/000000.png", "000000/000001.png", "000000/000002.png", "000000/000007.png", "001000/001005.png"]
        image, sheet = Image.open(out / files[3]), Image.open(grid)
        assert (image.size, image.mode) == ((8, 8), "RGB")
        tile, gap = 16, GAP
        assert sheet.size == (3 * (tile + gap) + gap, 2 * (tile + gap) + gap)
        fourth = np.asarray(sheet)[tile + 2 * gap : 2 * (tile + gap), gap : gap + tile]
        np.testing.assert_array_equal(fourth[::2, ::2], np.asarray(image))

    def test_two_processes_equal_one(self, net, tmp_path, one_thread_env):
        """Through torchrun: each makes its share of the seeds, and the same files and grid come out."""
        options = "--seeds=0-4 --class=1,3,0 --steps=2 --batch=2".split()

        def files(name, *launcher):
            out = [f"--outdir={tmp_path / name}", f"--grid={tmp_path / name / 'grid.png'}", f"--net={net}"]
            command = [sys.executable, *launcher, "sample.py", *out, *options]
            result = subprocess.run(command, cwd=ROOT, env=one_thread_env, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

        one, two = files("one"), files("two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        assert one == two and len(one) == 6

    def test_a_file_that_cannot_be_written(self, net, tmp_path):
        (tmp_path / "000002.png").mkdir()
        line = refused(sample.main, f"--net={net}", f"--outdir={tmp_path}", "--steps=1", "--seeds=0-3")
        assert line.startswith("Error: cannot write") and "000002.png" in line

    def test_one_step(self, net, tmp_path):
        result = call(sample.main, f"--net={net}", f"--outdir={tmp_path}", "--steps=1", "--seeds=3", "--class=2")
        assert result.exit_code == 0 and np.asarray(Image.open(tmp_path / "000003.png")).std() > 0

    def test_guidance(self, net, tmp_path):
        def image(*args):
            result = call(sample.main, f"--net={net}", f"--outdir={tmp_path}", "--steps=2", "--seeds=0", *args)
            assert result.exit_code == 0, result.output
            return np.asarray(Image.open(tmp_path / "000000.png")).astype(int)

        edm2.save_snapshot(tmp_path / "guide", small_net(0))
        assert np.abs(image(f"--gnet={tmp_path}/guide", "--guidance=1.5") - image()).max() > 0
        np.testing.assert_array_equal(image(f"--gnet={net}", "--guidance=1"), image())
        guided = [image(f"--gnet={tmp_path}/guide", "--guidance=1.5", f"--guidance-interval={text}") for text in ("0,inf", "0.1,1", "1,80")]
        np.testing.assert_array_equal(guided[0], image(f"--gnet={tmp_path}/guide", "--guidance=1.5"))
        np.testing.assert_array_equal(guided[1], image())  # of 80 and 0.002, no step
        assert np.abs(guided[2] - guided[0]).max() > 0
        bounds = "2.4", "2.49", "2.6"  # of three steps the second is at 2.515, and 2.49 means it: it is not guided
        below, at, above = (image("--steps=3", f"--gnet={tmp_path}/guide", "--guidance=3", f"--guidance-interval={x},80") for x in bounds)
        np.testing.assert_array_equal(at, above)
        assert np.abs(at - below).max() > 0

    def test_a_network_trained_without_some_labels_guides_itself(self, tmp_path, monkeypatch):
        """By what it makes of no labels; without guidance it is evaluated once."""
        network = small_net(5)
        edm2.save_snapshot(tmp_path / "net", network, meta={"label_dropout": 0.1})

        def image(*args):
            result = call(sample.main, f"--net={tmp_path}/net", f"--outdir={tmp_path}", "--steps=2", "--seeds=0", "--class=2", *args)
            assert result.exit_code == 0, result.output
            return np.asarray(Image.open(tmp_path / "000000.png")).astype(int)

        calls = []
        denoise = edm2.Precond.denoise
        monkeypatch.setattr(edm2.Precond, "denoise", lambda self, x, *args: calls.append(len(x)) or denoise(self, x, *args))
        plain, guided = image(), image("--guidance=3")
        assert np.abs(guided - plain).max() > 0 and calls == 3 * [calls[0]] + 3 * [2 * calls[0]]
        snapshot = edm2.load_snapshot(tmp_path / "net")
        options = dict(class_idx=2, num_steps=2, guidance=3, encoder=snapshot.encoder)
        (batch,) = edm2.generate_images(snapshot.net, [0], edm2.Unlabelled(snapshot.net), **options)
        np.testing.assert_array_equal(guided, batch.images[0])

    def test_latents_become_arrays(self, tmp_path):
        edm2.save_snapshot(tmp_path / "net", tiny_net(), encoder=LatentEncoder((0.0, 1.0), (1.0, 2.0)))
        result = call(sample.main, f"--net={tmp_path}/net", f"--outdir={tmp_path}", "--steps=1", "--seeds=5")
        assert result.exit_code == 0, result.output
        assert np.load(tmp_path / "000005.npy").shape == (2, 8, 8)
        line = refused(sample.main, f"--net={tmp_path}/net", f"--outdir={tmp_path}/out", f"--grid={tmp_path}/grid.png")
        assert "makes VAE latents, not pixels" in line

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--class=5"], "class 5 is out of range: the network knows 0 to 4"),
            (["--net=/no/such/file"], "/no/such/file does not exist"),
            (["--guidance=1.5"], "needs a guide network: give --gnet"),
            (["--steps=0"], "--steps"),
            (["--seeds=1-x"], "no list of integers"),
            (["--seeds=5-3"], "no list of integers"),
            (["--class=3-2"], "no list of integers"),
            (["--sigma_max=inf"], "inf is no finite number"),
            (["--rho=nan"], "nan is no finite number"),
            (["--S_max=nan"], "nan is no finite number"),
            (["--batch=0"], "--batch"),
            (["--sigma_min=90"], "--sigma_min 90.0 must be below"),
            (["--guidance-interval=2,1"], "'2,1' is no interval; write its two bounds, the lower first, like 0.19,1.61"),
            (["--guidance-interval=1"], "no interval"),
            (["--guidance-interval=-1,1"], "no interval"),
            (["--guidance-interval=nan,1"], "no interval"),
            (["--guidance-interval=inf,inf"], "no interval"),
        ],
    )
    def test_bad_options(self, net, tmp_path, args, words):
        out = tmp_path / "out"
        assert words in refused(sample.main, f"--net={net}", f"--outdir={out}", *args)
        assert not out.exists()

    def test_truncated_and_foreign_snapshots(self, net, tmp_path):
        net.write_bytes(net.read_bytes()[:-10])
        assert "net.safetensors is truncated" in refused(sample.main, f"--net={net}", f"--outdir={tmp_path}/out")
        net.write_bytes(b"not a network at all")
        assert "net.safetensors is truncated or no safetensors" in refused(sample.main, f"--net={net}", f"--outdir={tmp_path}/out")

    def test_guide_of_another_size(self, net, tmp_path):
        edm2.save_snapshot(tmp_path / "guide", tiny_net())
        line = refused(sample.main, f"--net={net}", f"--gnet={tmp_path}/guide", "--guidance=2", f"--outdir={tmp_path}/out")
        assert "another size" in line


class TestTools:
    def test_plot(self, digits, tmp_path):
        call(train.main, *digits)
        result = call(tools, "plot", tmp_path / "run")
        assert result.exit_code == 0, result.output
        with Image.open(tmp_path / "run" / "loss.png") as image:
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
