"""What `edm2 metrics` keeps and makes again, and what it refuses before it begins; errors among several processes."""

import json
import subprocess
import sys

import numpy as np
import pytest

import edm2
from edm2 import features
from edm2.averages import RunAverages
from edm2.cli import common, metrics, metrics_gen
from edm2.cli.main import main
from edm2.data import ImageDataset
from edm2.image_files import write_zip
from edm2.measuring import HEARD, measure_images, open_measures, open_metric
from edm2.metrics import FrechetDistance, open_labelled
from edm2.references import Reference, read_reference, write_reference
from edm2.sweep import Sweep, grid, self_guide
from tests.command_lines import ROOT, call, refused
from tests.dataset_files import encode, fails, make, pixels
from tests.metrics_files import BOTH, CPU, MINE, noise, reference, simulated, told
from tests.test_sweep import make_run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(features, "STEPS", 2)


@pytest.fixture()
def data(tmp_path):
    return noise(tmp_path / "data.zip")


@pytest.fixture()
def ref(tmp_path, data):
    return reference(tmp_path / "ref.npz", data)


@pytest.fixture()
def measured(monkeypatch) -> list[tuple[list[str], object]]:
    """Which metrics of what, each time that images are measured."""
    found = []

    def counting(function, what):
        def counted(*args, **options):
            found.append(([each.name for each in options["measures"]], options[what]))
            return function(*args, **options)

        return counted

    monkeypatch.setattr(metrics_gen, "measure_network", counting(metrics_gen.measure_network, "seeds"))
    monkeypatch.setattr(metrics, "measure_images", counting(metrics.measure_images, "seed"))
    return found


def read(tmp_path) -> dict:
    return json.loads((tmp_path / "out.json").read_text())


