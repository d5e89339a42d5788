"""`edm2 metrics gen --dry-run`: what it tells is what the command then does, and it does nothing itself."""

import re
import shutil

import pytest

import edm2
from edm2.cli import metrics_gen
from edm2.cli.main import main
from edm2.published import PUBLISHED
from tests.command_lines import call, refused, small_net
from tests.conftest import tiny_net
from tests.dry_runs import PRESET, counted_evaluations, told
from tests.metrics_files import MINE, reference
from tests.run_files import make_run

pytestmark = pytest.mark.usefixtures("hardly_trained", "no_downloads")

ADDRESS = "https://example.com/refs/img8.npz"


@pytest.fixture()
def run(tmp_path, data):
    return make_run(tmp_path / "run", data)


def gen(tmp_path, *args) -> tuple:
    return "metrics", "gen", f"--ref={ADDRESS}", f"--networks={tmp_path}/networks", f"--json={tmp_path}/new/out.json", *args


def dry(tmp_path, *args) -> dict[str, str]:
    """Facts by name; nothing is made."""
    before = sorted(tmp_path.rglob("*"))
    facts = told(main, *gen(tmp_path, *args, "-n"))
    assert sorted(tmp_path.rglob("*")) == before
    return facts


class TestFacts:
    def test_a_guide_without_a_strength(self, net, guide, tmp_path):
        result = call(main, *gen(tmp_path, f"--net={net}", f"--gnet={guide}", "-n"))
        assert "Note: nothing is guided: --gnet needs --guidance\n" in result.output and result.exit_code == 0

    def test_evaluations_are_those_that_are_then_made(self, net, guide, data, tmp_path, monkeypatch):
        """For each image, counted."""
        counted = counted_evaluations(monkeypatch)
        options = f"--net={net}", f"--gnet={guide}", "--guidance=2", "--num=2", "--steps=5"
        ref = reference(tmp_path / "ref.npz", data, f"--metrics={MINE}")
        for more in ([], ["--guidance-interval=0.1,20"], ["--guidance=1"]):
            facts = dry(tmp_path, *options, *more)
            assert counted == {0: 0, 5: 0}
            assert call(main, "metrics", "gen", f"--ref={ref}", f"--metrics={MINE}", *options, *more).exit_code == 0
            of_guide = f" and {counted[0] // 2} of the guide" if "guidance" in facts else ""
            assert facts["evaluations"] == f"{counted[5] // 2} of the network{of_guide} for each image" and counted[5] > 0
            counted.update({0: 0, 5: 0})

    def test_a_network(self, net, guide, tmp_path):
        options = f"--net={net}", f"--gnet={guide}", "--steps=3", "--num=2000", "--runs=3", "--seed=7"
        facts = dry(tmp_path, *options, "--guidance=1.5", "--guidance-interval=0,inf")
        assert (facts["network"], facts["guide"], facts["guidance"]) == (str(net), str(guide), "1.5 in 3 of 3 steps")
        macs = [edm2.summary.multiply_adds(lambda n=n: small_net(n)) for n in (5, 0)]
        assert facts["multiply-adds"] == f"{5 * sum(macs) / 1e9:.3f} G for each image, without decoding"
        assert facts["reference"] == f"{ADDRESS}, to be downloaded to {tmp_path}/networks"
        assert facts["runs"] == "3 of 2,000 images for each network: 6,000 in all, of the seeds 7-6006"
        assert "guide" not in dry(tmp_path, *options)

    def test_a_reference_that_was_fetched(self, net, data, tmp_path):
        reference(tmp_path / "networks" / "img8.npz", data)
        assert dry(tmp_path, f"--net={net}")["reference"] == f"{ADDRESS}, which is {tmp_path}/networks/img8.npz"
        assert dry(tmp_path, f"--net={net}", f"--ref={tmp_path}/networks/img8.npz")["reference"] == f"{tmp_path}/networks/img8.npz"

    def test_runs(self, run, guide, data, tmp_path):
        """Each width once, as the command makes them; the guide of the same width, at its own time."""
        options = f"--net={run}", "--std=0.05,0.08,0.05", "--kimg=2", "--num=4", "--steps=1"
        facts = dry(tmp_path, *options)
        assert facts["run"] == f"{run}, after 2,000 images" and facts["averages"] == "0.050, 0.080"
        assert facts["runs"] == "1 of 4 images for each network: 8 in all, of the seeds 0-3" and "guide" not in facts
        ref = reference(tmp_path / "ref.npz", data)
        done = call(main, "metrics", "gen", *options, f"--ref={ref}", f"--networks={tmp_path}/networks")
        assert re.findall(r"sigma_rel (\S+)  seeds 0-3:", done.output) == facts["averages"].split(", ")
        other = make_run(tmp_path / "other", data, 1)
        for gnet, expected in (
            ([], "the network itself, without labels"),
            ([f"--gnet={guide}"], str(guide)),
            ([f"--gnet={other}", "--gnet-kimg=1"], f"{other}, after 1,000 images"),
            (["--gnet=https://example.com/g.pkl"], f"https://example.com/g.pkl, to be downloaded to {tmp_path}/networks"),
        ):
            facts = dry(tmp_path, *options, *gnet, "--guidance=1.5")
            assert facts["guide"] == expected and facts["guidance"] == "1.5"

    def test_several_networks(self, net, run, tmp_path):
        """Each is told, and all are counted."""
        result = call(main, *gen(tmp_path, f"--net={net}", f"--net={run}", "--std=0.05,0.08", "--num=10", "--runs=2", "-n"))
        names = [line[:16].strip() for line in result.output.splitlines()]
        assert names == ["network", "evaluations", "multiply-adds", "run", "averages", "reference", "runs"]
        assert "60 in all, of the seeds 0-19" in result.output

    def test_a_preset(self, net, tmp_path):
        facts, row = dry(tmp_path, f"--preset={PRESET}"), PUBLISHED[PRESET]
        assert facts["network"] == f"{edm2.published.URL}/{row.net}.pkl, to be downloaded to {tmp_path}/networks"
        assert facts["guide"] == f"{edm2.published.URL}/{row.gnet}.pkl, to be downloaded to {tmp_path}/networks"
        assert facts["guidance"].startswith(f"{row.guidance:g} in 32 of 32") and "multiply-adds" not in facts
        (tmp_path / "networks").mkdir()
        shutil.copy(net, tmp_path / "networks" / f"{row.net}.safetensors")
        assert dry(tmp_path, f"--preset={PRESET}")["network"] == f"{tmp_path}/networks/{row.net}.safetensors"

    def test_one_process_tells(self, net, tmp_path, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        assert call(main, *gen(tmp_path, f"--net={net}", "-n")).output == ""

    def test_nothing_is_measured(self, net, tmp_path, monkeypatch):
        for name in ("processes", "candidates", "measure_network", "network_file"):
            monkeypatch.setattr(metrics_gen, name, lambda *_, **__: pytest.fail("it is a dry run"))
        dry(tmp_path, f"--net={net}")


def test_a_network_that_is_not_there(tmp_path):
    assert f"{tmp_path}/none does not exist" in refused(main, *gen(tmp_path, f"--net={tmp_path}/none", "-n"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a network: --net, or a published one by --preset"),
        (["--net=NET", "--net=NET"], "--net: one of them is given twice"),
        (["--net=NET", "--std=0.05"], "are for a --net that is the folder of a training run"),
        (["--net=NET", "--num=1"], "--num: metrics need two images at least"),
        (["--net=NET", "--guidance=2"], "needs a guide network: give --gnet"),
        (["--net=NET", "--guidance=2", "--gnet=TMP/grey"], "TMP/grey makes images of another size"),
        (["--net=NET", "--vae=x"], "--vae: NET makes pixels"),
        (["--net=NET", "--preset=edm2-img64-s-fit"], "unknown preset"),
        (["--net=NET", "--ref=TMP/none.npz"], "cannot read TMP/none.npz"),
        (["--net=NET", "--ref=TMP/data.zip"], "TMP/data.zip is refused, it is no reference statistics"),
        (["--net=RUN"], "RUN is a folder: give --std"),
        (["--net=RUN", "--std=0.5"], "σ_rel 0.5 is impossible"),
        (["--net=RUN", "--std=0.05", "--kimg=7"], "there is no snapshot at 7 thousand images"),
        (["--net=RUN", "--std=0.05", "--gnet=NET", "--gnet-kimg=1"], "--gnet-kimg is for a --gnet that is a run's folder"),
        (["--net=RUN", "--std=0.05", "--guidance=2", "--gnet=TMP/grey"], "TMP/grey makes images of another size"),
        (["--net=RUN", "--std=0.05", "--guidance=2", "--gnet=TMP/none"], "TMP/none does not exist"),
        (["--net=TMP/plain", "--std=0.05", "--guidance=2"], "needs a guide network: give --gnet"),
        (["--net=NET", "--net=RUN"], "RUN is a folder: give --std"),
    ],
)
def test_refusals(net, run, data, tmp_path, args, words):
    """Those of the command itself, in the same words, and nothing is told before."""
    edm2.save_snapshot(tmp_path / "grey", tiny_net())
    make_run(tmp_path / "plain", data, label_dropout=0)
    ref = reference(tmp_path / "ref.npz", data)
    for place, path in (("TMP", str(tmp_path)), ("NET", str(net)), ("RUN", str(run))):
        args, words = [arg.replace(place, path) for arg in args], words.replace(place, path)
    options = "metrics", "gen", f"--ref={ref}", "--num=4", "--steps=1", *args
    result = call(main, *options, "-n")
    assert result.exit_code and "  " not in result.output.splitlines()[0], result.output
    line = refused(main, *options, "-n")
    assert words in line and line == refused(main, *options)
