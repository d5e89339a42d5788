"""Several processes in `edm2 metrics` and `edm2 sweep`: what one of them meets, and that they equal one."""

import json
import subprocess
import sys
import warnings

import click
import numpy as np
import pytest

from edm2.averages import RunAverages
from edm2.cli import commands
from edm2.cli.main import main
from edm2.measuring import HEARD, measure_images, open_metric
from edm2.metrics import FrechetDistance, open_labelled
from edm2.references import read_reference
from edm2.sweep import Sweep, grid, self_guide
from tests.command_lines import ROOT, call, refused
from tests.dataset_files import encode, fails, make, pixels
from tests.metrics_files import CPU, MINE, simulated
from tests.run_files import make_run

pytestmark = pytest.mark.usefixtures("hardly_trained")


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
        monkeypatch.setattr(commands.time, "sleep", waited.append)
        lines = []
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            lines.append(refused(main, *args))
        assert lines[0] == lines[1] and waited == [commands.LATER]

    def test_warnings_are_notes(self, monkeypatch):
        """Those of this project's own; others say where they come from."""
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        call(commands.Command("name", callback=lambda: None))
        own, other = str(ROOT / "edm2" / "data.py"), str(ROOT / "other.py")
        for path in (own, str(ROOT / "train.py")):
            assert warnings.formatwarning("far off", UserWarning, path, 3) == "Note: far off\n"
        assert warnings.formatwarning("far off", UserWarning, other, 3, "x") == f"{other}:3: UserWarning: far off\n  x\n"
        assert "DeprecationWarning" in warnings.formatwarning("far off", DeprecationWarning, own, 3, "x")

    def test_of_files_in_one_line(self):
        """What the system refuses; all else keeps its traceback."""
        for error, line in ((PermissionError(13, "Permission denied", "a/b"), "Error: a/b: Permission denied"), (OSError("other"), None)):
            def fail(error=error):
                raise error

            result = call(commands.Command("name", callback=fail))
            assert result.exit_code == 1 and (result.output.rstrip() == line if line else result.exception is error)

    @pytest.mark.parametrize(("error", "waits"), [(RuntimeError("Connection closed by peer"), True), (click.exceptions.Exit(3), False)])
    def test_a_lost_connection_is_not_told_before_its_cause(self, monkeypatch, error, waits):
        def fail(*_):
            raise error

        waited = []
        monkeypatch.setattr(commands.time, "sleep", waited.append)
        command = commands.Command("name", callback=fail)
        for rank in "01":
            monkeypatch.setenv("RANK", rank)
            result = call(command)
            assert result.exception is error if waits else result.exit_code == 3
        assert waited == [commands.LATER] * waits


class TestSweep:
    @pytest.fixture()
    def run(self, tmp_path, data):
        return make_run(tmp_path / "run", data)

    @pytest.mark.parametrize("count", [2, 5])
    def test_several_processes_equal_one(self, run, data, tmp_path, count):
        """The first writes, and what is there, of which the others may know nothing, none makes again; a classifier is trained once."""

        def results(folder, points):
            def of(procs):
                averages = RunAverages(run)
                metric = open_metric("frechet-small", None, open_labelled(data), tmp_path / folder, procs)
                own = tmp_path / (f"other{procs.rank}" if procs.rank else folder)
                sweep = Sweep(averages, metric, own, self_guide(averages), range(11), 2, 3, CPU, None, procs)
                return list(sweep.measure(points))

            return of

        points = grid([0.05, 0.08], [1, 2])
        one = simulated(results("one", points), 1)
        several = simulated(results("several", points[:3]), count) + simulated(results("several", points), count)
        assert [x.point for x in several] == [x.point for x in one] == points
        assert [x.value for x in several] == pytest.approx([x.value for x in one], rel=1e-9) and len({x.value for x in one}) == 4
        lines = [[json.loads(line) for line in (tmp_path / x / "sweep.jsonl").read_text().splitlines()] for x in ("one", "several")]
        assert len(lines[0]) == 4 and not list(tmp_path.glob("other*"))
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
