"""Imports go down only."""

import ast
import re
from pathlib import Path

import pytest

from tests.command_lines import ROOT, python, without

# From the ground up: a module may import those before it.
EDM2 = """version errors extras files arguments names download pickled pickled_arrays archive pictures backends ahead
image_files dataset_zip dataset_writer conversion latent_statistics latents data inspection vae layers network weights
folding guidance graphs denoisers loss presets phema frechet distributed encoding sharding optimizer sampler summary config
diagnostics step prefetch generate held_out interruption stats calibration snapshot piecewise official published networks
reconstruction model_folder checkpoint inputs averages features references inception dinov2 metrics samples measuring sweep
info preview tensorboard trainer training pipeline""".split()


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def project_imports(path: Path) -> set[str]:
    own = ("kernels", "edm2", "bench", "tests", "train", "sample")
    return {name for name in imports(path) if name.split(".")[0] in own}


def test_kernels_know_nothing_above_them():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert all(name.split(".")[0] == "kernels" for name in project_imports(path)), path


def test_every_module_is_ranked_and_listed():
    found = {path.stem for path in (ROOT / "edm2").glob("*.py")} - {"__init__", "__main__"}
    assert found == set(EDM2)
    listed = re.findall(r"`(\w+)`", (ROOT / "edm2" / "README.md").read_text().split("|---|---|")[1])
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("module", EDM2)
def test_edm2_imports_downwards(module):
    below = EDM2[: EDM2.index(module)]
    for name in project_imports(ROOT / "edm2" / f"{module}.py"):
        top, _, rest = name.partition(".")
        assert top == "kernels" or (top == "edm2" and (not rest or rest.split(".")[0] in below)), name


def test_nothing_imports_bench_or_tests():
    files = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "edm2").rglob("*.py"), ROOT / "train.py", ROOT / "sample.py"]
    for path in files:
        assert not any(name.split(".")[0] in ("bench", "tests", "train", "sample") for name in project_imports(path)), path


def test_everything_imports_without_triton_and_the_extras():
    extras = "triton", "sklearn", "matplotlib", "diffusers", "transformers", "torch_fidelity", "scipy"
    python(without(*extras) + "import edm2, edm2.vae, kernels, train, sample, edm2.cli.main\n")


STEP = """
import torch, edm2, kernels
from edm2.weights import StepWeights
from tests.conftest import tiny_net
net = tiny_net().train()
weights, optimizer = StepWeights(net), edm2.EDM2Optimizer(net)
for step in (1, 2):
    images, noise = torch.randn(2, 3, 2, 8, 8, generator=torch.Generator().manual_seed(step))
    with weights.prepared():
        loss = edm2.denoising_loss(net, images, torch.tensor([0.3, 1.0, 3.0]), noise, torch.eye(5)[:3]).sum()
        loss.backward()
    weights.project()
    optimizer.step(1e-3, 3 * step, 3)
    optimizer.zero_grad()
averages = torch.cat([x.flatten() for x in optimizer.ema(0.1).values()])
print(kernels.coverage()["mp_silu"], loss.item(), averages.norm().item(), *[p.norm().item() for p in net.parameters()])
"""


def test_training_without_triton():
    """Two optimizer steps equal those with it."""
    (backend, *actual), (other, *expected) = (python(start + STEP).split() for start in (without("triton"), ""))
    assert (backend, other) == ("reference", "triton")
    assert list(map(float, actual)) == pytest.approx(list(map(float, expected)), rel=1e-5)


def test_tests_of_kernels_need_only_pytorch_and_pytest():
    """A machine with a GPU may have nothing else."""
    names = "adam attention bad_input compile denoisers generate linear ops prepared registration triton_network".split()
    files = [f"tests/test_{name}.py" for name in names]
    names = "PIL click einops hypothesis matplotlib psutil safetensors sklearn tqdm".split()
    start = without(*names) + "import os, pytest\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
    assert "tests collected" in python(start + f"sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *{files}]))\n")
