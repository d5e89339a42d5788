"""`--dry-run` of sample.py, train.py and `edm2 import`: what it tells is what the command then does, and it does nothing itself."""

import shutil
import subprocess
import sys

import pytest
import torch

import edm2
import sample
import train
from edm2.cli.main import main
from edm2.latents import LatentEncoder
from edm2.piecewise import Writer
from edm2.published import PUBLISHED
from tests.command_lines import ROOT, call, refused, small_net
from tests.conftest import GOLDEN, tiny_net
from tests.dry_runs import PRESET, counted_evaluations, told

pytestmark = pytest.mark.usefixtures("no_downloads")
PICKLE = GOLDEN / "official_snapshot.pkl"


def dry(*args) -> dict[str, str]:
    return told(sample.main, "--dry-run", *args)


class TestSample:
    def test_evaluations_are_those_that_are_then_made(self, net, guide, tmp_path, monkeypatch):
        """In batches of one image each, counted."""
        counted = counted_evaluations(monkeypatch)
        out = tmp_path / "out"
        options = [f"--net={net}", f"--gnet={guide}", "--guidance=2", f"--outdir={out}", "--seeds=3", "--steps=5"]
        for more in ([], ["--guidance-interval=0.1,20"], ["--guidance=1"], ["--steps=1"]):
            facts = dry(*options, *more)
            assert not out.exists() and counted == {0: 0, 5: 0}
            assert call(sample.main, *options, *more).exit_code == 0
            of_guide = f" and {counted[0]} of the guide" if "guidance" in facts else ""
            assert facts["evaluations"] == f"{counted[5]} of the network{of_guide} for each image" and counted[5] > 0
            counted.update({0: 0, 5: 0})
            shutil.rmtree(out)

    def test_facts(self, net, guide, tmp_path):
        options = f"--net={net}", f"--gnet={guide}", f"--outdir={tmp_path}", "--seeds=0-9,1000", "--subdirs", "--steps=3"
        facts = dry(*options, "--guidance=1.5")
        assert facts["network"] == str(net) and facts["guide"] == str(guide) and facts["guidance"] == "1.5 in 3 of 3 steps"
        macs = [edm2.summary.multiply_adds(lambda n=n: small_net(n)) for n in (5, 0)]
        assert facts["multiply-adds"] == f"{5 * sum(macs) / 1e9:.3f} G for each image, without decoding"
        assert facts["images"] == f"11, in {tmp_path}" and "decoder" not in facts
        without = dry(*options, f"--gnet={tmp_path}/none", "--guidance=1")  # which nobody looks at
        assert "guide" not in without and without["multiply-adds"].startswith(f"{5 * macs[0] / 1e9:.3f} G")

    def test_files_that_are_there(self, net, tmp_path):
        options = f"--net={net}", f"--outdir={tmp_path}/out", "--seeds=0-9,1000", "--subdirs"
        call(sample.main, *options, "--seeds=3,1000", "--steps=1")
        assert dry(*options)["images"].endswith("; 2 files of their names are there, and stay if they were made likewise")

    def test_a_network_that_guides_itself(self, tmp_path):
        edm2.save_snapshot(tmp_path / "net", small_net(5), meta={"label_dropout": 0.1})
        facts = dry(f"--net={tmp_path}/net", "--guidance=2", f"--outdir={tmp_path}", "--steps=2")
        assert facts["guide"] == "the network itself, without labels"
        assert facts["multiply-adds"].startswith(f"{6 * edm2.summary.multiply_adds(lambda: small_net(5)) / 1e9:.3f} G")

    def test_latents(self, tmp_path):
        edm2.save_snapshot(tmp_path / "net", tiny_net(img_channels=4), encoder=LatentEncoder())
        options = f"--net={tmp_path}/net", f"--outdir={tmp_path}/out"
        assert dry(*options)["decoder"] == "stabilityai/sd-vae-ft-mse"
        assert dry(*options, "--vae=mine")["decoder"] == "mine"
        assert dry(*options, "--latents")["decoder"] == "none: latents are written"

    def test_a_preset_needs_no_network(self, net, guide, tmp_path):
        """It names what it would fetch; what is there it looks into."""
        row, networks = PUBLISHED[PRESET], tmp_path / "networks"
        options = f"--preset={PRESET}", f"--networks={networks}", f"--outdir={tmp_path}/out"
        facts = dry(*options)
        assert facts["network"] == f"{edm2.published.URL}/{row.net}.pkl, to be downloaded to {networks}"
        assert facts["guide"] == f"{edm2.published.URL}/{row.gnet}.pkl, to be downloaded to {networks}"
        assert facts["evaluations"] == "63 of the network and 63 of the guide for each image" and "multiply-adds" not in facts
        assert not networks.exists()
        networks.mkdir()
        shutil.copy(net, networks / f"{row.net}.safetensors")
        assert dry(*options)["network"] == f"{networks / row.net}.safetensors"
        shutil.copy(guide, networks / f"{row.gnet}.pkl")
        facts = dry(*options)
        assert facts["guide"] == f"{networks / row.gnet}.pkl" and "multiply-adds" in facts

    def test_an_address_that_was_fetched(self, tmp_path):
        shutil.copy(PICKLE, tmp_path / "a.pkl")
        facts = dry("--net=https://example.com/a.pkl", f"--networks={tmp_path}", f"--outdir={tmp_path}/out", "--latents")
        assert facts["network"] == f"https://example.com/a.pkl, which is {tmp_path / 'a.pkl'}" and "multiply-adds" in facts

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--class=5"], "class 5 is out of range: the network knows 0 to 4"),
            (["--net=/no/such/file"], "/no/such/file does not exist"),
            (["--guidance=1.5"], "needs a guide network: give --gnet"),
            (["--guidance=1.5", "--gnet=OTHER"], "another size"),
            (["--net=GUIDE", "--class=0"], "unconditional"),
            (["--net=https://example.com/"], "ends with no file name"),
            (["--latents"], "makes pixels"),
            (["--vae=x", "--latents"], "--vae decodes latents"),
            (["--seeds=3,3", "--class=1,2"], "--class gives seed 3 two classes"),
        ],
    )
    def test_refusals(self, net, guide, tmp_path, args, words):
        """Those of the command itself, in the same words."""
        edm2.save_snapshot(tmp_path / "other", tiny_net())
        args = [arg.replace("OTHER", str(tmp_path / "other")).replace("GUIDE", str(guide)) for arg in args]
        line = refused(sample.main, f"--net={net}", f"--outdir={tmp_path}/out", "-n", *args)
        assert words in line
        assert line == refused(sample.main, f"--net={net}", f"--outdir={tmp_path}/out", *args)