class TestKept:
    @pytest.fixture()
    def gen(self, net, ref, tmp_path) -> list[str]:
        return ["gen", f"--net={net}", f"--ref={ref}", f"--metrics={MINE}", "--num=4", "--steps=1", f"--json={tmp_path}/out.json"]

    def test_an_interrupted_command_goes_on(self, gen, tmp_path, measured, monkeypatch):
        """Two of three runs are there: one is made, and all is as it would have been."""
        whole = told(*gen, "--runs=3")
        expected = read(tmp_path)
        (tmp_path / "out.json").unlink()
        own, calls = metrics_gen.measure_network, []

        def interrupted(*args, **options):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return own(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(metrics_gen, "measure_network", interrupted)
            assert call(main, "metrics", *gen, "--runs=3").exit_code == 1
        assert read(tmp_path) == {"runs": expected["runs"][:2], "summaries": []}
        measured.clear()
        again = told(*gen, "--runs=3")
        assert [seeds for _, seeds in measured] == [range(8, 12)] and read(tmp_path) == expected
        lines = [line.removesuffix(f"  (in {tmp_path}/out.json already)") for line in again.splitlines()]
        assert lines == whole.splitlines() and again.count("already") == 2
        before = (tmp_path / "out.json").read_bytes()
        assert told(*gen, "--runs=3").count("already") == 3 and len(measured) == 1
        assert (tmp_path / "out.json").read_bytes() == before

    def test_other_facts_are_other_runs(self, gen, tmp_path, measured):
        """They are added, and what was there stays; more runs make one summary of all."""
        told(*gen, "--runs=2")
        first = read(tmp_path)
        for count, change in enumerate((["--seed=100"], ["--steps=2"], ["--class=1"], ["--num=5"], ["--fast"]), 3):
            told(*gen, *change)
            found = read(tmp_path)
            assert found["runs"][:2] == first["runs"] and len(found["runs"]) == count and found["summaries"] == first["summaries"], change
        told(*gen, "--runs=3")
        (summary,) = read(tmp_path)["summaries"]
        assert summary["runs"] == 3 and first["summaries"][0]["runs"] == 2 and len(measured) == 2 + 5 + 1
        assert summary["metrics"][MINE]["min"] == min(run["metrics"][MINE] for run in (*first["runs"], read(tmp_path)["runs"][-1]))

    def test_another_metric(self, gen, tmp_path, measured):
        """Is measured alone; both are told."""
        told(*gen, "--runs=2")
        output = told(*gen, "--runs=2", BOTH)
        assert [names for names, _ in measured] == [[MINE]] * 2 + [["frechet-small"]] * 2
        assert output.count("already") == 2 and output.count("frechet-small ") == 3  # two runs and the summary
        found = read(tmp_path)
        assert [list(run["metrics"]) for run in found["runs"]] == [[MINE]] * 2 + [["frechet-small"]] * 2
        assert [list(each["metrics"]) for each in found["summaries"]] == [[MINE], ["frechet-small", MINE]]

    def test_images_that_changed(self, ref, tmp_path, measured):
        """Under the same name are others."""
        command = "calc", f"--images={tmp_path}/images.zip", f"--ref={ref}", f"--metrics={MINE}", "--num=20", f"--json={tmp_path}/out.json"
        for seed in (1, 1, 2):
            images = np.random.default_rng(seed).integers(0, 256, (30, 8, 8, 3), np.uint8)
            write_zip(tmp_path / "images.zip", images)
            told(*command, "--seed=0,1,0")
        assert [seed for _, seed in measured] == [0, 1] * 2 and len({run["metrics"][MINE] for run in read(tmp_path)["runs"]}) == 4
        (tmp_path / "out.json").unlink()
        told(*command, "--seed=0,1,0")
        assert [run["seed"] for run in read(tmp_path)["runs"]] == [0, 1] and read(tmp_path)["summaries"][0]["runs"] == 2

    def test_all_images_are_measured_once(self, data, ref, tmp_path):
        """Whatever the seeds: three equal numbers would have no spread."""
        options = f"--images={data}", f"--ref={ref}", f"--metrics={MINE}", f"--json={tmp_path}/out.json"
        output = told("calc", *options, "--num=60", "--seed=0,1,2")
        assert "Note: --num=60 is all images there are, and --seed draws none of them" in output and "3 runs" not in output
        (run,) = read(tmp_path)["runs"]
        assert run["seed"] is None and not read(tmp_path)["summaries"]
        assert "Note" not in told("calc", *options, "--num=59", "--seed=0,1")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 1, "summaries": []}', '{"runs": [1], "summaries": []}', "\xff",
                                      '{"runs": [{"metrics": {"fid": NaN}}], "summaries": []}', "[" * 100_000])  # fmt: skip
    def test_a_file_of_other_things(self, gen, tmp_path, measured, text):
        """Is refused before anything is measured, and stays."""
        (tmp_path / "out.json").write_bytes(text.encode("latin-1"))
        assert "out.json is there, and holds no results of metrics: give --json another name" in refused(main, "metrics", *gen)
        assert (tmp_path / "out.json").read_bytes() == text.encode("latin-1") and not measured

    def test_results_of_before(self, gen, tmp_path, measured):
        """Which do not tell of features: they stay, and are not taken for others."""
        told(*gen)
        old = read(tmp_path)
        for run in old["runs"]:
            del run["features"], run["ref_features"]
        (tmp_path / "out.json").write_text(json.dumps(old))
        told(*gen)
        assert len(measured) == 2 and read(tmp_path)["runs"][0] == old["runs"][0] and len(read(tmp_path)["runs"]) == 2


PROGRAM = "def features(images):\n    return images[:, ::3, ::3].reshape(len(images), -1) / {}\n"


