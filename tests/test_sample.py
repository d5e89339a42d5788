"""sample.py as a user calls it: options, files, what is made anew, published presets, and one clear line for each mistake."""

import hashlib
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

import edm2
import sample
from edm2 import pictures, samples
from edm2.distributed import Processes
from edm2.generate import ImageGenerator
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.pictures import GAP
from edm2.published import PUBLISHED
from edm2.sampler import Heun
from edm2.samples import Sample, SampleFolder, make_samples
from tests.command_lines import ROOT, call, refused, small_net
from tests.conftest import tiny_net
from tests.vae_files import plain, save_tiny


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
            """And what was said."""
            out = [f"--outdir={tmp_path / name}", f"--grid={tmp_path / name / 'grid.png'}", f"--net={net}"]
            command = [sys.executable, *launcher, "sample.py", *out, *options]
            result = subprocess.run(command, cwd=ROOT, env=one_thread_env, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}, result.stdout

        two_processes = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
        (one, _), (two, said) = files("one"), files("two", *two_processes)
        assert one == two and len(one) == 6 and said.startswith("5 images in ")
        for name in ("000001.png", "000002.png", "000004.png"):  # their shares are of what is missing
            (tmp_path / "two" / name).unlink()
        two, said = files("two", *two_processes)
        assert one == two and said.startswith("3 images in ") and said.endswith("; 2 were there already\n")

    def test_each_process_makes_its_share(self, net, monkeypatch):
        made = []

        class Folder(SampleFolder):
            def save(self, samples, batch, writers):
                made.extend(samples)

            def has(self, sample):
                return sample.seed == 2

        class Two(Processes):
            def share(self, x):
                return [s for s in samples if s.seed != 2]

            def barrier(self):
                pass

        network, samples = edm2.load_snapshot(net).net, [Sample(seed, None) for seed in range(8)]
        generate, folder = ImageGenerator(network), Folder(net.parent, False, RGBEncoder(), {})
        for rank, seeds in enumerate(([0, 3, 5, 7], [1, 4, 6])):
            made.clear()
            make_samples(generate, folder, samples, Heun(1), 2, False, Two(rank, 2, torch.device("cpu")))
            assert [each.seed for each in made] == seeds

    def test_progress_in_a_log(self, net, tmp_path, monkeypatch):
        monkeypatch.setattr(samples, "LINE_INTERVAL", 0.0)
        result = call(sample.main, f"--net={net}", f"--outdir={tmp_path}", "--steps=1", "--seeds=0-4", "--batch=2")
        assert [line.split(",")[0] for line in result.output.splitlines()[:3]] == [f"{n} of 5 images" for n in (2, 4, 5)]

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

    def test_a_guide_without_a_strength_is_told(self, net, tmp_path):
        """It is not looked at then; nor with a strength of 1, which needs no words."""
        options = f"--net={net}", f"--outdir={tmp_path}/a", "--seeds=0", "--steps=1", f"--gnet={tmp_path}/none"
        note = "Note: nothing is guided: --gnet needs --guidance\n"
        assert call(sample.main, *options).output.count(note) == 1 and note in call(sample.main, *options, "--dry-run").output
        assert "nothing is guided" not in call(sample.main, *options, "--guidance=1").output

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

    def test_latents(self, tmp_path):
        """As pixels by a VAE, or as arrays."""
        vae = save_tiny(tmp_path / "vae")
        edm2.save_snapshot(tmp_path / "net", tiny_net(img_channels=4), encoder=LatentEncoder())
        options = [f"--net={tmp_path}/net", f"--outdir={tmp_path}", "--steps=2", "--seeds=5,6"]
        for more in (["--latents"], [f"--vae={vae}"]):
            result = call(sample.main, *options, *more)
            assert result.exit_code == 0, result.output
        latents, image = np.load(tmp_path / "000005.npy"), np.asarray(Image.open(tmp_path / "000005.png"))
        assert latents.shape == (4, 8, 8)
        for more in (["--latents"], [f"--vae={tmp_path / 'vae' / '..' / 'vae'}"]):  # what is there stays, the VAE by its bytes
            assert call(sample.main, *options, *more).output.startswith("0 images")
        assert call(sample.main, *options, "--latents", "--rho=5").output.startswith("2 images")
        expected = plain(vae).decode(torch.from_numpy(latents)[None]).sample.clamp(0, 1) * 255
        assert np.abs(expected[0].permute(1, 2, 0).numpy() - image).max() < 1.01 and image.std() > 0
        assert "--grid needs pixels" in refused(sample.main, *options, "--latents", f"--grid={tmp_path}/grid.png")
        assert f"{tmp_path}/no is no folder" in refused(sample.main, *options, f"--vae={tmp_path}/no")

    def test_options_of_latents_for_a_network_of_pixels(self, net, tmp_path):
        for option in ("--latents", "--vae=x"):
            assert f"{option.partition('=')[0]}: {net} makes pixels" in refused(sample.main, f"--net={net}", f"--outdir={tmp_path}", option)

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
            (["--seeds=3,3", "--class=1,2"], "--class gives seed 3 two classes: a seed has one image"),
            (["--vae=x", "--latents"], "--vae decodes latents, --latents does not"),
            (["--grid=OUT/000016.png"], "has the name of a sample"),
            (["--guidance-interval=2,1"], "'2,1' is no interval; write its two bounds, the lower first, like 0.19,1.61"),
            (["--guidance-interval=1"], "no interval"),
            (["--guidance-interval=-1,1"], "no interval"),
            (["--guidance-interval=nan,1"], "no interval"),
            (["--guidance-interval=inf,inf"], "no interval"),
        ],
    )
    def test_bad_options(self, net, tmp_path, args, words):
        out = tmp_path / "out"
        assert words in refused(sample.main, f"--net={net}", f"--outdir={out}", *(arg.replace("OUT", str(out)) for arg in args))
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


