import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    import edm2
    from edm2.config import TrainingConfig

# Nothing more here: a machine with a GPU may have nothing else, and its tests need nothing else.

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import quicken

    quicken()

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.stem == "test_compile_gate")  # last: it keeps all cores busy
    chosen = config.getoption("-m")
    for item in items:
        if "torture" in item.keywords and "torture" not in chosen:
            item.add_marker(pytest.mark.skip(reason="takes many minutes: make torture"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def relative_error(actual, expected) -> float:
    """Relative 2-norm of the difference; NaN counts as infinitely wrong."""
    actual, expected = (np.asarray(_numpy(x), np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)
    return float("inf") if np.isnan(error) else float(error)


def _numpy(x):
    return x.detach().cpu().double().numpy() if isinstance(x, torch.Tensor) else x


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where the ops are tested, with products of fp32 in full precision."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def memory(request):
    """Where convolutions are tested below the ops; nothing but the outputs is written."""
    from kernels.jit import INTERPRET
    from tests.conv_cases import Memory

    if INTERPRET == (request.param == "cuda"):
        pytest.skip("kernels: TRITON_INTERPRET=1 without, or a CUDA device")
    with Memory(request.param) as memory:
        yield memory
    assert memory.intact()


@pytest.fixture(params=[90, 80], ids=["boxes", "pointers"])
def arch(request, memory, monkeypatch):
    """The architecture that tiles are chosen for."""
    from kernels import convolve, wgrad

    if request.param == 90:
        skip_boxes_unless_hopper(memory)
    for module in (convolve, wgrad):
        monkeypatch.setattr(module, "capability", lambda x: request.param)
    return request.param


def skip_boxes_unless_hopper(memory) -> None:
    from kernels import conv_tiles

    if memory.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if conv_tiles.kind(10 * major + minor) != "wgmma":
            pytest.skip("these tiles need the shared memory of Hopper")


class Golden:
    """A file of reference values: `g["key"]` as tensor, `g.group("init/")` as dict of tensors without the prefix."""

    def __init__(self, name: str):
        with np.load(GOLDEN / f"{name}.npz") as file:
            self.data = dict(file)

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.tensor(self.data[key])

    def get(self, key: str) -> torch.Tensor | None:
        return self[key] if key in self.data else None

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): self[key] for key in self.data if key.startswith(prefix)}

    def net(self, config: str = "config", weights: str = "init/") -> "edm2.Precond":
        import edm2

        net = edm2.Precond(**json.loads(str(self.data[config])))
        net.load_state_dict(self.group(weights))
        return net


@pytest.fixture(scope="session")
def digits_zip(tmp_path_factory):
    """The whole digits dataset."""
    from edm2.cli.dataset import load_digits
    from edm2.dataset_zip import write_zip

    path = tmp_path_factory.mktemp("digits") / "digits.zip"
    write_zip(path, *load_digits())
    return path


@pytest.fixture()
def data(tmp_path) -> Path:
    """60 RGB images of noise, 8×8, in 5 classes."""
    from tests.metrics_files import noise

    return noise(tmp_path / "data.zip")


@pytest.fixture()
def ref(tmp_path, data) -> Path:
    """Reference statistics of these images, of both metrics."""
    from tests.metrics_files import reference

    return reference(tmp_path / "ref.npz", data)


@pytest.fixture()
def hardly_trained(monkeypatch):
    """A classifier that has hardly been trained has features, too."""
    from edm2 import features

    monkeypatch.setattr(features, "STEPS", 2)


@pytest.fixture()
def no_downloads(monkeypatch):
    from edm2 import download

    def fail(*_):
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(download, "_open", fail)


@pytest.fixture()
def net(tmp_path):
    """The file of a network that makes RGB images of 8×8 pixels in 5 classes."""
    import edm2
    from edm2.latents import RGBEncoder
    from tests.command_lines import small_net

    path = tmp_path / "net.safetensors"
    edm2.save_snapshot(path, small_net(5), encoder=RGBEncoder())
    return path


@pytest.fixture()
def guide(tmp_path):
    """The file of a network without classes that can guide it."""
    import edm2
    from tests.command_lines import small_net

    path = tmp_path / "guide.safetensors"
    edm2.save_snapshot(path, small_net(0))
    return path


@pytest.fixture()
def root(tmp_path):
    """A project with nothing but a README that has a place for the tables of benchmarks, and a folder for results."""
    from bench.report import BEGIN, END

    (tmp_path / "README.md").write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    return tmp_path


@pytest.fixture()
def config(tmp_path, digits_zip) -> "TrainingConfig":
    """A run of eight steps of 16 images; the learning rate is high from the start, so that an error in it shows."""
    from edm2.config import TrainingConfig

    return TrainingConfig(
        outdir=str(tmp_path / "run"), data=str(digits_zip), preset="digits", batch=16, duration=128, status=32,
        snapshot=64, checkpoint=64, rampup_Mimg=64e-6, snapshot_dtype="fp32", samples=0,
    )  # fmt: skip


@pytest.fixture(params=["folder", "file.zip"])
def path(request, tmp_path):
    return tmp_path / request.param


@pytest.fixture()
def numbered(tmp_path):
    """A ZIP of 10 RGB images of 4 x 6 pixels (width 6) with labels i % 3."""
    from tests.dataset_files import encode, make, pixels

    names = [f"{i}.png" for i in range(10)]
    files = {name: encode(pixels(i, 4, 6, 3)) for i, name in enumerate(names)}
    return make(tmp_path / "numbered.zip", files, [[name, i % 3] for i, name in enumerate(names)])


@pytest.fixture(scope="session")
def encoded(tmp_path_factory):
    """Images, a VAE named `tiny`, and their latents in both ranges: `latents.zip` and `centred.zip`."""
    from edm2.cli.main import main
    from edm2.dataset_zip import write_zip
    from tests.command_lines import call
    from tests.dataset_files import pixels
    from tests.vae_files import save_tiny

    folder = tmp_path_factory.mktemp("encoding")
    write_zip(folder / "images.zip", [pixels(i, 16, 16, 3) for i in range(11)], [i % 3 for i in range(11)])
    save_tiny(folder / "tiny")
    for name, args in (("latents", []), ("centred", ["--pixel-range=-1,1"])):
        result = call(main, "dataset", "encode", f"{folder}/images.zip", f"{folder}/{name}.zip", f"--vae={folder}/tiny", *args)
        assert result.output.endswith(f"wrote {folder}/{name}.zip: latents of 11 images by tiny\n"), result.output
    return folder


@pytest.fixture(scope="session")
def one_thread_env():
    """Environment for processes that run side by side."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def tiny_net(label_dim: int = 5, gains: float = 0.5, img_channels: int = 2, **kwargs) -> "edm2.Precond":
    """A small network of two levels with all gains non-zero."""
    import edm2

    torch.manual_seed(0)
    kwargs = {"model_channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attn_resolutions": (4,), **kwargs}
    net = edm2.Precond(8, img_channels, label_dim, channels_per_head=8, **kwargs)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(gains)
    return net.eval()
