"""`edm2 metrics ref`, `calc` and `gen`: their values against the definitions, in one process and several."""

import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import edm2
import sample
from edm2.cli.main import main
from edm2.data import ImageDataset
from edm2.distributed import Processes
from edm2.features import SmallFeatures
from edm2.frechet import Gaussian, frechet_distance
from edm2.generate import ImageGenerator
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.measuring import make_reference, measure_images, measure_network, open_measures
from edm2.metrics import open_labelled
from edm2.references import read_reference
from edm2.vae import load_vae
from tests import user_features
from tests.command_lines import ROOT, call, small_net
from tests.conftest import tiny_net
from tests.local_server import Server
from tests.metrics_files import BOTH, CPU, MINE, noise, reference, runs, simulated, told
from tests.run_files import average, make_run
from tests.vae_files import save_tiny

pytestmark = pytest.mark.usefixtures("hardly_trained")

FEW = "--num=10", "--steps=2"


def value(ref: Path, images: np.ndarray) -> dict[str, float]:
    """Both metrics of images `[N, H, W, C]` by their definition."""
    reference = read_reference(ref)
    small = SmallFeatures(reference.classifier)
    of = {"frechet-small": small, MINE: user_features.pixels}
    return {name: frechet_distance(Gaussian.of(f(images)), reference.moments[name]) for name, f in of.items()}


def generated(net: edm2.Precond, seeds, **options) -> np.ndarray:
    return np.concatenate([batch.images for batch in edm2.generate_images(net, seeds, num_steps=2, **options)])


def near(a: dict[str, float], b: dict[str, float], rel: float = 1e-5) -> bool:
    return a == pytest.approx(b, rel=rel)


class TestOnTheDigits:
    def test_the_whole_road(self, digits_zip, tmp_path):
        """ref, gen, sample.py, calc: what was generated and what was saved measure the same."""
        edm2.save_snapshot(tmp_path / "net", tiny_net(10, img_channels=1), encoder=RGBEncoder())
        assert f"wrote {tmp_path}/ref.npz: frechet-small, {MINE} of 1797 images" in told(
            "ref", f"--data={digits_zip}", f"--dest={tmp_path}/ref.npz", BOTH
        )
        facts = read_reference(tmp_path / "ref.npz").facts
        assert facts["dataset"] == "digits.zip" and facts["images"] == 1797 and facts["image_shape"] == [1, 8, 8]
        command = f"--ref={tmp_path}/ref.npz", BOTH, "--num=12"
        (made,) = runs(tmp_path, "gen", f"--net={tmp_path}/net", *command, "--steps=2", "--seed=5", "--batch=5")
        options = f"--net={tmp_path}/net", "--seeds=5-16", "--steps=2", f"--outdir={tmp_path}/samples", "--subdirs"
        assert call(sample.main, *options).exit_code == 0
        (read,) = runs(tmp_path, "calc", f"--images={tmp_path}/samples", *command, "--batch=7")
        assert near(made["metrics"], read["metrics"]) and set(made["metrics"]) == {"frechet-small", MINE}
        assert min(made["metrics"].values()) > 0

    def test_a_dataset_is_at_no_distance_from_itself(self, digits_zip, tmp_path):
        told("ref", f"--data={digits_zip}", f"--dest={tmp_path}/ref.npz", BOTH)
        (found,) = runs(tmp_path, "calc", f"--images={digits_zip}", f"--ref={tmp_path}/ref.npz", BOTH, "--num=1797", "--batch=50")
        assert all(abs(x) < 1e-6 for x in found["metrics"].values())