def make(net, out, *args) -> list[str]:
    """What sample.py says in the end, and all that it said."""
    result = call(sample.main, f"--net={net}", f"--outdir={out}", "--steps=2", *args)
    assert result.exit_code == 0, result.output
    return result.output.strip().splitlines()


def contents(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.png")}


class TestWhatIsThere:
    def test_it_stays(self, net, tmp_path):
        """After an interruption only the rest is made; the files are those of one go, whatever the batches."""
        out, whole = tmp_path / "out", tmp_path / "whole"
        assert make(net, whole, "--seeds=0-4")[-1].startswith("5 images in ")
        make(net, out, "--seeds=1,3")
        (out / "000003.png").unlink()
        before = (out / "000001.png").stat()
        last = make(net, out, "--seeds=0-4", "--batch=3")[-1]
        assert last.startswith("4 images in ") and last.endswith(" images/s; 1 were there already")
        assert (out / "000001.png").stat() == before and contents(out) == contents(whole)

    def test_other_options_make_it_anew(self, net, tmp_path):
        """Each that changes pixels, and only those."""
        guide, out = tmp_path / "guide.safetensors", tmp_path / "out"
        edm2.save_snapshot(guide, small_net(0))
        guided = [f"--gnet={guide}", "--guidance=2"]
        ways = [[], ["--fast"], [], guided, [*guided, "--guidance-interval=1,90"], ["--class=3"], ["--class=4,3"], ["--steps=3"]]
        ways += [["--sigma_max=40"], ["--sigma_min=0.01"], ["--rho=5"], ["--S_churn=1"], ["--S_churn=1", "--S_noise=2"]]
        for way in ways:
            assert [make(net, out, "--seeds=5", *way)[-1].split()[0] for _ in range(2)] == ["1", "0"], way
        make(net, out, "--seeds=5")
        for way in (
            [f"--gnet={guide}", "--guidance=1"],
            ["--batch=7"],
            ["--guidance-interval=0.1,1"],
            [f"--grid={tmp_path}/grid.png"],
            ["--S_noise=2"],
        ):
            assert make(net, out, "--seeds=5", *way)[-1].startswith("0 images"), way
        assert make(net, out, "--seeds=5", "--overwrite")[-1].startswith("1 images")

    def test_a_seed_twice_is_one_image(self, net, tmp_path):
        assert make(net, tmp_path, "--seeds=1,1,2,1", "--class=3")[-1].startswith("2 images") and len(contents(tmp_path)) == 2

    def test_what_is_replaced_is_told(self, net, tmp_path):
        make(net, tmp_path, "--seeds=0-2")
        assert make(net, tmp_path, "--seeds=1-3", "--rho=5")[-1].endswith("; 2 replaced files that were made otherwise")

    def test_its_recipe_is_json_for_everybody(self, net, tmp_path):
        make(net, tmp_path, "--seeds=5", "--S_churn=1")

        def refuse(text):
            raise ValueError(text)

        recipe = json.loads(Image.open(tmp_path / "000005.png").text["edm2"], parse_constant=refuse)
        assert recipe["seed"] == 5 and recipe["S_max"] == "inf" and recipe["device"] == "cpu"

    def test_so_does_another_network_of_the_same_name(self, net, tmp_path):
        make(net, tmp_path / "out", "--seeds=5")
        before = contents(tmp_path / "out")
        other = small_net(5)
        with torch.no_grad():
            other.unet.out_gain.fill_(0.5)
        edm2.save_snapshot(net, other)
        assert make(net, tmp_path / "out", "--seeds=5")[-1].startswith("1 images") and contents(tmp_path / "out") != before

    def test_a_class_belongs_to_its_seed(self, net, tmp_path):
        """Which classes come in turn depends on the seeds that are asked for, not on those that are left."""
        make(net, tmp_path / "whole", "--seeds=0-5", "--class=0,1,2")
        make(net, tmp_path / "out", "--seeds=0-2", "--class=0,1,2")
        assert make(net, tmp_path / "out", "--seeds=2-5", "--class=2,0,1")[-1].endswith("; 1 were there already")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        assert make(net, tmp_path / "out", "--seeds=2-5", "--class=0,1,2")[-1].startswith("4 images")

    @pytest.mark.parametrize("damage", ["foreign", "truncated", "no image"])
    def test_what_is_no_such_image_is_replaced(self, net, tmp_path, damage):
        make(net, tmp_path, "--seeds=5")
        path, before = tmp_path / "000005.png", contents(tmp_path)
        if damage == "foreign":
            Image.new("RGB", (8, 8)).save(path)
        else:
            path.write_bytes(before["000005.png"][:20] if damage == "truncated" else b"text")
        make(net, tmp_path, "--seeds=5")
        assert contents(tmp_path) == before


def test_writers_keep_few_files_waiting(monkeypatch):
    """However slow the disk: they hold the one who makes images."""
    monkeypatch.setattr(pictures, "WAITING", 3)
    gate, written = threading.Event(), []

    def write(i):
        gate.wait(10)
        written.append(i)

    with pictures.Writers() as writers:
        threading.Timer(0.5, gate.set).start()
        start = time.monotonic()
        for i in range(3):
            writers.write(write, i)
        assert time.monotonic() - start < 0.4
        writers.write(write, 3)
        assert time.monotonic() - start > 0.4
    assert sorted(written) == [0, 1, 2, 3]


class TestPresets:
    def test_published_rows(self):
        """Some of the paper's tables, and what holds for all."""
        assert len(PUBLISHED) == 36 and all(name.startswith("edm2-img") for name in PUBLISHED)
        assert PUBLISHED["edm2-img512-xxl-guid-fid"] == ("edm2-img512-xxl-0939524-0.015", "edm2-img512-xs-uncond-2147483-0.015", 1.2)
        assert PUBLISHED["edm2-img64-s-autog-dino"] == ("edm2-img64-s-1073741-0.105", "edm2-img64-xs-0134217-0.175", 2.2)
        digest = hashlib.sha256(json.dumps(PUBLISHED).encode()).hexdigest()
        assert digest.startswith("99460e1fa1d881e8")  # as checked against the published table, row by row
        assert PUBLISHED["edm2-img512-m-dino"] == ("edm2-img512-m-2147483-0.155", None, 1)
        for name, row in PUBLISHED.items():
            guided = any(part in name for part in ("guid", "autog"))
            assert (row.gnet is not None) == (row.guidance > 1) == guided
            assert row.net.startswith(name[: name.index("-", 12)]) and "uncond" in (row.gnet or "uncond") or "autog" in name

    def test_a_preset_names_network_guide_and_strength(self, net, tmp_path, monkeypatch):
        """Each of which an option overrides."""
        row = PUBLISHED["edm2-img512-s-guid-fid"]
        networks = tmp_path / "networks"
        networks.mkdir()
        (networks / f"{row.net}.safetensors").write_bytes(net.read_bytes())
        edm2.save_snapshot(networks / f"{row.gnet}.safetensors", small_net(0))
        options = ["--preset=edm2-img512-s-guid-fid", f"--networks={networks}", "--steps=2", "--seeds=0"]

        def pixels(name, *args):
            result = call(sample.main, f"--outdir={tmp_path / name}", *args)
            assert result.exit_code == 0, result.output
            return np.asarray(Image.open(tmp_path / name / "000000.png"))

        by_name = pixels("a", *options)
        spelled = [f"--net={net}", f"--gnet={networks / row.gnet}.safetensors", "--steps=2", "--seeds=0"]
        np.testing.assert_array_equal(by_name, pixels("b", *spelled, "--guidance=1.4"))
        assert (by_name != pixels("c", *options, "--guidance=3")).any()
        np.testing.assert_array_equal(pixels("d", *options, "--guidance=1"), pixels("e", f"--net={net}", "--steps=2", "--seeds=0"))
        guide = networks / f"{row.gnet}.safetensors"
        guide.rename(tmp_path / "guide")
        np.testing.assert_array_equal(
            pixels("d", *options, "--guidance=1", "--overwrite"), pixels("e", f"--net={net}", "--steps=2", "--seeds=0")
        )
        (tmp_path / "guide").rename(guide)
        (networks / f"{row.net}.safetensors").unlink()
        np.testing.assert_array_equal(by_name, pixels("f", *options, f"--net={net}"))
        monkeypatch.setattr("edm2.published.URL", "http://127.0.0.1:9")  # where nobody is
        monkeypatch.setattr("edm2.download.TRIES", 1)
        line = refused(sample.main, f"--outdir={tmp_path / 'g'}", *options)
        assert f"http://127.0.0.1:9/{row.net}.pkl cannot be downloaded" in line
        (networks / f"{row.net}.pkl").write_bytes(b"\x80\x04N.")
        assert f"{row.net}.pkl is refused: it holds no network" in refused(sample.main, f"--outdir={tmp_path / 'g'}", *options)

    def test_unknown_and_missing(self, tmp_path):
        assert "did you mean edm2-img512-s-fid" in refused(sample.main, f"--outdir={tmp_path}", "--preset=edm2-img512-s-fdi")
        assert "give a network: --net, or a published one by --preset" in refused(sample.main, f"--outdir={tmp_path}")
