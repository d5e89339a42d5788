"""Networks by file, address and preset, and `python -m edm2 import`."""

import json
import subprocess
import sys
import threading

import pytest
import safetensors
import torch

import edm2
import sample
from edm2.cli.main import main
from edm2.networks import is_pickle, open_snapshot
from edm2.published import PUBLISHED
from tests.command_lines import ROOT, call, refused, small_net
from tests.conftest import GOLDEN, Golden, relative_error
from tests.local_server import Server
from tests.official_files import write_official

PICKLE = GOLDEN / "official_snapshot.pkl"


@pytest.fixture()
def server(monkeypatch):
    """Serves the official pickle under any name."""
    with Server() as server:
        server.data = PICKLE.read_bytes()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_files_and_addresses_are_alike(server, net, tmp_path):
    expected = edm2.load_official_snapshot(PICKLE).net.state_dict()
    for source in (PICKLE, str(PICKLE), server.url):
        found = open_snapshot(source, cache=tmp_path)
        assert all(torch.equal(found.net.state_dict()[name], x) for name, x in expected.items())
    assert open_snapshot(net).config == edm2.load_snapshot(net).config


def test_what_is_a_pickle(net, tmp_path):
    """Also where the length of a safetensors file's header begins with the same byte."""
    assert is_pickle(PICKLE) and not is_pickle(net) and not is_pickle(tmp_path / "none")
    (tmp_path / "a").write_bytes(b"\x80\x04\x00\x00\x00\x00\x00\x00{")
    assert not is_pickle(tmp_path / "a")


def test_a_sample_of_an_official_network(tmp_path, server):
    """The same from the pickle, its address and the snapshot made of it, with a word about the licence."""
    made = call(main, "import", str(PICKLE), f"--out={tmp_path}")
    assert made.exit_code == 0, made.output
    assert made.output.startswith(f"wrote {tmp_path}/official_snapshot.safetensors\nNote: the network is NVIDIA's, under CC BY-NC-SA 4.0")
    latents = []
    for i, source in enumerate((PICKLE, server.url, tmp_path / "official_snapshot.safetensors")):
        options = f"--net={source}", f"--networks={tmp_path / 'cache'}", f"--outdir={tmp_path / str(i)}"
        result = call(sample.main, *options, "--latents", "--seeds=0", "--steps=2")
        assert result.exit_code == 0, result.output
        assert ("CC BY-NC-SA" in result.output) == (i < 2)
        latents.append((tmp_path / str(i) / "000000.npy").read_bytes()[:1104])  # the array, without what made it
    assert latents[0] == latents[1] == latents[2]