class TestGen:
    def test_values_runs_and_files(self, net, ref, tmp_path):
        """Each run by its own seeds; each seed draws its class; the file holds all that they depend on."""
        output = told("gen", f"--net={net}", f"--ref={ref}", BOTH, *FEW, "--runs=3", "--seed=7", f"--json={tmp_path}/out.json")
        found = json.loads((tmp_path / "out.json").read_text())
        network = edm2.load_snapshot(net).net
        for r, run in enumerate(found["runs"]):
            first = 7 + 10 * r
            assert near(run["metrics"], value(ref, generated(network, range(first, first + 10))))
            assert run["seeds"] == f"{first}-{first + 9}" and f"{net}  seeds {run['seeds']}:  frechet-small " in output
        (summary,) = found["summaries"]
        values = [run["metrics"][MINE] for run in found["runs"]]
        expected = {"min": min(values), "mean": np.mean(values), "std": np.std(values, ddof=1)}
        assert summary["metrics"][MINE] == pytest.approx(expected) and len(set(values)) == 3
        assert f"{net}  3 runs:  frechet-small min " in output
        facts = found["runs"][0]
        assert facts["net_sha256"] == edm2.files.sha256(net) and facts["ref_sha256"] == edm2.files.sha256(ref)
        assert (facts["guidance"], facts["steps"], facts["num"], facts["class"], facts["device"]) == (1, 2, 10, None, "cpu")

    def test_metrics_of_the_reference(self, net, ref, tmp_path):
        """Without --metrics those that are nobody's program; classes in turn; batches do not matter."""
        values = []
        for batch in (3, 10):
            (found,) = runs(tmp_path, "gen", f"--net={net}", f"--ref={ref}", *FEW, "--class=1,3", f"--batch={batch}")
            assert list(found["metrics"]) == ["frechet-small"] and found["class"] == [1, 3]
            values.append(found["metrics"]["frechet-small"])
        expected = value(ref, generated(edm2.load_snapshot(net).net, range(10), class_idx=[1, 3]))["frechet-small"]
        assert values == pytest.approx([expected] * 2, rel=1e-5)

    def test_guidance(self, net, ref, tmp_path):
        """By a guide, in an interval, and a network that guides itself."""
        guide, network = small_net(0), edm2.load_snapshot(net).net
        edm2.save_snapshot(tmp_path / "guide", guide)
        edm2.save_snapshot(tmp_path / "own", network, meta={"label_dropout": 0.1})
        guide = edm2.load_snapshot(tmp_path / "guide").net
        common = f"--ref={ref}", BOTH, *FEW, "--guidance=2"
        (found,) = runs(tmp_path, "gen", f"--net={net}", f"--gnet={tmp_path}/guide", *common)
        assert near(found["metrics"], value(ref, generated(network, range(10), gnet=guide, guidance=2)))
        assert found["gnet_sha256"] == edm2.files.sha256(tmp_path / "guide") and found["guidance_interval"] is None
        (within,) = runs(tmp_path, "gen", f"--net={net}", f"--gnet={tmp_path}/guide", *common, "--guidance-interval=1,80")
        expected = value(ref, generated(network, range(10), gnet=guide, guidance=2, guidance_interval=(1, 80)))
        assert near(within["metrics"], expected) and within["guidance_interval"] == [1, 80]
        (own,) = runs(tmp_path, "gen", f"--net={tmp_path}/own", *common)
        assert near(own["metrics"], value(ref, generated(network, range(10), gnet=edm2.Unlabelled(network), guidance=2)))
        assert own["gnet"] == "itself without labels" and len({x["metrics"][MINE] for x in (found, within, own)}) == 3

    def test_networks_and_averages(self, net, data, ref, tmp_path):
        """Several networks and widths in one call, a run guided by another of the same width."""
        run, guide = (make_run(tmp_path / name, data, seed) for seed, name in enumerate(("run", "guide")))
        common = f"--ref={ref}", BOTH, *FEW
        found = runs(tmp_path, "gen", f"--net={net}", f"--net={run}", "--std=0.05,0.08", *common)
        nets = [edm2.load_snapshot(net).net, average(run, 0.05), average(run, 0.08)]
        assert len(found) == 3 and [x.get("std") for x in found] == [None, 0.05, 0.08] and found[1]["nimg"] == 3000
        for x, network in zip(found, nets):
            assert near(x["metrics"], value(ref, generated(network, range(10))), 1e-3)
        options = f"--net={run}", "--std=0.08", "--kimg=2", f"--gnet={guide}", "--gnet-kimg=1", "--guidance=2"
        (guided,) = runs(tmp_path, "gen", *options, *common)
        expected = generated(average(run, 0.08, 2000), range(10), gnet=average(guide, 0.08, 1000), guidance=2)
        assert near(guided["metrics"], value(ref, expected), 1e-3)

    def test_latents_are_decoded(self, tmp_path):
        """To images of 32×32."""
        vae, ref = save_tiny(tmp_path / "vae"), reference(tmp_path / "ref.npz", noise(tmp_path / "data.zip", size=32), f"--metrics={MINE}")
        edm2.save_snapshot(tmp_path / "net", tiny_net(img_channels=4), encoder=LatentEncoder())
        (found,) = runs(tmp_path, "gen", f"--net={tmp_path}/net", f"--ref={ref}", f"--metrics={MINE}", *FEW, f"--vae={vae}")
        snapshot = edm2.load_snapshot(tmp_path / "net")
        images = generated(snapshot.net, range(10), encoder=load_vae(snapshot.encoder, vae))
        expected = frechet_distance(Gaussian.of(user_features.pixels(images)), read_reference(ref).moments[MINE])
        assert found["metrics"][MINE] == pytest.approx(expected, rel=1e-5)
        assert found["vae_sha256"] == edm2.files.sha256(vae / "diffusion_pytorch_model.safetensors")


