"""Features of FID and FD_DINOv2: a stand-in for torch-fidelity, which needs another PyTorch, and a tiny DINOv2 of random weights."""

import hashlib
import sys
from types import ModuleType

import huggingface_hub.constants as hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from edm2 import dinov2, inception
from edm2.dinov2 import DinoFeatures, large_features
from edm2.extras import optional_imports
from edm2.inception import InceptionFeatures
from edm2.metrics import open_features
from tests.conftest import relative_error
from tests.dataset_files import fails


class Inception(nn.Module):
    """Takes and returns what torch-fidelity's does; reads weights as carelessly."""

    def __init__(self, name, features_list, feature_extractor_weights_path=None):
        super().__init__()
        assert features_list == ["2048"] and feature_extractor_weights_path is None
        self.conv = nn.Conv2d(3, 2048, 4)
        self.load_state_dict(sys.modules[MODULE].load_state_dict_from_url("url", progress=False))
        self.eval()

    def forward(self, x):
        assert x.dtype == torch.uint8 and x.shape[1] == 3
        return (self.conv(x.float() / 255).mean(dim=(2, 3)),)


MODULE = "torch_fidelity.feature_extractor_inceptionv3"


def careless(*_, **__):
    raise RuntimeError("torch-fidelity loads weights by itself")


@pytest.fixture()
def fidelity(monkeypatch):
    module = ModuleType(MODULE)
    module.FeatureExtractorInceptionV3, module.load_state_dict_from_url = Inception, careless
    monkeypatch.setitem(sys.modules, "torch_fidelity", ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture()
def weights(tmp_path, monkeypatch):
    """Their file, under the name that says how its checksum begins."""
    torch.manual_seed(0)
    return save(tmp_path, monkeypatch, nn.ModuleDict({"conv": nn.Conv2d(3, 2048, 4)}).state_dict())


def save(folder, monkeypatch, state):
    torch.save(state, folder / inception.NAME)
    monkeypatch.setattr(inception, "CHECKSUM", hashlib.sha256((folder / inception.NAME).read_bytes()).hexdigest()[:8])
    return state


def images(n: int, size: int, channels: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, size, size, channels), np.uint8)


