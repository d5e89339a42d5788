"""`edm2 sweep`: its values against the definitions, what is made again, and what it refuses."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file

import edm2
from edm2.averages import RunAverages
from edm2.cli import sweep as command
from edm2.cli.main import main
from edm2.data import ImageDataset
from edm2.dataset_zip import write_zip
from edm2.features import SmallClassifier, SmallFeatures
from edm2.frechet import Gaussian, frechet_distance
from edm2.latents import LatentEncoder
from edm2.metrics import FrechetDistance, open_labelled
from edm2.sweep import EVERYWHERE, Point, Result, Sweep, grid, ranges, run_guide, self_guide
from tests.command_lines import call, refused, small_net
from tests.conftest import tiny_net
from tests.dataset_files import encode, make, pixels
from tests.run_files import average, make_run


@pytest.fixture(autouse=True)
def quick(hardly_trained, monkeypatch):
    """One test looks at the picture."""
    monkeypatch.setattr(command, "draw", lambda results, metric, out: None)


@pytest.fixture()
def run(tmp_path, data) -> Path:
    return make_run(tmp_path / "run", data)


DRAW = command.draw
QUICK = "--seeds=0-7", "--steps=2", "--batch=8"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "sweep" / "sweep.jsonl").read_text().splitlines()]


def swept(run: Path, *args) -> list[dict]:
    """All results there are after a command."""
    result = call(main, "sweep", run, *QUICK, *args)
    assert result.exit_code == 0, result.output
    return lines(run)


def value(run: Path, data: Path, net: edm2.Precond, **options) -> float:
    """The metric by its definition, with the classifier that the command has left."""
    dataset = ImageDataset(data)
    classifier = SmallClassifier(dataset.image_shape, 5)
    (path,) = (run / "sweep").glob("features-*.safetensors")
    classifier.load_state_dict(load_file(path))
    measure = SmallFeatures(classifier)
    images = np.concatenate([batch.images for batch in edm2.generate_images(net, range(8), class_idx=range(5), num_steps=2, **options)])
    real = np.ascontiguousarray(dataset.images(range(len(dataset))).transpose(0, 2, 3, 1))
    return frechet_distance(Gaussian.of(measure(images)), Gaussian.of(measure(real)))


class TestValues:
    def test_widths_and_the_network_itself_as_guide(self, run, data, monkeypatch):
        """Every point by the definition; the files; the lowest."""
        monkeypatch.setattr(command, "draw", DRAW)
        result = call(main, "sweep", run, *QUICK, "--std=0.05,0.08", "--guidance=1,2")
        assert result.exit_code == 0, result.output
        points = lines(run)
        assert [(p["std"], p["guidance"]) for p in points] == [(0.05, 1), (0.05, 2), (0.08, 1), (0.08, 2)]
        for p in points:
            net = average(run, p["std"])
            guide = {"gnet": edm2.Unlabelled(net), "guidance": 2} if p["guidance"] == 2 else {}
            assert p["value"] == pytest.approx(value(run, data, net, **guide), rel=1e-3)
        assert len({p["value"] for p in points}) == 4
        lowest = min(points, key=lambda p: p["value"])
        told = f"lowest: sigma_rel {lowest['std']:.3f}  guidance {lowest['guidance']:g}  frechet-small {lowest['value']:.4f}"
        assert told in result.output.splitlines() and f"wrote {run}/sweep/sweep.png" in result.output
        with Image.open(run / "sweep" / "sweep.png") as image:
            assert image.size == (700, 450)

    def test_another_run_as_guide(self, run, data, tmp_path):
        """Its average of the same σ_rel, at its own time."""
        guide = make_run(tmp_path / "guide", data, seed=1)
        points = swept(run, "--std=0.05,0.08", "--guidance=2", f"--gnet={guide}")
        points += swept(run, "--std=0.08", "--guidance=2", f"--gnet={guide}", "--gnet-kimg=2")[2:]
        for p, nimg in zip(points, (3000, 3000, 2000), strict=True):
            expected = value(run, data, average(run, p["std"]), gnet=average(guide, p["std"], nimg), guidance=2)
            assert p["value"] == pytest.approx(expected, rel=1e-3)

    def test_the_run_earlier_as_guide(self, run, data):
        (p,) = swept(run, "--std=0.08", "--guidance=2", f"--gnet={run}", "--gnet-kimg=1")
        expected = value(run, data, average(run, 0.08), gnet=average(run, 0.08, 1000), guidance=2)
        assert p["value"] == pytest.approx(expected, rel=1e-3)

    def test_a_file_as_guide(self, run, data, tmp_path):
        """The same for every σ_rel; without labels, too."""
        guide = small_net(0)
        edm2.save_snapshot(tmp_path / "guide.safetensors", guide, dtype=torch.float32)
        for p in swept(run, "--std=0.05,0.08", "--guidance=1.5", f"--gnet={tmp_path}/guide.safetensors"):
            assert p["value"] == pytest.approx(value(run, data, average(run, p["std"]), gnet=guide, guidance=1.5), rel=1e-3)

    def test_what_guides_nothing_is_told(self, run):
        options = "sweep", run, *QUICK, "--std=0.08"
        assert "nothing is guided: --gnet needs --guidance" in call(main, *options, "--gnet=none").output
        assert "nothing is guided: --guidance-interval needs --guidance" in call(main, *options, "--guidance-interval=0,1").output
        assert "nothing is guided" not in call(main, *options).output

    def test_intervals(self, run, data):
        """Without guidance there is one; all others are points of their own."""
        intervals = "--guidance-interval=0,1", "--guidance-interval=0,inf"
        points = swept(run, "--std=0.08", "--guidance=1,2", *intervals)
        assert [(p["guidance"], p["interval"]) for p in points] == [(1, None), (2, ["0.0", "1.0"]), (2, None)]
        net = average(run, 0.08)
        for p, interval in zip(points[1:], ((0, 1), (0, math.inf))):
            expected = value(run, data, net, gnet=edm2.Unlabelled(net), guidance=2, guidance_interval=interval)
            assert p["value"] == pytest.approx(expected, rel=1e-3)

    def test_an_earlier_time(self, run, data):
        (p,) = swept(run, "--std=0.08", "--kimg=2")
        assert p["nimg"] == 2000 and p["value"] == pytest.approx(value(run, data, average(run, 0.08, 2000)), rel=1e-3)

    def test_batches_do_not_matter(self, run):
        """But for rounding in the features."""
        values = []
        for batch in (3, 8):
            swept(run, "--std=0.08", "--guidance=2", f"--batch={batch}")
            values += [p["value"] for p in lines(run)]
            (run / "sweep" / "sweep.jsonl").unlink()
        assert values[0] == pytest.approx(values[1], rel=1e-5)

    def test_an_unconditional_network(self, tmp_path, data):
        """Is measured by the same metric; the guide is a run as well."""
        run, guide = (make_run(tmp_path / name, data, seed, 0.0, label_dim=0) for seed, name in enumerate(("run", "guide")))
        assert len(swept(run, "--std=0.08", "--guidance=1,2", f"--gnet={guide}")) == 2


class TestResuming:
    ARGS = "--std=0.05,0.08", "--guidance=1,2"

    @pytest.fixture()
    def made(self, monkeypatch) -> list[float]:
        """The σ_rel of each network that is made."""
        made, own = [], RunAverages.average
        monkeypatch.setattr(RunAverages, "average", lambda self, std, *more: made.append(std) or own(self, std, *more))
        return made

    def test_each_network_is_made_once(self, run, made):
        swept(run, "--std=0.05,0.08", "--guidance=1,1.5,2", "--guidance-interval=1,100")
        assert made == [0.05, 0.08]

    def test_what_is_there_is_not_made_again(self, run, made, monkeypatch):
        first = swept(run, *self.ARGS)
        made.clear()
        monkeypatch.setattr("edm2.measuring.train_classifier", None)
        result = call(main, "sweep", run, *QUICK, *self.ARGS, "--batch=3")
        assert f"4 of 4 are in {run}/sweep/sweep.jsonl already" in result.output and "lowest:" in result.output
        assert lines(run) == first and not made
        assert swept(run, "--std=0.08,0.1", "--guidance=1")[:4] == first and made == [0.1]

    def test_interrupted(self, run, made, monkeypatch):
        """By a signal in the third point: two are there, and the same command makes the others, to the bit."""
        own, calls = FrechetDistance.__call__, []

        def interrupted(self, images):
            calls.append(1)
            next(iter(images))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return own(self, images)

        with monkeypatch.context() as patch:
            patch.setattr(FrechetDistance, "__call__", interrupted)
            assert call(main, "sweep", run, *QUICK, *self.ARGS, "--batch=2").exit_code == 1
        assert [(p["std"], p["guidance"]) for p in lines(run)] == [(0.05, 1), (0.05, 2)]
        (run / "sweep" / "sweep.jsonl").unlink()
        whole = swept(run, *self.ARGS)
        (run / "sweep" / "sweep.jsonl").write_text("".join(json.dumps(p) + "\n" for p in whole[:2]))
        made.clear()
        assert swept(run, *self.ARGS) == whole and made == [0.08]

    @pytest.mark.parametrize("cut", [1, 40, "line"])
    def test_a_last_line_that_was_cut_off(self, run, cut):
        """Is made again if it cannot be read; nothing else is lost."""
        whole, path = swept(run, *self.ARGS), run / "sweep" / "sweep.jsonl"
        text = path.read_text()
        path.write_text(text[: -len(json.dumps(whole[-1])) if cut == "line" else -cut])
        result = call(main, "sweep", run, *QUICK, *self.ARGS)
        assert result.exit_code == 0 and f"{4 if cut == 1 else 3} of 4" in result.output
        read = [line for line in path.read_text().splitlines() if line.endswith("}")]
        assert [json.loads(line) for line in read] == whole
        swept_again = path.read_text()
        call(main, "sweep", run, *QUICK, *self.ARGS)
        assert path.read_text() == swept_again

    def test_lines_that_are_none(self, run):
        """Are passed over, and stay."""
        folder = run / "sweep"
        folder.mkdir()
        others = b'\xff\n[1, 2]\n{"value": "low"}\n{"value": 1, "std": []}\n' + b"[" * 100_000 + b"\n{}\n"
        (folder / "sweep.jsonl").write_bytes(others)
        assert call(main, "sweep", run, *QUICK, "--std=0.08").exit_code == 0
        written = (folder / "sweep.jsonl").read_bytes()
        assert written.startswith(others) and json.loads(written[len(others) :])["std"] == 0.08

    def test_other_settings_are_other_points(self, run, tmp_path, data):
        """Everything that changes a value."""
        guide = make_run(tmp_path / "guide", data, seed=1)
        write_zip(tmp_path / "other.zip", np.random.default_rng(1).integers(0, 256, (60, 8, 8, 3), np.uint8), [i % 5 for i in range(60)])
        base = "--std=0.08", "--guidance=2"
        changes = ["--seeds=0-8", "--seeds=1-8", "--steps=3", "--kimg=2", f"--gnet={guide}", "--guidance-interval=0,50",
                   f"--data={tmp_path}/other.zip", f"--gnet={run}/network-snapshot-0000001.000-0.050.safetensors"]  # fmt: skip
        for count, change in enumerate(["--batch=8", *changes], 1):
            assert len(swept(run, *base, change)) == count, change
        for change in changes:
            assert len(swept(run, *base, change)) == 1 + len(changes), change
        assert len({p["value"] for p in lines(run)}) == 1 + len(changes)
        with torch.no_grad():
            first = next(iter(sorted(run.glob("*.safetensors"))))
            first.write_bytes((guide / first.name).read_bytes())
        assert len(swept(run, *base)) == 2 + len(changes)

    def test_later_snapshots_change_nothing(self, run):
        first = swept(run, "--std=0.08", "--kimg=2")
        for path in run.glob("*3.000*.safetensors"):
            path.unlink()
        assert swept(run, "--std=0.08") == first

    def test_a_damaged_classifier_is_trained_again(self, run):
        (first,) = swept(run, "--std=0.08")
        (path,) = (run / "sweep").glob("features-*.safetensors")
        path.write_bytes(path.read_bytes()[:-8])
        assert swept(run, "--std=0.08") == [first]  # of the same bits: the same point


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--std=0.05,0.29"], "σ_rel 0.29 is impossible: it lies between 0 and 0.288675"),
            (["--std=0"], "σ_rel 0 is impossible"),
            (["--std=-0.1"], "σ_rel -0.1 is impossible"),
            (["--std=nan"], "'nan' is no list of numbers"),
            (["--std="], "'' is no list of numbers"),
            (["--guidance=1;2"], "'1;2' is no list of numbers"),
            (["--guidance=2", "--gnet=RUN"], "is the run itself"),
            (["--gnet-kimg=1"], "--gnet-kimg is for a --gnet that is a run's folder"),
            (["--guidance=2", "--gnet=/no/such/file"], "/no/such/file does not exist"),
            (["--guidance=2", "--gnet=TMP"], "TMP holds no network snapshots"),
            (["--guidance=2", "--gnet=TMP/data.zip", "--gnet-kimg=1"], "--gnet-kimg is for a --gnet that is a run's folder"),
            (["--guidance=2", "--gnet=TMP/grey.safetensors"], "grey.safetensors makes images of another size"),
            (["--guidance=2", "--gnet=TMP/six.safetensors"], "six.safetensors knows 6 classes, TMP/run 5"),
            (["--guidance-interval=2,1"], "'2,1' is no interval"),
            (["--kimg=1.5"], "there is no snapshot at 1.5 thousand images; the nearest is at"),
            (["--seeds=3"], "--seeds: a metric needs two images"),
            (["--seeds=5-6,5"], "and no seed twice"),
            (["--data=/no/such/data"], "/no/such/data does not exist"),
            (["--data=TMP/grey.zip"], "TMP/run and TMP/grey.zip differ in image size"),
            (["--data=TMP/unlabelled.zip"], "unlabelled.zip has no labels"),
            (["--data=TMP/large.zip"], "large.zip holds images of 72x72, and this metric is for sides of 4 to 64 pixels"),
            (["--data=TMP/latents"], "latents holds latents, and this metric measures pixels"),
            (["--data=TMP/damaged.zip"], "damaged.zip"),
            (["--metric=fad"], "unknown metric 'fad'; did you mean fid"),
            (["--vae=TMP"], "--vae: TMP/run makes pixels"),
            (["--ref=TMP/data.zip"], "TMP/data.zip is refused, it is no reference statistics"),
            (["--ref=TMP/none.npz", "--data=TMP/data.zip"], "--ref stands in a dataset's place: give it or --data"),
            (["--out=/dev/null/x"], "/dev/null/x"),
        ],
    )
    def test_options(self, run, tmp_path, args, words):
        edm2.save_snapshot(tmp_path / "grey.safetensors", tiny_net())
        edm2.save_snapshot(tmp_path / "six.safetensors", small_net(6))
        random = np.random.default_rng(0)
        write_zip(tmp_path / "grey.zip", random.integers(0, 256, (5, 8, 8), np.uint8), range(5))
        write_zip(tmp_path / "unlabelled.zip", random.integers(0, 256, (5, 8, 8, 3), np.uint8))
        write_zip(tmp_path / "large.zip", random.integers(0, 256, (5, 72, 72, 3), np.uint8), range(5))
        make(tmp_path / "damaged.zip", {"0.png": encode(pixels(0, 8, 8, 3)), "1.png": b"none"}, [["0.png", 0], ["1.png", 4]])
        (tmp_path / "latents").mkdir()
        np.save(tmp_path / "latents" / "0.npy", np.ones((8, 8, 8), np.float32))
        before = sorted(run.iterdir())
        args = [arg.replace("TMP", str(tmp_path)).replace("RUN", str(run)) for arg in args]
        assert words.replace("TMP", str(tmp_path)) in refused(main, "sweep", run, *QUICK, *args)
        assert sorted(run.iterdir()) == before

    def test_runs(self, run, tmp_path, data):
        def line(*args) -> str:
            return refused(main, "sweep", *args, *QUICK)

        assert "nothing holds no network snapshots: give the folder of a training run" in line(tmp_path / "nothing")
        assert "holds no network snapshots" in line(tmp_path)
        plain = make_run(tmp_path / "plain", data, label_dropout=0)
        assert "give --gnet" in line(plain, "--guidance=1,2") and "not trained with --label-dropout" in line(plain, "--guidance=2")
        others = make_run(tmp_path / "others", data, label_dim=6)
        assert f"{others} and {data} differ in image size or number of classes" in line(others)
        (run / "training_options.json").write_text('{"data": "/no/such/data"}')
        assert "/no/such/data, which" in line(run) and "give --data" in line(run)
        (run / "training_options.json").unlink()
        assert "training_options.json does not tell the run's dataset: give --data" in line(run)
        assert not any((folder / "sweep").exists() for folder in (run, plain, others, tmp_path))

    def test_a_run_of_latents(self, tmp_path, data):
        folder = tmp_path / "run"
        folder.mkdir()
        net = tiny_net(img_channels=4)
        meta = {"nimg": 1000, "std": 0.05}
        edm2.save_snapshot(folder / "network-snapshot-0000001.000-0.050.safetensors", net, encoder=LatentEncoder(), meta=meta)
        assert "makes VAE latents, and this metric measures pixels" in refused(main, "sweep", folder, f"--data={data}")

    def test_snapshots_that_do_not_fit(self, run, data):
        path = run / "network-snapshot-0000001.000-0.050.safetensors"
        kept = path.read_bytes()
        path.write_bytes(kept[:-10])
        assert "0000001.000-0.050.safetensors is truncated" in refused(main, "sweep", run, *QUICK)
        edm2.save_snapshot(path, small_net(5), meta={"nimg": 1000})
        assert "does not say of how many images" in refused(main, "sweep", run, *QUICK)
        edm2.save_snapshot(path, small_net(6), meta={"nimg": 1000, "std": 0.05})
        assert "is of another network than" in refused(main, "sweep", run, *QUICK)
        edm2.save_snapshot(path, small_net(5), meta={"nimg": 1000, "std": 0.1})
        assert "of one width at one time" in refused(main, "sweep", run, *QUICK)
        assert not (run / "sweep").exists()


class TestInPython:
    def test_features_of_the_users_own(self, run, data, tmp_path):
        """Any function of images; here their mean pixels."""

        def brightness(images: np.ndarray) -> np.ndarray:
            assert images.dtype == np.uint8 and images.shape[1:] == (8, 8, 3)
            return images.mean(axis=(1, 2))

        dataset, averages = ImageDataset(data), RunAverages(run)
        metric = FrechetDistance("brightness", brightness, dataset)
        sweep = Sweep(averages, metric, tmp_path / "out", self_guide(averages), seeds=range(8), steps=2)
        results = list(sweep.measure(grid([0.08], [1, 2])))
        assert [result.point for result in results] == [Point(0.08), Point(0.08, 2.0)]
        net = average(run, 0.08)
        images = np.concatenate([b.images for b in edm2.generate_images(net, range(8), class_idx=range(5), num_steps=2)])
        real = Gaussian.of(dataset.images(range(60)).mean(axis=(2, 3)))
        assert results[0].value == pytest.approx(frechet_distance(Gaussian.of(brightness(images)), real), rel=1e-3)
        assert sweep.all_known() == results and not list(sweep.measure(grid([0.08], [1, 2])))
        sweep = Sweep(averages, metric, tmp_path / "out", None, seeds=range(8), steps=2)
        assert sweep.all_known() == results[:1]
        with pytest.raises(ValueError, match="guidance 2 needs a guide"):
            next(sweep.measure([Point(0.08, 2)]))

    def test_features_that_are_none(self, data):
        with pytest.raises(edm2.UserError, match="mine: features are not all finite"):
            FrechetDistance("mine", lambda images: np.full((len(images), 3), np.nan), ImageDataset(data))
        with pytest.raises(edm2.UserError, match=r"mine: features: expected \[N, d\], got \[60\]"):
            FrechetDistance("mine", lambda images: np.zeros(len(images)), ImageDataset(data))

    def test_a_metric_that_is_no_number(self, run, tmp_path):
        def metric(images):
            return math.nan

        metric.name, metric.facts = "mine", {}
        sweep = Sweep(RunAverages(run), metric, tmp_path / "out", seeds=range(4), steps=1)
        with pytest.raises(edm2.UserError, match="mine is nan at"):
            list(sweep.measure([Point(0.08)]))
        assert not (tmp_path / "out").exists()

    def test_a_guide_of_another_size(self, run, tmp_path, data):
        other = tmp_path / "other"
        other.mkdir()
        edm2.save_snapshot(other / "network-snapshot-0000001.000-0.050.safetensors", tiny_net(), meta={"nimg": 1000, "std": 0.05})
        with pytest.raises(edm2.UserError, match="another size"):
            run_guide(RunAverages(run), RunAverages(other), "cpu")

    def test_grids(self):
        everywhere = grid([0.1], [1, 2, 2], [EVERYWHERE, (0.2, 2)])
        assert everywhere == [Point(0.1), Point(0.1, 2), Point(0.1, 2, (0.2, 2))]
        assert ranges([0, 1, 2, 5, 4, 4, 7, 8]) == "0-2,5,4,4,7-8"


class TestAverages:
    def test_they_are_those_of_all_snapshots(self, run):
        averages = RunAverages(run)
        snapshot = averages.average(0.07)
        for name, p in average(run, 0.07).named_parameters():
            torch.testing.assert_close(dict(snapshot.net.named_parameters())[name], p, rtol=1e-5, atol=1e-5)
        assert averages.nimg == 3000 and snapshot.meta["std"] == 0.07 and snapshot.meta["label_dropout"] == 0.1

    def test_widths_that_snapshots_cannot_make(self, run):
        """Are made, and told of."""
        errors = RunAverages(run).errors([0.08, 0.01])
        assert errors[0] < 0.1 < errors[1]
        result = call(main, "sweep", run, *QUICK, "--std=0.08,0.01")
        assert f"far from the wanted ones: 0.01 ({errors[1]:.0%}); see" in result.output

    def test_times_are_those_of_the_names(self, tmp_path):
        """The published networks' names lose what is below a thousand images."""
        for nimg in (2**20, 2**21):
            meta = {"nimg": nimg, "std": 0.05}
            edm2.save_snapshot(tmp_path / f"network-snapshot-{nimg // 1000:07d}-0.050.safetensors", small_net(0), meta=meta)
        assert RunAverages(tmp_path, 1048).nimg == 2**20 and RunAverages(tmp_path).nimg == 2**21
        with pytest.raises(edm2.UserError, match="no snapshot at 1049 thousand images; the nearest is at 1048"):
            RunAverages(tmp_path, 1049)