class TestCalc:
    def test_subsets(self, data, ref, tmp_path):
        """As many as asked for, drawn by each seed; all of them whatever the seed."""
        found = runs(tmp_path, "calc", f"--images={data}", f"--ref={ref}", BOTH, "--num=20", "--seed=0,3")
        images = ImageDataset(data).images(range(60)).transpose(0, 2, 3, 1)
        for x, seed in zip(found, (0, 3), strict=True):
            chosen = np.random.RandomState([seed, 0]).permutation(60)[:20]
            assert near(x["metrics"], value(ref, images[np.sort(chosen)])) and x["seed"] == seed
        (whole,) = runs(tmp_path, "calc", f"--images={data}", f"--ref={ref}", BOTH, "--num=60", "--seed=9")
        assert whole["seed"] is None and all(abs(x) < 1e-6 for x in whole["metrics"].values())

    def test_an_official_pickle_by_its_address(self, data, ref, tmp_path):
        """Downloaded once, to the folder that is named."""
        moments = read_reference(ref).of(MINE)
        with Server() as server:
            server.data = pickle.dumps({MINE: {"mu": moments.mean, "sigma": moments.covariance}})
            threading.Thread(target=server.serve_forever, daemon=True).start()
            options = f"--images={data}", f"--metrics={MINE}", "--num=20", f"--networks={tmp_path}/cache"
            found = [runs(tmp_path, "calc", *options, f"--ref={source}")[0] for source in (server.url, server.url, ref)]
            server.shutdown()
        assert len(server.requests) == 1 and near(found[0]["metrics"], found[2]["metrics"], 1e-12)
        assert found[0]["ref_sha256"] == edm2.files.sha256(tmp_path / "cache" / "a-1.0.pkl") and found[0] == found[1]

    def test_workers(self, data, ref, tmp_path):
        values = [runs(tmp_path, "calc", f"--images={data}", f"--ref={ref}", "--num=20", f"--workers={n}")[0]["metrics"] for n in (0, 1)]
        assert values[0] == values[1]


