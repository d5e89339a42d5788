"""What `edm2 metrics` refuses, in one line."""

import pickle

import numpy as np
import pytest

import edm2
from edm2.cli.main import main
from edm2.dataset_zip import write_zip
from edm2.latents import LatentEncoder, RGBEncoder
from tests.command_lines import refused
from tests.conftest import tiny_net
from tests.dataset_files import encode, make, pixels
from tests.metrics_files import MINE, noise
from tests.run_files import make_run

pytestmark = pytest.mark.usefixtures("hardly_trained")

OTHERS = "those of the reference of 8x8 with 3 channels: give a reference of such images"


def make_files(tmp_path):
    noise(tmp_path / "large.zip", size=16)
    plain = {"mu": np.zeros(27), "sigma": np.eye(27)}
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({MINE: plain}))  # which tells no size
    random = np.random.default_rng(0)
    edm2.save_snapshot(tmp_path / "grey", tiny_net(0, img_channels=1), encoder=RGBEncoder())
    edm2.save_snapshot(tmp_path / "latents.net", tiny_net(img_channels=4), encoder=LatentEncoder(vae="other/vae"))
    write_zip(tmp_path / "unlabelled.zip", random.integers(0, 256, (5, 8, 8, 3), np.uint8))
    write_zip(tmp_path / "one.zip", random.integers(0, 256, (1, 8, 8, 3), np.uint8))
    write_zip(tmp_path / "grey.zip", random.integers(0, 256, (5, 8, 8), np.uint8))
    make(tmp_path / "mixed.zip", {f"{i}.png": encode(pixels(0, size, 8, 3)) for i, size in enumerate((8, 9))})
    make(tmp_path / "damaged.zip", {"0.png": encode(pixels(0, 8, 8, 3)), "1.png": b"none"})
    (tmp_path / "empty").mkdir()
    (tmp_path / "latents").mkdir()
    np.save(tmp_path / "latents" / "0.npy", np.ones((8, 8, 8), np.float32))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data=TMP/none"], "TMP/none does not exist"),
        (["--data=TMP/empty"], "TMP/empty holds no images"),
        (["--data=TMP/mixed.zip"], "mixed.zip/1.png is 8x9"),
        (["--data=TMP/damaged.zip"], "cannot read TMP/damaged.zip/1.png"),
        (["--data=TMP/latents"], "TMP/latents holds latents, and metrics measure pixels"),
        (["--data=TMP/one.zip"], "TMP/one.zip holds one image, and statistics need two at least"),
        (["--data=TMP/unlabelled.zip", "--metrics=frechet-small"], "unlabelled.zip has no labels"),
        (["--metrics=fad"], "unknown metric 'fad'; did you mean fid"),
        (["--metrics=,"], "',' is no list of names"),
        (["--metrics=no.such:thing"], "no.such:thing cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (["--metrics=tests.user_features:none"], "tests.user_features has no function 'none'"),
        (["--metrics=tests.user_features:NUMBER"], "tests.user_features has no function 'NUMBER'"),
        (["--metrics=tests.user_features:nothing"], "tests.user_features:nothing: features are not all finite"),
        (["--metrics=tests.user_features:huge"], "tests.user_features:huge: features are too large: their covariance is not finite"),
        (["--metrics=tests.user_features:fails"], "fails failed for uint8 images [32, 8, 8, 3]: KeyError: 'of mine'"),
        (["--metrics=builtins:len"], "builtins:len: features: expected [N, d], got []"),
        (["--dest=TMP/ref.npy"], "the name of a reference ends with .npz"),
        (["--dest=/dev/null/ref.npz"], "/dev/null"),
    ],
)
def test_ref(tmp_path, data, args, words):
    make_files(tmp_path)
    args = [arg.replace("TMP", str(tmp_path)) for arg in args]
    line = refused(main, "metrics", "ref", f"--data={data}", f"--metrics={MINE}", f"--dest={tmp_path}/new.npz", *args)
    assert words.replace("TMP", str(tmp_path)) in line and not (tmp_path / "new.npz").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--images=TMP/none"], "TMP/none does not exist"),
        (["--num=61"], "data.zip holds 60 images, and --num asks for 61: make more, or give --num=60"),
        (["--num=1"], "--num: metrics need two images at least"),
        (["--num=50Kb"], "no count of images"),
        (["--images=TMP/latents", "--num=2"], "TMP/latents holds latents"),
        (["--images=TMP/grey.zip", "--num=5"], f"the images of TMP/grey.zip are of 8x8 with 1 channel, and {OTHERS}"),
        (["--images=TMP/large.zip", f"--metrics={MINE}"], f"the images of TMP/large.zip are of 16x16 with 3 channels, and {OTHERS}"),
        (["--images=TMP/grey.zip", "--num=5", "--ref=TMP/plain.pkl", f"--metrics={MINE}"], "features of 9 and 27 numbers cannot be"),
        (["--images=TMP/mixed.zip", "--num=2"], "mixed.zip/1.png is 8x9"),
        (["--metrics=fid"], "ref.npz has no statistics of fid, but of frechet-small, tests.user_features:pixels"),
        (["--metrics=fad"], "unknown metric 'fad'"),
        (["--ref=TMP/none.npz"], "cannot read TMP/none.npz"),
        (["--ref=TMP/data.zip"], "TMP/data.zip is refused, it is no reference statistics"),
        (["--ref=http:///"], "'http:///' is no address"),
        (["--json=/dev/null/out.json"], "/dev/null"),
    ],
)
def test_calc(tmp_path, data, ref, args, words):
    make_files(tmp_path)
    args = [arg.replace("TMP", str(tmp_path)) for arg in args]
    line = refused(main, "metrics", "calc", f"--images={data}", f"--ref={ref}", "--num=60", *args)
    assert words.replace("TMP", str(tmp_path)) in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a network: --net, or a published one by --preset"),
        (["--net=TMP/none"], "TMP/none"),
        (["--net=NET", "--net=NET"], "--net: one of them is given twice"),
        (["--net=NET", "--std=0.05"], "--std, --kimg and --gnet-kimg are for a --net that is the folder of a training run"),
        (["--net=NET", "--gnet-kimg=1"], "are for a --net that is the folder"),
        (["--net=RUN"], "TMP/run is a folder: give --std"),
        (["--net=RUN", "--std=0.5"], "σ_rel 0.5 is impossible"),
        (["--net=RUN", "--std=0.05", "--preset=edm2-img64-s-fid"], "--preset names networks of its own"),
        (["--net=RUN", "--std=0.05", "--guidance=2", "--gnet=RUN"], "is the run itself"),
        (["--net=TMP/empty", "--std=0.05"], "TMP/empty holds no network snapshots"),
        (["--net=NET", "--guidance=2"], "--guidance 2.0 needs a guide network: give --gnet"),
        (["--net=NET", "--guidance=2", "--gnet=TMP/grey"], "TMP/grey makes images of another size"),
        (["--net=NET", "--class=5"], "class 5 is out of range"),
        (["--net=NET", "--num=1"], "--num: metrics need two images at least"),
        (["--net=TMP/grey"], f"these images are of 8x8 with 1 channel, and {OTHERS}"),
        (["--net=RUN", "--std=0.05", "--gnet=NET", "--gnet-kimg=1"], "--gnet-kimg is for a --gnet that is a run's folder"),
        (["--net=RUN", "--std=0.05", "--guidance=2", "--gnet-kimg=1"], "--gnet-kimg is for a --gnet that is a run's folder"),
        (["--net=TMP/latents.net"], "its latents are those of the VAE 'other/vae'"),
        (["--net=NET", "--vae=TMP/empty"], "makes pixels"),
        (["--net=NET", "--preset=edm2-img64-s-fit"], "unknown preset"),
        (["--net=NET", "--guidance-interval=2,1"], "'2,1' is no interval"),
    ],
)
def test_gen(tmp_path, data, net, ref, args, words):
    make_files(tmp_path)
    make_run(tmp_path / "run", data)
    places = {"TMP": str(tmp_path), "NET": str(net), "RUN": f"{tmp_path}/run"}
    for place, path in places.items():
        args = [arg.replace(place, path) for arg in args]
    line = refused(main, "metrics", "gen", f"--ref={ref}", "--num=4", "--steps=1", *args)
    assert words.replace("TMP", str(tmp_path)) in line