def test_a_program_that_changed(data, tmp_path, monkeypatch):
    """Between `ref` and `calc`: a note, both checksums, and no value of before; in `edm2 sweep` the note, too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing.py").write_text(PROGRAM.format(255))
    metric = "--metrics=changing:features"
    told("ref", f"--data={data}", f"--dest={tmp_path}/ref.npz", metric)
    command = "calc", f"--images={data}", f"--ref={tmp_path}/ref.npz", metric, "--num=20", f"--json={tmp_path}/out.json"
    assert "Note" not in told(*command)
    first = edm2.files.sha256(tmp_path / "changing.py")[:16]
    (tmp_path / "changing.py").write_text(PROGRAM.format(128))
    monkeypatch.delitem(sys.modules, "changing")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    second = edm2.files.sha256(tmp_path / "changing.py")[:16]
    note = f"Note: the program of changing:features has changed since {tmp_path}/ref.npz was made: {first} then, {second} now"
    output = told(*command)
    assert output.splitlines()[0] == note and "already" not in output
    found = [(run["features"]["changing:features"], run["ref_features"]["changing:features"]) for run in read(tmp_path)["runs"]]
    assert found == [(first, first), (second, first)]
    run = make_run(tmp_path / "run", data)
    options = "--metric=changing:features", f"--ref={tmp_path}/ref.npz", "--std=0.08", "--seeds=0-3", "--steps=1"
    assert note in call(main, "sweep", run, *options).output.splitlines()


class TestRef:
    """Whether it can be written is seen first."""

    @pytest.fixture()
    def never(self, monkeypatch):
        monkeypatch.setattr(metrics, "make_reference", lambda *_: pytest.fail("features were computed"))

    def test_what_is_there(self, data, ref, never, monkeypatch):
        before = ref.read_bytes()
        options = "metrics", "ref", f"--data={data}", f"--dest={ref}", f"--metrics={MINE}"
        assert f"{ref} exists; choose another name or give --overwrite" in refused(main, *options)
        assert ref.read_bytes() == before
        monkeypatch.undo()
        assert call(main, *options, "--overwrite").exit_code == 0 and list(read_reference(ref).moments) == [MINE]

    def test_where_it_cannot_be_written(self, data, tmp_path, never):
        (tmp_path / "file").touch()
        for dest in (tmp_path / "file" / "ref.npz", "/proc/ref.npz", "/dev/null/a/ref.npz"):
            line = refused(main, "metrics", "ref", f"--data={data}", f"--dest={dest}", f"--metrics={MINE}")
            assert "cannot" in line and str(dest).removesuffix("/ref.npz") in line

    def test_a_folder_is_made(self, data, tmp_path):
        reference(tmp_path / "new" / "folder" / "ref.npz", data, f"--metrics={MINE}")
        assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["ref.npz"]


class TestSizes:
    def test_what_the_reference_tells(self, tmp_path):
        """Of three integers; anything else is not known."""
        for shape, expected in (([3, 8, 8], (3, 8, 8)), ([8, 8], None), ("333", None), ([3, 8, 8.0], None), (None, None)):
            assert Reference({}, {"image_shape": shape}).image_shape == expected
        assert Reference({}).image_shape is None

    def test_in_python_and_in_sweep(self, data, ref, tmp_path):
        """Of a reference and of a dataset; also where the features do not mind."""
        large = ImageDataset(noise(tmp_path / "large.zip", size=16))
        (measure,) = open_measures(read_reference(ref), [MINE], simulated(lambda procs: procs, 1))
        distance = FrechetDistance("mean", lambda images: images.mean(axis=(1, 2)), ImageDataset(data))
        for metric in (measure, distance):
            with fails("these images are of 16x16 with 3 channels, and those of the reference of 8x8 with 3 channels"):
                metric([large.images(range(60)).transpose(0, 2, 3, 1)])
        run, other = make_run(tmp_path / "run", data), reference(tmp_path / "other.npz", tmp_path / "large.zip", f"--metrics={MINE}")
        options = f"--metric={MINE}", f"--ref={other}", "--std=0.08", "--seeds=0-3", "--steps=1"
        assert "these images are of 8x8 with 3 channels" in refused(main, "sweep", run, *options)


class TestErrors:
    @pytest.fixture()
    def damaged(self, tmp_path):
        """One of 100 images, in the second process's share of 2 in batches of 4."""
        files = {f"{i:03}.png": encode(pixels(i, 8, 8, 3)) for i in range(100)}
        return make(tmp_path / "damaged.zip", files | {"005.png": b"none"})

    def test_of_one_process_are_told_by_all(self, damaged, ref):
        """Soon: the others have not made all of theirs."""
        seen = []

        def features(images):
            seen.append(len(images))
            return images.reshape(len(images), -1)

        dataset, distance = open_labelled(damaged), FrechetDistance("mine", features, read_reference(ref).of(MINE))
        with fails("cannot read .*damaged.zip/005.png"):
            simulated(lambda procs: measure_images(dataset, [distance], procs, 100, batch=4), 2)
        assert sum(seen) <= 4 * (HEARD + 1) < 48

    def test_of_features_and_of_the_first(self, data, ref):
        """Features of other widths are found when they are merged; one that fails ends all."""
        dataset, moments = open_labelled(data), read_reference(ref).of(MINE)

        def of_some(images):
            return np.zeros((len(images), 2 + (images[0, 0, 0, 0] == first)))

        first = dataset.images([0])[0, 0, 0, 0]
        distance = FrechetDistance("mine", of_some, moments)
        with fails("mine: features of [23] and [23] numbers cannot be merged"):
            simulated(lambda procs: measure_images(dataset, [distance], procs, 60, batch=30), 2)

    def test_torchrun(self, damaged, ref, tmp_path, one_thread_env):
        """One line for one process's image."""
        command = ["metrics", "calc", f"--images={damaged}", f"--ref={ref}", f"--metrics={MINE}", "--num=100", "--batch=4"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--", "edm2"]
        result = subprocess.run([*launcher, *command], cwd=ROOT, env=one_thread_env, capture_output=True, text=True)
        own = result.stderr.split("ChildFailedError")[0]
        told = [line for line in own.splitlines() if line.startswith("Error: ")]
        assert result.returncode and len(told) == 1 and "cannot read" in told[0] and "005.png" in told[0], result.stderr
        assert "UserError" not in own and "DistBackendError" not in own and "Connection" not in own

    @pytest.mark.parametrize("args", [["metrics", "calc", "--ref=none.npz", "--images=none"], ["metrics", "calc"]])
    def test_of_all_the_first_tells_at_once(self, monkeypatch, args):
        """The others wait to be ended, and tell it if they are not."""
        waited = []
        monkeypatch.setattr(common.time, "sleep", waited.append)
        lines = []
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            lines.append(refused(main, *args))
        assert lines[0] == lines[1] and waited == [common.LATER]


class TestSweep:
    @pytest.fixture()
    def run(self, tmp_path, data):
        return make_run(tmp_path / "run", data)

    @pytest.mark.parametrize("count", [2, 5])
    def test_several_processes_equal_one(self, run, data, tmp_path, count):
        """The first writes; a classifier is trained once; what is there none makes again."""

        def results(folder, points):
            def of(procs):
                averages = RunAverages(run)
                metric = open_metric("frechet-small", None, open_labelled(data), tmp_path / folder, procs)
                sweep = Sweep(averages, metric, tmp_path / folder, self_guide(averages), range(11), 2, 3, CPU, None, procs)
                return list(sweep.measure(points))

            return of

        points = grid([0.05, 0.08], [1, 2])
        one = simulated(results("one", points), 1)
        several = simulated(results("several", points[:3]), count) + simulated(results("several", points), count)
        assert [x.point for x in several] == [x.point for x in one] == points
        assert [x.value for x in several] == pytest.approx([x.value for x in one], rel=1e-9) and len({x.value for x in one}) == 4
        lines = [[json.loads(line) for line in (tmp_path / x / "sweep.jsonl").read_text().splitlines()] for x in ("one", "several")]
        for a, b in zip(*lines, strict=True):
            assert a | {"value": 0} == b | {"value": 0}
        assert not simulated(results("several", points), count)

    def test_any_metric_is_for_one_process(self, run, tmp_path):
        def metric(images):
            return 1.0

        metric.name, metric.facts = "mine", {}
        with fails("mine is no FrechetDistance: several processes cannot share it"):
            simulated(lambda procs: Sweep(RunAverages(run), metric, tmp_path, procs=procs), 2)

    def test_torchrun(self, run, ref, tmp_path, one_thread_env):
        """Each line once, a picture, the values of one process."""
        options = f"--metric={MINE}", f"--ref={ref}", "--std=0.05,0.08", "--seeds=0-10", "--steps=2", "--batch=3"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--", "edm2"]
        result = subprocess.run(
            [*launcher, "sweep", run, *options, f"--out={tmp_path}/two"], cwd=ROOT, env=one_thread_env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        alone = call(main, "sweep", run, *options, f"--out={tmp_path}/one").output
        assert (tmp_path / "two" / "sweep.png").exists() and result.stdout.splitlines() == [
            line.replace(f"{tmp_path}/one", f"{tmp_path}/two") for line in alone.splitlines() if "img/s" not in line
        ]
        one, two = (
            [json.loads(line) for line in (tmp_path / name / "sweep.jsonl").read_text().splitlines()] for name in ("one", "two")
        )
        assert [x.pop("value") for x in one] == pytest.approx([x.pop("value") for x in two], rel=1e-9) and one == two


def test_statistics_that_overflow_are_not_written(data, tmp_path):
    options = f"--data={data}", f"--dest={tmp_path}/ref.npz", "--metrics=tests.user_features:huge"
    assert "features are too large" in refused(main, "metrics", "ref", *options) and not list(tmp_path.glob("*.npz"))


def test_a_reference_without_facts_takes_any_size(data, tmp_path, ref):
    found = read_reference(ref)
    write_reference(tmp_path / "old.npz", Reference({MINE: found.of(MINE)}, {}))
    assert told("calc", f"--images={data}", f"--ref={tmp_path}/old.npz", f"--metrics={MINE}", "--num=60")