class TestInception:
    def test_features(self, fidelity, weights, tmp_path):
        """Of RGB and of grey, which is three channels alike; in parts of what a GPU holds."""
        found, checksum = open_features("fid", networks=tmp_path)
        conv = nn.Conv2d(3, 2048, 4)
        conv.load_state_dict({name.removeprefix("conv."): x for name, x in weights.items()})
        for channels in (3, 1):
            x = images(70, 8, channels)
            y = torch.from_numpy(x.repeat(3 // channels, axis=3)).permute(0, 3, 1, 2)
            with torch.no_grad():
                expected = conv(y.float() / 255).mean(dim=(2, 3))
            actual = found(x)
            assert actual.shape == (70, 2048) and actual.dtype == np.float32 and relative_error(actual, expected) < 1e-6
        assert fidelity.load_state_dict_from_url is careless and checksum.startswith(inception.CHECKSUM)
        with fails("images of 8x8 with 4 channels; this metric takes grey and RGB"):
            found(images(1, 8, 4))

    def test_the_name_tells_the_checksum(self):
        assert inception.CHECKSUM == "6726825d"

    def test_another_file(self, fidelity, weights, tmp_path, monkeypatch):
        monkeypatch.setattr(inception, "CHECKSUM", "6726825d")
        with fails("is another file than expected: its SHA-256 begins with [0-9a-f]{8}, not 6726825d; remove it"):
            InceptionFeatures(tmp_path)

    def test_what_is_executed_when_it_is_read(self, fidelity, tmp_path, monkeypatch):
        class Evil:
            def __reduce__(self):
                return sys.exit, (3,)

        save(tmp_path, monkeypatch, Evil())
        with fails("is damaged; remove it and fetch it anew"):
            InceptionFeatures(tmp_path)

    @pytest.mark.parametrize("state", [{}, {"conv.weight": torch.zeros(3)}, [1, 2], 3])
    def test_weights_of_another_network(self, fidelity, tmp_path, monkeypatch, state):
        save(tmp_path, monkeypatch, state)
        with fails("does not fit torch-fidelity's Inception-v3"):
            InceptionFeatures(tmp_path)
        assert fidelity.load_state_dict_from_url is careless

    def test_no_network(self, fidelity, tmp_path, monkeypatch):
        """Where it can be put by hand is told."""
        monkeypatch.setattr("edm2.inception.URL", "http://127.0.0.1:9/" + inception.NAME)
        monkeypatch.setattr("edm2.download.PAUSE", 0.0)
        folder = tmp_path / "cache"
        with fails(f"fid needs weights: http://127.0.0.1:9/{inception.NAME} cannot be downloaded.*put that file into {folder} yourself"):
            InceptionFeatures(folder)

    def test_without_torch_fidelity(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, MODULE, None)
        monkeypatch.setitem(sys.modules, "torch_fidelity", None)
        with fails(r"fid needs torch-fidelity \(.*\): pip install 'edm2-triton\[metrics\]'"):
            InceptionFeatures(tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two layers, 37×37 positions, as the published ones have."""
    kind = dinov2._kind()
    with optional_imports("the test needs transformers", "test"):
        from transformers import Dinov2Config
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    model = kind(Dinov2Config(**size, patch_size=14, image_size=518))
    with torch.no_grad():
        model.embeddings.position_embeddings.normal_()
        model.embeddings.cls_token.normal_()
    folder = tmp_path_factory.mktemp("dino") / "dinov2-large"
    model.save_pretrained(folder)
    return folder


@pytest.fixture()
def copy(tiny, tmp_path):
    """To be spoilt."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def attention(x, w, name):
    """Of one layer with two heads."""
    q, k, v = (F.linear(x, w[f"{name}.attention.{part}.weight"], w[f"{name}.attention.{part}.bias"]).unflatten(2, (2, 8)).transpose(1, 2)
               for part in ("query", "key", "value"))  # fmt: skip
    y = ((q @ k.transpose(2, 3) / 8**0.5).softmax(dim=3) @ v).transpose(1, 2).flatten(2)
    return F.linear(y, w[f"{name}.output.dense.weight"], w[f"{name}.output.dense.bias"])


def vision_transformer(x, w, positions):
    """Standardised pixels `[N, 3, 224, 224]` → the class token, as the authors describe it."""
    x = F.conv2d(x, w["embeddings.patch_embeddings.projection.weight"], w["embeddings.patch_embeddings.projection.bias"], stride=14)
    x = torch.cat([w["embeddings.cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1) + positions
    for i in range(2):
        layer = {name.removeprefix(f"encoder.layer.{i}."): value for name, value in w.items() if name.startswith(f"encoder.layer.{i}.")}

        def norm(x, name, layer=layer):
            return F.layer_norm(x, (16,), layer[f"{name}.weight"], layer[f"{name}.bias"], eps=1e-6)

        x = x + layer["layer_scale1.lambda1"] * attention(norm(x, "norm1"), layer, "attention")
        y = F.gelu(F.linear(norm(x, "norm2"), layer["mlp.fc1.weight"], layer["mlp.fc1.bias"]))
        x = x + layer["layer_scale2.lambda1"] * F.linear(y, layer["mlp.fc2.weight"], layer["mlp.fc2.bias"])
    return F.layer_norm(x, (16,), w["layernorm.weight"], w["layernorm.bias"], eps=1e-6)[:, 0]


def cubic(x: float, a: float = -0.75) -> float:
    x = abs(x)
    return (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def interpolation(size: int = 37, out: int = 16, scale: float = 16.1 / 37) -> torch.Tensor:
    """Along one side, `[out, size]`: cubic, positions (i + ½)/scale − ½, the border repeated."""
    matrix = torch.zeros(out, size, dtype=torch.float64)
    for i in range(out):
        at = (i + 0.5) / scale - 0.5
        first = int(np.floor(at)) - 1
        for j in range(first, first + 4):
            matrix[i, min(max(j, 0), size - 1)] += cubic(at - j)
    return matrix


def resize(x: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(x.astype(np.float32)).resize((224, 224), Image.Resampling.BICUBIC))


class TestDino:
    def test_positions(self, tiny):
        """By the authors' formula, spelled out; the class token's stays. Without the offset they would be others."""
        weights = load_file(tiny / "model.safetensors")["embeddings.position_embeddings"].double()
        found = DinoFeatures(tiny).net.embeddings.position_embeddings.detach()
        grid = weights[0, 1:].unflatten(0, (37, 37))
        expected, without = (
            torch.einsum("ai,bj,ijd->abd", m, m, grid).flatten(0, 1) for m in (interpolation(), interpolation(scale=16 / 37))
        )
        assert found.shape == (1, 257, 16) and torch.equal(found[0, 0], weights[0, 0].float())
        assert relative_error(found[0, 1:], expected) < 1e-5 < 0.05 < relative_error(without, expected)

    @pytest.mark.parametrize(("size", "channels"), [(32, 3), (300, 1)])
    def test_features(self, tiny, size, channels):
        """Against the network written out; pixels resized as Pillow resizes, in floats."""
        found, x = DinoFeatures(tiny), images(2, size, channels)
        resized = np.stack([[resize(each[..., c % channels]) for c in range(3)] for each in x])
        mean, std = (np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        given = found.as_input(torch.from_numpy(x.repeat(3 // channels, axis=3)).permute(0, 3, 1, 2))
        assert relative_error(given, (resized / 255 - mean) / std) < 1e-5
        weights = load_file(tiny / "model.safetensors")
        with torch.no_grad():
            expected = vision_transformer(given, weights, found.net.embeddings.position_embeddings)
        actual = found(x)
        assert actual.shape == (2, 16) and actual.dtype == np.float32 and relative_error(actual, expected) < 1e-5

    def test_only_the_large_one_is_the_metric(self, tiny):
        with fails("dinov2-large is no ViT-L/14: its hidden_size is 16, not 1024"):
            large_features(tiny.parent)

    def test_positions_that_fit(self, tiny):
        found = DinoFeatures(tiny)
        before = found.net.embeddings.position_embeddings
        dinov2.resize_positions(found.net)
        assert torch.equal(found.net.embeddings.position_embeddings, before)

    def test_no_network(self, tmp_path, monkeypatch):
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
        words = f"put its config.json and model.safetensors into {tmp_path}/dinov2-large yourself"
        with fails(f"fd_dinov2 needs facebook/dinov2-large, which cannot be downloaded.*{words}"):
            open_features("fd_dinov2", networks=tmp_path)

    def test_files_that_are_none(self, copy):
        whole = (copy / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(whole[:-10])
        with fails("the DINOv2 in .* cannot be read"):
            DinoFeatures(copy)
        (copy / "whole").write_bytes(whole)
        tensors = load_file(copy / "whole")
        del tensors["layernorm.bias"]
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        with fails("cannot be read .it has no layernorm.bias"):
            DinoFeatures(copy)
        (copy / "config.json").write_text("{")
        with fails("cannot be read"):
            DinoFeatures(copy)
        (copy / "model.safetensors").unlink()
        with fails("holds no DINOv2: it has no model.safetensors"):
            DinoFeatures(copy)

    def test_without_transformers(self, tiny, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with fails(r"fd_dinov2 needs transformers \(.*\): pip install 'edm2-triton\[metrics\]'"):
            DinoFeatures(tiny)