class TestImport:
    def test_a_preset(self, tmp_path):
        result = call(main, "import", PRESET, f"--out={tmp_path}/networks", "-n")
        assert result.exit_code == 0 and not (tmp_path / "networks").exists(), result.output
        for name in PUBLISHED[PRESET][:2]:
            assert f"{edm2.published.URL}/{name}.pkl, to be downloaded to {tmp_path}/networks" in result.output
            assert f"snapshot         {tmp_path}/networks/{name}.safetensors\n" in result.output

    def test_a_file(self, tmp_path):
        facts = told(main, "import", PICKLE, f"--out={tmp_path}", "-n")
        assert facts["network"] == str(PICKLE) and not list(tmp_path.iterdir())
        assert call(main, "import", PICKLE, f"--out={tmp_path}").output.startswith(f"wrote {facts['snapshot']}\n")

    def test_refusals(self, net, tmp_path):
        for source, words in ((net, "is no pickle of the official release"), ("none", "is no file, no address and no preset")):
            assert words in refused(main, "import", source, f"--out={tmp_path}", "-n")


class TestTrain:
    def test_a_preset_for_other_images(self, digits_zip, tmp_path):
        """As is the default one: for small images it takes days."""
        options = f"--outdir={tmp_path}/run", f"--data={digits_zip}", "-n"
        words = "Note: edm2-img512-s is for inputs of 64x64, and these are of 8x8"
        assert words in call(train.main, *options).output
        assert "Note" not in call(train.main, *options, "--preset=digits").output

    def test_processes_that_cannot_share_the_batch(self, digits_zip, tmp_path, monkeypatch):
        """As `torchrun` would start them; one of them tells."""
        options = [f"--outdir={tmp_path}/run", f"--data={digits_zip}", "--preset=digits", "--batch=12", "--duration=24", "-n"]
        options += ["--status=0", "--snapshot=0", "--checkpoint=0"]
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert "--batch 12 is not a positive multiple of the 8 process(es)" in refused(train.main, *options)
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert call(train.main, *options).output.startswith("outdir")
        monkeypatch.setenv("RANK", "1")
        assert call(train.main, *options).output == ""


@pytest.mark.parametrize(("numbers", "words"), [(3, "4 bytes too few"), (4, None), (6, "8 bytes too many")])
def test_a_snapshot_of_another_size_than_planned(numbers, words, tmp_path):
    writer = Writer(tmp_path / "a", {"x": ((4,), torch.float32)}, {})
    writer.write(torch.zeros(numbers))
    if words is None:
        return writer.finish()
    with pytest.raises(edm2.UserError, match=f"cannot write .*/a: {words}"):
        writer.finish()


LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.argv[:2] = ["edm2"]
runpy.run_module("edm2", run_name="__main__")
"""


def test_phema_that_cannot_write_its_last_piece(tmp_path):
    """One line, whichever byte is the first that finds no room."""
    net = small_net(5)
    for nimg in (1000, 2000):
        edm2.save_snapshot(tmp_path / f"network-snapshot-{nimg}", net, meta={"nimg": nimg, "std": 0.1})
    for path in tmp_path.iterdir():
        path.rename(f"{path}.safetensors")
    out = [f"--indir={tmp_path}", f"--outdir={tmp_path}/out", "--outstd=0.1"]
    assert call(main, "phema", *out).exit_code == 0
    (whole,) = (tmp_path / "out").iterdir()
    size = whole.stat().st_size
    whole.unlink()
    for missing in (1, 4000):
        command = [sys.executable, "-c", LIMITED, str(size - missing), "phema", *out]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 1 and result.stderr.strip().splitlines()[-1].startswith("Error: cannot write"), result.stderr
        assert "Traceback" not in result.stderr and not list((tmp_path / "out").iterdir())