class TestProcesses:
    @pytest.mark.parametrize("count", [2, 3, 40])
    def test_they_equal_one(self, net, data, ref, count):
        """Also where most have nothing to do."""
        one = Processes(0, 1, CPU)
        dataset, reference = open_labelled(data), read_reference(ref)
        measures = open_measures(reference, ["frechet-small", MINE], one)
        generate = ImageGenerator(edm2.load_snapshot(net).net)
        for function in (
            lambda procs: measure_images(dataset, measures, procs, 47, seed=1, batch=4),
            lambda procs: measure_network(generate, measures, procs, range(3, 20), 4, [1, 3, 0], num_steps=2),
        ):
            assert near(simulated(function, count), function(one), 1e-9)
        whole = make_reference(dataset, [MINE], one, batch=4)
        shared = simulated(lambda procs: make_reference(dataset, [MINE], procs, batch=4), count)
        for a, b in zip(whole.moments[MINE], shared.moments[MINE]):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)

    def test_torchrun(self, net, ref, tmp_path, one_thread_env):
        """Two processes; `--`, since torchrun would take --num for an option of its own."""
        command = ["metrics", "gen", f"--net={net}", f"--ref={ref}", BOTH, "--num=11", "--steps=2", "--batch=3", "--runs=2"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "--", "edm2"]
        result = subprocess.run(
            [*launcher, *command, f"--json={tmp_path}/two.json"], cwd=ROOT, env=one_thread_env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        one, two = runs(tmp_path, *command[1:]), json.loads((tmp_path / "two.json").read_text())["runs"]
        assert len(one) == len(two) == 2 and result.stdout.count("seeds 0-10:") == 1
        for a, b in zip(one, two):
            assert near(a.pop("metrics"), b.pop("metrics"), 1e-9) and a == b


class TestSweep:
    def test_other_metrics(self, data, ref, tmp_path):
        """Of a dataset or a reference: points of their own, the same values."""
        run = make_run(tmp_path / "run", data)
        common = run, "--std=0.08", "--seeds=0-9", "--steps=2"
        options = [], [f"--metric={MINE}"], [f"--metric={MINE}", f"--ref={ref}"], [f"--ref={ref}"]
        for count, more in enumerate((*options, *options), 1):
            result = call(main, "sweep", *common, *more)
            assert result.exit_code == 0, result.output
            assert ("1 of 1 are in" in result.output) == (count > 4)
        found = [json.loads(line) for line in (run / "sweep" / "sweep.jsonl").read_text().splitlines()]
        images = generated(average(run, 0.08), range(10), class_idx=range(5))
        expected = value(ref, images)
        assert [x["metric"] for x in found] == ["frechet-small", MINE, MINE, "frechet-small"]
        for x in found[1:]:
            assert x["value"] == pytest.approx(expected[x["metric"]], rel=1e-3)
        assert found[2]["ref"] == edm2.files.sha256(ref)[:16] and found[1]["data"] == found[0]["data"]
        assert found[1]["features"] == found[2]["features"] == edm2.files.sha256(user_features.__file__)[:16]

    def test_latents(self, data, tmp_path):
        """By a VAE that is given."""
        vae, large = save_tiny(tmp_path / "vae"), noise(tmp_path / "large.zip", size=32)
        (tmp_path / "run").mkdir()
        name = tmp_path / "run" / "network-snapshot-0000001.000-0.050.safetensors"
        edm2.save_snapshot(name, tiny_net(img_channels=4), encoder=LatentEncoder(), meta={"nimg": 1000, "std": 0.05})
        options = f"--data={large}", f"--metric={MINE}", "--std=0.05", "--seeds=0-3", "--steps=1", f"--vae={vae}"
        result = call(main, "sweep", tmp_path / "run", *options)
        assert result.exit_code == 0, result.output
        (found,) = [json.loads(line) for line in (tmp_path / "run" / "sweep" / "sweep.jsonl").read_text().splitlines()]
        assert found["vae"] == edm2.files.sha256(vae / "diffusion_pytorch_model.safetensors")[:16] and found["value"] > 0