def test_datasets_with_and_without_labels(data, tmp_path):
    write_zip(tmp_path / "b.zip", np.zeros((3, 8, 8), np.uint8))
    assert open_labelled(data).label_dim == 5 and open_labelled(tmp_path / "b.zip").label_dim == 0


class TestPicture:
    RESULTS = [
        Result(Point(std, w, interval), v)
        for w, interval, values in ((1.0, EVERYWHERE, (3, 2, 4)), (1.5, EVERYWHERE, (2, 1.5, 5)), (1.5, (0.2, 2.0), (1.9, 2.5, 5.5)))
        for std, v in zip((0.1, 0.03, 0.05), values)
    ]

    def test_what_is_shown(self):
        """A line for each way of guiding, by width; a star at each lowest point."""
        axes = Figure().subplots()
        command._draw_lines(axes, self.RESULTS)
        lines, stars = axes.lines[::2], axes.lines[1::2]
        assert [line.get_ydata().tolist() for line in lines] == [[2, 4, 3], [1.5, 5, 2], [2.5, 5.5, 1.9]]
        assert all(line.get_xdata().tolist() == [0.03, 0.05, 0.1] for line in lines)
        assert [(*star.get_xdata(), *star.get_ydata()) for star in stars] == [(0.03, 2), (0.03, 1.5), (0.1, 1.9)]
        labels = ["w = 1: 2.000 at 3.0%", "w = 1.5: 1.500 at 3.0%", "w = 1.5, σ in (0.2, 2]: 1.900 at 10.0%"]
        assert [line.get_label() for line in lines] == labels

    def test_without_matplotlib(self, run, monkeypatch):
        """The results are told all the same."""
        monkeypatch.setattr(command, "draw", DRAW)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        result = call(main, "sweep", run, *QUICK, "--std=0.08")
        assert result.exit_code == 0 and "lowest:" in result.output and "no picture: plots need matplotlib" in result.output
        assert not (run / "sweep" / "sweep.png").exists()

    def test_earlier_results_are_shown_too(self, run, monkeypatch):
        """Those with the same settings."""
        shown = []
        monkeypatch.setattr(command, "draw", lambda results, *more: shown.append(sorted(result.point.std for result in results)))
        for args in (["--std=0.05"], ["--std=0.08"], ["--std=0.1", "--steps=1"]):
            swept(run, *args)
        assert shown == [[0.05], [0.05, 0.08], [0.1]]