class TestImport:
    def test_values(self, tmp_path):
        """Those of the reference, in the types that they had."""
        call(main, "import", str(PICKLE), f"--out={tmp_path}")
        golden, found = Golden("official_snapshot"), edm2.load_snapshot(tmp_path / "official_snapshot.safetensors")
        with torch.no_grad():
            denoised = found.net(golden["x"], golden["sigma"].reshape(-1, 1, 1, 1), golden["labels"])
        assert relative_error(denoised, golden["denoised"]) < 1e-5
        assert found.meta["file"] == "official_snapshot.pkl" and "CC BY-NC-SA" in found.meta["licence"]
        with safetensors.safe_open(tmp_path / "official_snapshot.safetensors", framework="pt") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        assert {name for name, kind in types.items() if kind == "F32"} == {name for name, _ in found.net.named_buffers()}
        assert PICKLE.stat().st_size > (tmp_path / "official_snapshot.safetensors").stat().st_size

    def test_nothing_else_is_overwritten(self, net, tmp_path):
        """But an earlier conversion of the same file."""
        (tmp_path / "official_snapshot.safetensors").write_bytes(net.read_bytes())
        assert "is there already, and not made of official_snapshot.pkl" in refused(main, "import", str(PICKLE), f"--out={tmp_path}")
        assert (tmp_path / "official_snapshot.safetensors").read_bytes() == net.read_bytes()
        (tmp_path / "official_snapshot.safetensors").unlink()
        assert all(call(main, "import", str(PICKLE), f"--out={tmp_path}").exit_code == 0 for _ in range(2))
        other = tmp_path / "other" / "official_snapshot.pkl"
        other.parent.mkdir()
        write_official(other, small_net(5))
        assert "is there already, and not made of official_snapshot.pkl" in refused(main, "import", str(other), f"--out={tmp_path}")
        (tmp_path / "w-0.125").write_bytes(PICKLE.read_bytes())
        assert "wrote" in call(main, "import", str(tmp_path / "w-0.125"), f"--out={tmp_path}").output
        assert (tmp_path / "w-0.125.safetensors").exists()

    def test_a_preset(self, server, tmp_path, monkeypatch):
        """Both of its networks, which sample.py then finds."""
        monkeypatch.setattr("edm2.published.URL", server.url.rpartition("/")[0])
        row = PUBLISHED["edm2-img512-s-guid-fid"]
        assert call(main, "import", "edm2-img512-s-guid-fid", f"--out={tmp_path}").exit_code == 0
        assert {f"{row.net}.safetensors", f"{row.gnet}.safetensors"} < {path.name for path in tmp_path.iterdir()}
        assert edm2.load_snapshot(tmp_path / f"{row.net}.safetensors").meta["std"] == 0.025
        server.shutdown()
        options = f"--networks={tmp_path}", f"--outdir={tmp_path / 'out'}", "--latents", "--seeds=0", "--steps=1"
        result = call(sample.main, "--preset=edm2-img512-s-guid-fid", *options)
        assert result.exit_code == 0, result.output

    def test_what_cannot_be(self, server, net, tmp_path):
        out = f"--out={tmp_path / 'out'}"
        assert "is no pickle of the official release" in refused(main, "import", str(net), out)
        assert "no file, no address and no preset" in refused(main, "import", "edm2-img512-s", out)
        assert "is another file than expected" in refused(main, "import", server.url, out, f"--sha256={'0' * 64}")
        assert "its SHA-256 is" in refused(main, "import", str(PICKLE), out, f"--sha256={'0' * 64}")
        assert "is no SHA-256" in refused(main, "import", str(PICKLE), out, "--sha256=0")
        assert refused(main, "import", "none", f"--out={tmp_path}/new") and not (tmp_path / "new").exists()
        server.data = b"<html>"
        assert "is no file of the wanted kind" in refused(main, "import", server.url.replace("a-1", "b-1"), out)
        assert "--sha256 is that of one file" in refused(main, "import", "edm2-img512-s-fid", out, "--sha256=0")
        assert not list((tmp_path / "out").glob("*.safetensors"))

    def test_large_networks(self, tmp_path):
        """Are tried with small images."""
        write_official(tmp_path / "large.pkl", edm2.Precond(2**13, 3, 0, model_channels=8, channels_per_head=8, attn_resolutions=[]))
        made = call(main, "import", str(tmp_path / "large.pkl"), f"--out={tmp_path}")
        assert made.exit_code == 0, made.output

    def test_what_was_written_is_compared(self, tmp_path, monkeypatch):
        def damaged(path, tensors, *arguments, **kwargs):
            write_file(path, tensors | {"unet.out_gain": tensors["unet.out_gain"] + 1}, *arguments, **kwargs)

        write_file = edm2.networks.write_file
        monkeypatch.setattr("edm2.networks.write_file", damaged)
        assert "was not written as it should be" in refused(main, "import", str(PICKLE), f"--out={tmp_path}")

    def test_names_that_are_none(self, tmp_path):
        (tmp_path / "a\udcff.pkl").write_bytes(PICKLE.read_bytes())
        assert "is no name that other programs understand" in refused(main, "import", str(tmp_path / "a\udcff.pkl"), f"--out={tmp_path}")
        for wrong in ("~nosuchuser/x.pkl", "a" * 300):
            for command in ("import", "info"):
                assert "is no file's name" in refused(main, command, wrong)

    def test_a_network_that_makes_no_numbers(self, tmp_path, monkeypatch):
        def read(path):
            found = edm2.official.read_official(path)
            found.tensors["unet.out_gain"].fill_(float("nan"))
            return found

        monkeypatch.setattr("edm2.networks.read_official", read)
        assert "does not evaluate to finite numbers" in refused(main, "import", str(PICKLE), f"--out={tmp_path}")
        assert not list(tmp_path.glob("*.safetensors"))


def test_guides_are_opened_too(tmp_path):
    edm2.save_snapshot(tmp_path / "a.safetensors", small_net(0))
    line = refused(sample.main, f"--net={tmp_path / 'a.safetensors'}", f"--gnet={PICKLE}", "--guidance=2", f"--outdir={tmp_path}")
    assert "makes images of another size" in line


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_files_as_the_release_writes_them(protocol, tmp_path):
    """By Python's own pickle, of a network of every kind of part."""
    net = small_net(5)
    write_official(tmp_path / "edm2-img64-s-1073741-0.075.pkl", net, protocol)
    found = open_snapshot(tmp_path / "edm2-img64-s-1073741-0.075.pkl")
    assert json.dumps(found.config) == json.dumps(net.config)  # in which tuples are lists
    assert found.encoder.kind == "rgb" and found.meta["nimg"] == 1073741824
    assert all(torch.equal(found.net.state_dict()[name], x.half().float()) for name, x in net.state_dict().items())


@pytest.mark.torture
def test_time_and_memory_of_an_import(tmp_path):
    """Of EDM2-S, 534 MiB: less than 10 s on two cores, less than 2.2 times its size beyond what is there before."""
    with torch.no_grad():
        write_official(tmp_path / "a.pkl", edm2.build("edm2-img512-s", 64, 4, 1000))
    script = (
        "import resource, sys, time; from pathlib import Path; from edm2.networks import convert\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; start = time.time(); path = Path(sys.argv[1])\n"
        "convert(path, path.parent); print(time.time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    result = subprocess.run([sys.executable, "-c", script, tmp_path / "a.pkl"], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, kib = map(float, result.stdout.split())
    assert seconds < 10 and kib * 1024 < 2.2 * (tmp_path / "a.pkl").stat().st_size
