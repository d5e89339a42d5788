"""Folders for a model hub: what is in them, what its card says, what reads them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import edm2
from edm2.cli.main import main
from edm2.info import describe
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.model_folder import export
from edm2.official import LICENCE
from tests.command_lines import ROOT, call, refused, small_net
from tests.conftest import GOLDEN

PICKLE = GOLDEN / "official_snapshot.pkl"


@pytest.fixture()
def files(tmp_path):
    """A network of five classes and its guide."""
    meta = {"nimg": 2147483648, "std": 0.05, "preset": "edm2-img64-s"}
    edm2.save_snapshot(tmp_path / "net.st", small_net(5), encoder=RGBEncoder(), meta=meta)
    edm2.save_snapshot(tmp_path / "guide.st", small_net(0), encoder=RGBEncoder())
    return tmp_path / "net.st", tmp_path / "guide.st"


def test_a_folder(files, tmp_path):
    """Its networks have the same bits, and its card the facts."""
    net, guide = files
    out = tmp_path / "out"
    result = call(main, "export", f"--net={net}", f"--gnet={guide}", "--guidance=1.4", f"--out={out}", "--license=apache-2.0")
    assert result.exit_code == 0 and result.output == f"wrote {out}\n"
    assert {path.name for path in out.iterdir()} == {"net.safetensors", "gnet.safetensors", "model_index.json", "README.md"}
    for path, name in ((net, "net"), (guide, "gnet")):
        expected, found = edm2.load_snapshot(path), edm2.load_snapshot(out / f"{name}.safetensors")
        assert all(torch.equal(x, found.net.state_dict()[key]) for key, x in expected.net.state_dict().items())
        assert found.meta == expected.meta and found.encoder.kind == "rgb"
    index = json.loads((out / "model_index.json").read_text())
    assert index == {"_class_name": "EDM2Pipeline", "components": ["net", "gnet"], "guidance_scale": 1.4, "fast": False}
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: edm2-triton\npipeline_tag: unconditional-image-generation\ntags:\n")
    for words in ("class-conditional, 8×8×3 pixels", "| training images | 2,147,483,648 |", "of strength 1.4", "class_labels=[0]"):
        assert words in card
    assert "CC BY-NC-SA" not in card


def test_what_is_told_of_it(files, tmp_path):
    export(tmp_path / "a", *map(edm2.load_snapshot, files), guidance=1.4)
    told = describe(tmp_path / "a")
    assert (told["kind"], told["guide"], told["guidance"]) == ("folder for a model hub", "gnet.safetensors", 1.4)
    export(tmp_path / "b", edm2.load_snapshot(files[0]))
    assert "guide" not in describe(tmp_path / "b") and describe(tmp_path / "b")["config"] == told["config"]
    (tmp_path / "a" / "model_index.json").write_text("{")
    with pytest.raises(edm2.UserError, match="model_index.json cannot be read"):
        describe(tmp_path / "a")


def test_the_pipeline_reads_it(files, tmp_path):
    pipeline = pytest.importorskip("edm2.pipeline")
    net, guide = map(edm2.load_snapshot, files)
    pipe = pipeline.EDM2Pipeline.from_pretrained(export(tmp_path / "out", net, guide, 1.4))
    assert pipe.config.guidance_scale == 1.4 and pipe.gnet is not None
    images = pipe(class_labels=[1], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
    assert images.shape == (1, 8, 8, 3)


def test_official_networks_keep_their_licence(tmp_path):
    """Also where one of them is but the guide."""
    official = edm2.load_official_snapshot(PICKLE)
    card = (export(tmp_path / "a", official) / "README.md").read_text()
    assert "license: cc-by-nc-sa-4.0" in card and "Note: the network is NVIDIA's" in card and "16×16×4 VAE latents" in card
    assert isinstance(edm2.load_snapshot(tmp_path / "a" / "net.safetensors").encoder, LatentEncoder)
    own = edm2.load_official_snapshot(PICKLE)
    own.meta.clear()
    assert "license: cc-by-nc-sa-4.0" in (export(tmp_path / "b", own, official, 2.0) / "README.md").read_text()
    assert "license" not in (export(tmp_path / "c", own) / "README.md").read_text()
    line = refused(main, "export", f"--net={PICKLE}", f"--out={tmp_path / 'd'}", "--license=apache-2.0")
    assert "--license apache-2.0: the network is NVIDIA's, under CC BY-NC-SA 4.0" in line and not (tmp_path / "d").exists()


def test_licences_stay_with_the_weights(config, tmp_path):
    """Through a run that begins with them, and one that resumes it; through a pipeline."""
    pipeline = pytest.importorskip("edm2.pipeline").EDM2Pipeline
    begin = tmp_path / "begin.safetensors"
    edm2.save_snapshot(begin, edm2.build("digits", 8, 1, 10), meta={"licence": LICENCE}, encoder=RGBEncoder())
    config = replace(config, init=str(begin), duration=32, checkpoint=32)
    edm2.train(config)
    begin.unlink()
    edm2.train(replace(config, duration=64))
    for path in Path(config.outdir).glob("network-snapshot-*.safetensors"):
        assert edm2.load_snapshot(path).meta["licence"] == LICENCE
    pipe = pipeline.from_pretrained(path)
    pipe.save_pretrained(tmp_path / "saved")
    assert edm2.load_snapshot(tmp_path / "saved" / "net.safetensors").meta["licence"] == LICENCE
    line = refused(main, "export", f"--net={tmp_path / 'saved' / 'net.safetensors'}", f"--out={tmp_path / 'd'}", "--license=mit")
    assert "--license mit: the network is NVIDIA's" in line


def test_folders_of_others(files, tmp_path):
    """Are left as they are; an earlier export's is written anew, without the guide that is no longer there."""
    net, guide = files
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    assert "holds other things; choose a new folder" in refused(main, "export", f"--net={net}", f"--out={tmp_path / 'mine'}")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]
    for options in ((f"--gnet={guide}", "--guidance=2"), ()):
        assert call(main, "export", f"--net={net}", f"--out={tmp_path / 'out'}", *options).exit_code == 0
    assert not (tmp_path / "out" / "gnet.safetensors").exists()


def test_words_of_a_file(tmp_path, one_thread_env):
    """Do not break the card, wherever it is written."""
    meta = {"file": "\udcff\n---\nlicense: mit", "preset": "a|b"}
    edm2.save_snapshot(tmp_path / "a.st", small_net(5), encoder=RGBEncoder(), meta=meta)
    environment = one_thread_env | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "edm2", "export", f"--net={tmp_path / 'a.st'}", f"--out={tmp_path / 'out'}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| from | ??---?license: mit |" in card and r"| preset | a\|b |" in card and "σ_rel" not in card


def test_types(files, tmp_path):
    net = edm2.load_snapshot(files[0])
    for dtype, size in ((torch.float16, 1), (torch.float32, 2)):
        export(tmp_path / str(size), net, dtype=dtype)
    sizes = [(tmp_path / str(size) / "net.safetensors").stat().st_size for size in (1, 2)]
    assert 1.5 < sizes[1] / sizes[0] < 2


@pytest.mark.parametrize("options", [["--guidance=2"], ["--gnet=x"]], ids=str)
def test_a_guide_has_a_strength(files, options, tmp_path):
    assert "--gnet and --guidance go together" in refused(main, "export", f"--net={files[0]}", f"--out={tmp_path / 'out'}", *options)


def test_training_starts_from_an_official_network(config, tmp_path):
    """As from a snapshot."""
    with pytest.raises(edm2.UserError, match="is another network"):
        edm2.train({**config.__dict__, "init": str(PICKLE)})
