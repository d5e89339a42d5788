"""`torch.compile(fullgraph=True)` takes the network, the loss and the backward whole: every op is one node."""

import pytest
import torch

import edm2
from edm2.weights import StepWeights
from tests.conftest import relative_error, tiny_net

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(device: str, n: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, n, 2, 8, 8, generator=generator).to(device)
    return {"images": images, "sigma": torch.linspace(0.3, 3, n, device=device), "noise": noise, "labels": torch.eye(5, device=device)[:n]}


def step(loss_function, net, weights, data) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and the gradients of all parameters."""
    with weights.prepared():
        loss = loss_function(net, **data)
        loss.sum().backward()
    weights.project()
    return loss.detach(), {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_step_is_one_graph(device, dtype):
    net = tiny_net(dtype=dtype, dropout=0.0).to(device).train()
    weights, data = StepWeights(net), inputs(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch._dynamo.reset()
    compiled = torch.compile(edm2.denoising_loss, fullgraph=True, backend=backend)
    expected_loss, expected = step(edm2.denoising_loss, net, weights, data)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        loss, gradients = step(compiled, net, weights, data)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert relative_error(loss, expected_loss) < tolerance
    for name, gradient in expected.items():
        assert relative_error(gradients[name], gradient) < 10 * tolerance, name
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_is_one_graph(device):
    net, data = tiny_net().to(device).requires_grad_(False), inputs(device)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    with torch.no_grad():
        expected, actual = (call(data["noise"], data["sigma"], data["labels"]) for call in (net, compiled))
    assert relative_error(actual, expected) < (1e-6 if device == "cpu" else 2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_reach_the_raw_weights_without_preparation(device):
    """A user's own loop: loss.backward() alone."""
    net, data = tiny_net().to(device).train(), inputs(device)
    torch._dynamo.reset()
    results = []
    for call in (edm2.denoising_loss, torch.compile(edm2.denoising_loss, fullgraph=True, backend="aot_eager")):
        net.zero_grad()
        call(net, **data).sum().backward()
        results.append([p.grad.clone() for p in net.parameters()])
    for actual, expected in zip(*results):
        assert relative_error(actual, expected) < 1e-4
