"""The whole network through the kernels, forward and gradients: in Triton's interpreter (TRITON_INTERPRET=1), or on a GPU."""

import pytest
import torch
from torch import Tensor

import edm2
import kernels
from bench.baseline import Baseline
from edm2.weights import StepWeights
from kernels import conv_tiles, convolve
from kernels.jit import INTERPRET
from kernels.registration import on_triton
from tests import test_network
from tests.conftest import relative_error, tiny_net
from tests.tolerances import NETWORK


@pytest.fixture()
def device(device):
    return device if on_triton(device) else pytest.skip("no kernels: TRITON_INTERPRET=1 or a CUDA device")


@pytest.fixture(autouse=True)
def no_fallbacks():
    kernels.clear_fallbacks()
    yield
    assert not kernels.fallbacks()


def gradients(net: edm2.Precond) -> dict[str, Tensor]:
    """By name; those of the gains, which are single numbers, together."""
    found = {name: p.grad for name, p in net.named_parameters() if p.ndim}
    found["gains"] = torch.stack([p.grad for p in net.parameters() if not p.ndim])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_training_step(dtype, device):
    """Every kind of block (down, skip, up, attention) with the weights prepared for the step, against the reference in
    fp32. In fp32 the library convolves, with kernels for what follows.

    Few channels: an interpreted kernel takes 10 ms for each row of a weight."""
    net = tiny_net(model_channels=8, dtype=dtype).to(device).train()
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, 2, 2, 8, 8, generator=generator).to(device)
    batch = {"images": images, "sigma": torch.tensor([0.3, 3.0], device=device), "noise": noise, "labels": torch.eye(5, device=device)[:2]}
    weights = StepWeights(net)
    with weights.prepared():
        loss = edm2.denoising_loss(net, **batch)
        loss.sum().backward()
    weights.project()
    actual = gradients(net)
    net.zero_grad()
    net.dtype = torch.float32
    expected = edm2.denoising_loss(Baseline(net), **batch)
    expected.sum().backward()
    forward, backward = NETWORK[dtype]
    assert relative_error(loss, expected) < forward
    errors = {name: relative_error(actual[name], g) for name, g in gradients(net).items()}
    assert max(errors.values()) < backward, errors


def test_evaluation(device):
    """As a user evaluates, each weight prepared where it is used."""
    net = tiny_net(model_channels=8, dtype=torch.float32).to(device)
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        actual, expected = (call(x, 0.7, return_logvar=True) for call in (net, Baseline(net)))
    for a, b in zip(actual, expected):
        assert relative_error(a, b) < NETWORK[torch.float32][0]


@pytest.mark.parametrize("parts", [1, 3])
def test_evaluation_in_half_precision(parts, device, monkeypatch):
    """Of a folded network, convolutions of 3 × 3 whole, and all in parts."""
    monkeypatch.setattr(conv_tiles, "LEAST_STEPS", 0 if parts == 3 else 10**9)
    net = tiny_net(model_channels=8, dtype=torch.float16).to(device)
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    launch, forms = convolve.launch, set()
    monkeypatch.setattr(convolve, "launch", lambda *args, **options: forms.add(options["UP"]) or launch(*args, **options))
    with torch.no_grad():
        actual = edm2.fold(net)(x, 0.7)
    assert ("part" in forms) == (parts == 3)
    net.dtype = torch.float32
    assert relative_error(actual, Baseline(net)(x, 0.7)) < NETWORK[torch.float16][0]


@pytest.mark.torture
@pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
class TestGolden(test_network.TestGolden):
    """The official implementation's values."""


@pytest.mark.torture
@pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
class TestDeterministicNetwork(test_network.TestDeterministicNetwork):
    """The published sums, those after an optimizer step included."""
