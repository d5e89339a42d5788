"""What `edm2 metrics` keeps and makes again, what it notes, and what it refuses before it begins."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import edm2
from edm2.cli import metrics, metrics_gen
from edm2.cli.main import main
from edm2.data import ImageDataset
from edm2.dataset_zip import write_zip
from edm2.files import locked
from edm2.measuring import open_measures
from edm2.metrics import FrechetDistance
from edm2.references import Reference, read_reference, write_reference
from tests.command_lines import call, refused
from tests.dataset_files import fails
from tests.metrics_files import BOTH, MINE, noise, reference, simulated, told
from tests.run_files import make_run

pytestmark = pytest.mark.usefixtures("hardly_trained")


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

    def test_several_commands_at_a_time(self, gen, tmp_path, monkeypatch):
        """On a GPU each: a second one begins and ends while the first measures; a third waits for one that writes."""
        own, within = metrics_gen.measure_network, []

        def meanwhile(*args, **options):
            if not within:
                within.append(1)
                told(*gen, "--seed=100", "--runs=2")
            return own(*args, **options)

        def seeds():
            return [int(run["seeds"].split("-")[0]) for run in read(tmp_path)["runs"]]

        monkeypatch.setattr(metrics_gen, "measure_network", meanwhile)
        told(*gen, "--runs=2")
        assert seeds() == [100, 104, 0, 4] and len(read(tmp_path)["summaries"]) == 1
        with ThreadPoolExecutor(1) as other:
            with locked(tmp_path):
                before = read(tmp_path)
                third = other.submit(told, *gen, "--seed=200")
                with pytest.raises(TimeoutError):
                    third.result(2)
                assert read(tmp_path) == before
            third.result(200)
        assert seeds() == [100, 104, 0, 4, 200]

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


def test_statistics_that_overflow_are_not_written(data, tmp_path):
    options = f"--data={data}", f"--dest={tmp_path}/ref.npz", "--metrics=tests.user_features:huge"
    assert "features are too large" in refused(main, "metrics", "ref", *options) and not list(tmp_path.glob("*.npz"))


def test_a_reference_without_facts_takes_any_size(data, tmp_path, ref):
    found = read_reference(ref)
    write_reference(tmp_path / "old.npz", Reference({MINE: found.of(MINE)}, {}))
    assert told("calc", f"--images={data}", f"--ref={tmp_path}/old.npz", f"--metrics={MINE}", "--num=60")
