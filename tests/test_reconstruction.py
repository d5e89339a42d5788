"""Averages of any width from files to files, and `python -m edm2 phema`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import edm2
from edm2 import reconstruction
from edm2.cli.main import main
from edm2.files import LEFTOVER
from edm2.latents import LatentEncoder
from edm2.names import count_of, snapshot_name
from edm2.reconstruction import make_plan, reconstruct_files
from tests.command_lines import ROOT, call, refused
from tests.conftest import relative_error, tiny_net
from tests.official_files import write_official

TIMES = [1024 * i for i in range(1, 5)]


def network(nimg: int, std: float, **kwargs) -> edm2.Precond:
    """One whose every number depends on time and width."""
    net, generator = tiny_net(**kwargs), torch.Generator().manual_seed(round(nimg * 1000 * std))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return net


def save(folder: Path, nimg: int, std: float, dtype: torch.dtype = torch.float32, **kwargs) -> Path:
    path = folder / snapshot_name(nimg, std)
    meta = {"nimg": nimg, "std": std, "label_dropout": 0.1}
    edm2.save_snapshot(path, network(nimg, std, img_channels=4, **kwargs), encoder=LatentEncoder(), meta=meta, dtype=dtype)
    return path


@pytest.fixture()
def run(tmp_path) -> Path:
    """Eight snapshots, fp32."""
    folder = tmp_path / "run"
    folder.mkdir()
    for nimg in TIMES:
        for std in (0.05, 0.1):
            save(folder, nimg, std)
    return folder


def phema(*arguments: object):
    result = call(main, "phema", *map(str, arguments))
    assert result.exit_code == 0, result.output
    return result.output


class TestFiles:
    @pytest.mark.parametrize("at_once", [2**26, 100])
    def test_values(self, run, tmp_path, monkeypatch, at_once):
        """Those of the reconstruction in memory, whole or in pieces; the rest is that of the last snapshot."""
        monkeypatch.setattr(reconstruction, "AT_ONCE", at_once)
        phema(f"--indir={run}", f"--outdir={tmp_path / 'out'}", "--outstd=0.03,0.15", "--dtype=fp32")
        snapshots = [edm2.load_snapshot(path) for path in sorted(run.iterdir())]
        for std, expected in zip((0.03, 0.15), edm2.phema.reconstruct(snapshots, [0.03, 0.15])):
            found = edm2.load_snapshot(tmp_path / "out" / f"phema-0000004-{std:.3f}.safetensors")
            for name, p in found.net.named_parameters():
                torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-5)
            assert (found.meta["nimg"], found.meta["std"], found.meta["label_dropout"]) == (4096, std, 0.1)
            assert found.meta["made_of"] == [[nimg, std] for nimg in TIMES for std in (0.05, 0.1)]
            assert found.config == snapshots[0].config and found.encoder.config() == LatentEncoder().config()
            assert all(torch.equal(x, snapshots[0].net.state_dict()[name]) for name, x in found.net.named_buffers())

    def test_what_is_stored_comes_back(self, run, tmp_path):
        phema(f"--indir={run}", f"--outdir={tmp_path}", "--outstd=0.050", "--outkimg=2", "--dtype=fp32")
        found = edm2.load_snapshot(tmp_path / "phema-0000002-0.050.safetensors").net.state_dict()
        expected = network(2048, 0.05, img_channels=4).state_dict()
        assert max(relative_error(found[name], x) for name, x in expected.items()) < 1e-5

    def test_types(self, run, tmp_path):
        """fp16 unless told otherwise, buffers fp32; equal input, equal bytes; the library reads it."""
        for name in "ab":
            phema(f"--indir={run}", f"--outdir={tmp_path / name}", "--outstd=0.075")
        a, b = (tmp_path / name / "phema-0000004-0.075.safetensors" for name in "ab")
        assert a.read_bytes() == b.read_bytes()
        buffers = {name for name, _ in tiny_net().named_buffers()}
        assert {name for name, x in load_file(a).items() if x.dtype == torch.float32} == buffers
        with safe_open(a, framework="pt") as file:
            assert json.loads(file.metadata()["meta"])["std"] == 0.075

    def test_official_pickles(self, tmp_path):
        """Whose time and width are in their names; alone, and beside snapshots of this project."""
        for kimg, std in ((8, 0.05), (8, 0.1), (16, 0.05)):
            write_official(tmp_path / f"network-snapshot-{kimg:07d}-{std:.3f}.pkl", network(count_of(kimg), std))
        last = network(count_of(16), 0.1)
        edm2.save_snapshot(tmp_path / "network-snapshot-0000016-0.100.safetensors", last, meta={"nimg": count_of(16), "std": 0.1})
        assert "4 snapshots at 2 times, the last after 16,384 images" in phema(f"--indir={tmp_path}", "--outstd=0.07", "--dtype=fp32")
        found = edm2.load_snapshot(tmp_path / "phema-0000016-0.070.safetensors").net
        times, stds = [count_of(8)] * 2 + [count_of(16)] * 2, [0.05, 0.1] * 2
        column = edm2.phema.solve_posthoc_coefficients(times, stds, count_of(16), 0.07)[:, 0]
        parts = [dict(network(nimg, std).named_parameters()) for nimg, std in zip(times, stds)]
        for name, p in found.named_parameters():
            torch.testing.assert_close(p, sum(c * part[name].half().float() for c, part in zip(column, parts)), rtol=1e-4, atol=1e-5)

    def test_widths_by_tensor(self, run, tmp_path):
        """The last pattern that matches a name counts."""
        overrides = "--tensor=unet.dec.*=0.05", "--tensor=*out_gain=0.10", "--tensor=unet.dec.*attn*=0.10"
        phema(f"--indir={run}", f"--outdir={tmp_path}", "--outstd=0.15", "--dtype=fp32", *overrides)
        found = edm2.load_snapshot(tmp_path / "phema-0000004-0.150.safetensors")
        stored = {std: network(4096, std, img_channels=4).state_dict() for std in (0.05, 0.1)}
        (plain,) = edm2.phema.reconstruct([edm2.load_snapshot(path) for path in run.iterdir()], [0.15])
        for name, p in found.net.named_parameters():
            if name.startswith("unet.dec."):
                expected = stored[0.1 if "attn" in name else 0.05][name]
            else:
                expected = stored[0.1][name] if name.endswith("out_gain") else plain[name]
            torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)
        assert found.meta["std_by_tensor"] == {"unet.dec.*": 0.05, "*out_gain": 0.1, "unet.dec.*attn*": 0.1}

    def test_each_file_is_read_once(self, run, tmp_path, monkeypatch):
        """Of its tensors no number twice, however many averages are made."""
        read = edm2.piecewise.Slice.read
        counts: dict[str, int] = {}

        def counted(piece, *arguments):
            x = read(piece, *arguments)
            counts[piece.file.name] = counts.get(piece.file.name, 0) + x.numel()
            return x

        monkeypatch.setattr(edm2.piecewise.Slice, "read", counted)
        net = tiny_net(img_channels=4)
        parameters, everything = (sum(x.numel() for x in of) for of in (net.parameters(), net.state_dict().values()))
        plan = make_plan(sorted(run.iterdir()), [0.03, 0.05, 0.07, 0.15])
        assert set(counts.values()) == {everything - parameters}  # Fourier features
        counts.clear()
        reconstruct_files(plan, [tmp_path / f"{i}.safetensors" for i in range(4)])
        assert sorted(counts.values()) == [parameters] * 7 + [everything]


class TestChoices:
    def test_which_snapshots(self, run):
        """By width, prefix and time; several folders and files."""
        assert "4 snapshots at 4 times" in phema(f"--indir={run}", "--instd=0.05", "--outstd=0.06", "--dry-run")
        assert "4 snapshots at 2 times, the last after 2,048 images" in phema(f"--indir={run}", "--outkimg=2", "--outstd=0.06", "--dry-run")
        (run / "other-a.safetensors").write_bytes((run / snapshot_name(1024, 0.05)).read_bytes())
        assert "8 snapshots" in phema(f"--indir={run}", "--outstd=0.06", "--dry-run")
        one = f"--indir={run / snapshot_name(1024, 0.1)}"
        assert "2 snapshots" in phema(f"--indir={run}", one, "--inprefix=other", "--outstd=0.06", "--dry-run")

    def test_what_is_told(self, run):
        """Of each target, before tensors are read: and nothing is written by --dry-run."""
        lines = phema(f"--indir={run}", "--outstd=0.050,0.150", "--tensor=*gain=0.25", "--dry-run").splitlines()
        fit = edm2.phema.fit(np.repeat(TIMES, 2), np.tile([0.05, 0.1], 4), 4096, [0.05, 0.15, 0.25])
        assert lines[2].split() == ["0.050", "0.000%", "1.00x"]
        assert lines[3].split() == ["0.150", f"{fit.error[1]:.3%}", f"{fit.amplification[1]:.2f}x"]
        assert lines[4].split() == ["0.250", f"{fit.error[2]:.3%}", f"{fit.amplification[2]:.2f}x", "of", "*gain"]
        assert len(list(run.iterdir())) == 8

    def test_skip(self, run, tmp_path):
        (tmp_path / "phema-0000004-0.060.safetensors").write_text("")
        told = phema(f"--indir={run}", f"--outdir={tmp_path}", "--outstd=0.060,0.070", "--skip")
        assert "1 of 2 are there already" in told and (tmp_path / "phema-0000004-0.060.safetensors").read_text() == ""
        assert (tmp_path / "phema-0000004-0.070.safetensors").stat().st_size > 1000
        assert "2 of 2 are there already" in phema(f"--indir={run}", f"--outdir={tmp_path}", "--outstd=0.060,0.070", "--skip")

    def test_lists_of_widths(self, run):
        lines = phema(f"--indir={run}", "--outstd=0.010,0.015,...,0.250", "--dry-run").splitlines()
        assert [line.split()[0] for line in lines[2:-1]] == [f"{0.005 * i:.3f}" for i in range(2, 51)]
        assert lines[-1].startswith("Note: averages whose error of fit is above 10% are not")
        for wrong in ("0.01,...,0.25", "0.010,0.015,...,0.251", "...", "a", "0.1,", "nan", "0.1,0.1,...,0.2"):
            result = call(main, "phema", f"--indir={run}", f"--outstd={wrong}", "--dry-run")
            assert result.exit_code == 2 and "is no list of numbers" in result.output, wrong


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--outstd=0.3"], "σ_rel 0.3 is impossible"),
            (["--outstd=0.2887"], "σ_rel 0.2887 is impossible"),
            (["--outstd=0"], "σ_rel 0 is impossible"),
            (["--outstd=0.1", "--tensor=*gain=0.3"], "σ_rel 0.3 is impossible"),
            (["--outstd=0.1", "--tensor=*freqs=0.1"], "no parameter is called *freqs"),
            (["--outstd=0.1", "--instd=0.05,0.2"], "none of the snapshots is an average of σ_rel 0.2"),
            (["--outstd=0.5", "--indir=https://example.org/a.pkl"], "σ_rel 0.5 is impossible"),
            (["--outstd=0.1", "--indir=https://example.org/a.pkl"], "give the folder for the averages of an address with --outdir"),
            (["--outstd=0.1", "plan", "--duration=2Gi"], "options of `phema plan` come behind its name"),
            (["--outstd=0.1", "--tensor=dec=0.1"], "no parameter is called dec"),
            (["--outstd=0.1", "--instd=0.2"], "none of the 8 snapshots is an average of σ_rel 0.2"),
            (["--outstd=0.1", "--outkimg=3000"], "there is no snapshot at 3000 thousand images; the nearest is at 4"),
            (["--outstd=0.1", "--inprefix=x"], "holds no x"),
            (["--outstd=0.1,0.1001"], "have the same three decimals"),
            (["--outstd=0.1", "--outprefix=network-snapshot"], "is an input; choose another --outprefix"),
            (["--outstd=0.1", "--indir=nowhere"], "nowhere does not exist"),
            ([], "give the widths to make with --outstd"),
        ],
    )
    def test_options(self, run, options, words):
        assert words in refused(main, "phema", f"--indir={run}", *options)
        assert len(list(run.iterdir())) == 8

    def test_no_input(self):
        assert "give the folder of a run's snapshots" in refused(main, "phema", "--outstd=0.1")

    def test_duplicates(self, run):
        (run / "network-snapshot-copy.safetensors").write_bytes((run / snapshot_name(1024, 0.05)).read_bytes())
        line = refused(main, "phema", f"--indir={run}", "--outstd=0.1")
        assert "network-snapshot-copy.safetensors are averages of one width at one time" in line

    def test_other_networks(self, run):
        save(run, 5120, 0.05, label_dim=3)
        line = refused(main, "phema", f"--indir={run}", "--outstd=0.1")
        assert "0000001-0.050.safetensors is of another network" in line and "label_dim is 5 and not 3" in line

    def test_other_runs(self, run):
        """Of the same network: they drew other Fourier features."""
        path = save(run, 5120, 0.05)
        other = network(5120, 0.05, img_channels=4)
        other.unet.emb_fourier.freqs.mul_(2)
        edm2.save_snapshot(path, other, meta={"nimg": 5120, "std": 0.05})
        assert "it belongs to another run, as its Fourier features tell" in refused(main, "phema", f"--indir={run}", "--outstd=0.1")

    def test_a_snapshot_that_is_missing(self, run):
        """Is named; so is a bad fit."""
        (run / snapshot_name(4096, 0.05)).unlink()
        told = phema(f"--indir={run}", "--outstd=0.05", "--dry-run")
        assert "Note: there is no network-snapshot-0000004-0.050.safetensors." in told and "above 10% are not what they are named" in told

    def test_few_files_may_be_open(self, run, tmp_path):
        command = [sys.executable, "-m", "edm2", "phema", f"--indir={run}", f"--outdir={tmp_path}", "--outstd=0.05,0.07"]
        result = subprocess.run(["sh", "-c", 'ulimit -S -n 20; exec "$@"', "sh", *command], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    def test_damage(self, run, tmp_path):
        path = run / snapshot_name(2048, 0.05)
        path.write_bytes(path.read_bytes()[:-10])
        assert "network-snapshot-0000002-0.050.safetensors is truncated" in refused(main, "phema", f"--indir={run}", "--outstd=0.1")
        edm2.save_snapshot(path, tiny_net(), meta={})
        assert "does not say of how many images" in refused(main, "phema", f"--indir={run}", "--outstd=0.1")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
    def test_numbers(self, run, tmp_path, value):
        """That are none, or too large for fp16."""
        net = network(2048, 0.05, img_channels=4)
        with torch.no_grad():
            net.unet.out_gain.fill_(value)
        edm2.save_snapshot(run / snapshot_name(2048, 0.05), net, meta={"nimg": 2048, "std": 0.05}, dtype=torch.float32)
        line = refused(main, "phema", f"--indir={run}", f"--outdir={tmp_path / 'out'}", "--outstd=0.15").splitlines()[-1]
        finite = "averages of unet.out_gain are too large for torch.float16"
        words = finite if value == 1e30 else "network-snapshot-0000002-0.050.safetensors is damaged: unet.out_gain has numbers"
        assert words in line and not list((tmp_path / "out").iterdir())

    def test_a_damaged_pickle(self, tmp_path):
        """Is named, though others are open too."""
        for kimg in (8, 16, 24):
            write_official(tmp_path / f"network-snapshot-{kimg:07d}-0.050.pkl", network(count_of(kimg), 0.05))
        path, numbers = tmp_path / "network-snapshot-0000016-0.050.pkl", network(count_of(16), 0.05).unet.out_conv.weight
        data = numbers.detach().half().numpy().tobytes()
        path.write_bytes(path.read_bytes().replace(data, b"\x00\x7e" + data[2:]))
        line = refused(main, "phema", f"--indir={tmp_path}", "--outstd=0.1")
        assert "0000016-0.050.pkl is refused: damaged: numbers that are not finite" in line
        assert not list(tmp_path.glob("phema*")) + list(tmp_path.glob(f".*{LEFTOVER}"))

    def test_full_disks(self, run, tmp_path, monkeypatch):
        """Found before, or when it is: nothing is left behind."""
        out = tmp_path / "out"
        usage = reconstruction.shutil.disk_usage
        monkeypatch.setattr(reconstruction.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
        assert "MiB free, and the averages take" in refused(main, "phema", f"--indir={run}", f"--outdir={out}", "--outstd=0.1,0.15")
        monkeypatch.setattr(reconstruction.shutil, "disk_usage", usage)
        write = edm2.piecewise.Writer.write

        def full(writer, x):
            if x.numel() > 300:
                raise OSError(28, os.strerror(28))
            write(writer, x)

        monkeypatch.setattr(edm2.piecewise.Writer, "write", full)
        assert "No space left on device" in refused(main, "phema", f"--indir={run}", f"--outdir={out}", "--outstd=0.1,0.15")
        assert not list(out.iterdir())


class TestPlan:
    def test_how_often(self):
        """Twice as often until every width can be made so well."""
        lines = call(main, "phema", "plan", "--duration=2Gi", "--outstd=0.15", "--accuracy=0.004").output.splitlines()
        counts = 1, 2, 4, 8, 16, 32
        errors = [edm2.phema.fit(np.repeat(np.arange(1, n + 1) / n, 2), np.tile([0.05, 0.1], n), 1, 0.15).error[0] for n in counts]
        assert [line.split()[2] for line in lines[1:7]] == [f"{error:.3%}" for error in errors]
        assert [line.split()[0] for line in lines[1:7]] == [f"{2048 // n}Mi" for n in counts]
        assert lines[-1] == "64 snapshots: every 67,108,864 images of 2,147,483,648, widths [0.05, 0.1]"
        assert errors[-1] <= 0.004 < errors[-2]
        assert "widths [0.05]" in call(main, "phema", "plan", "--duration=10000", "--outstd=0.05", "--instd=0.05,0.05").output

    def test_what_cannot_be(self):
        assert "that is not enough for errors of 1e-09" in refused(main, "phema", "plan", "--duration=2Gi", "--accuracy=1e-9")
        assert "σ_rel 0.5 is impossible" in refused(main, "phema", "plan", "--duration=2Gi", "--outstd=0.5")
        assert "--duration must be one image at least" in refused(main, "phema", "plan", "--duration=0")


def test_plot(run, tmp_path):
    for source in (f"--indir={run}", "--times=8"):
        result = call(main, "phema", "plot", source, "--outstd=0.03,0.25", f"--out={tmp_path / 'a.png'}")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "give either" in refused(main, "phema", "plot", f"--out={tmp_path / 'b.png'}")
    assert "cannot create the folder /dev/null" in refused(main, "phema", "plot", "--times=2", "--out=/dev/null/b.png")
    assert "cannot write" in refused(main, "phema", "plot", "--times=2", f"--out={tmp_path / 'a.xyz'}")
    assert "--outkimg chooses" in refused(main, "phema", "plot", "--times=2", "--outkimg=3")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.png"}


SCRIPT = """
import resource, sys, time
from pathlib import Path
import numpy as np, torch
from edm2 import piecewise
from edm2.reconstruction import make_plan, reconstruct_files
folder = Path(sys.argv[1]); paths = sorted(folder.glob("*.safetensors")); stds = [round(0.01 + 0.008 * i, 3) for i in range(31)]
plan, outs = make_plan(paths, stds), [folder / f"out-{std:.3f}" for std in stds]
start = time.time(); reconstruct_files(plan, outs); whole = time.time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def count(writer, x): writer.left -= x.numel() * x.element_size()
piecewise.Writer.write = count
start = time.time(); reconstruct_files(plan, outs); unwritten = time.time() - start
start = time.time()
x = [torch.from_numpy(np.fromfile(path, np.float16, 124_000_000, offset=100_000)) for path in paths][0].float()
sums = [torch.zeros_like(x) for _ in range(2)]
for i in range(len(paths) * len(stds)): sums[i % 2].add_(x, alpha=0.5)
print(whole, unwritten, time.time() - start, peak)
"""


@pytest.mark.torture
def test_time_and_memory(tmp_path):
    """31 widths of EDM2-XS from 8 snapshots in fp16, 238 MiB each: without the writing of 7.2 GiB, at least 70 % as fast as reading
    the files and one multiply-add of each for each width; less than 12 GB, whatever their number."""
    net = edm2.build("edm2-img512-xs", 64, 4, 1000)
    for i in range(8):
        nimg, std = (i // 2 + 1) * 2**23, (0.05, 0.1)[i % 2]
        edm2.save_snapshot(tmp_path / snapshot_name(nimg, std), net, meta={"nimg": nimg, "std": std})
    result = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    whole, unwritten, plain, peak = map(float, result.stdout.split())
    print(f"{whole:.1f} s, {unwritten:.1f} s without writing, {plain:.1f} s plainly; {peak / 1e9:.2f} GB")
    assert unwritten < plain / 0.7 and peak < 12e9
