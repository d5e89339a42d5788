"""What evaluates networks along a trajectory: modulations made at once, guides, chunks, and CUDA graphs.

Without a GPU graphs are stood in for by `make_fx`, which like a capture keeps tensor operations and freezes all else.
"""

import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import edm2
import kernels
from edm2 import denoisers, graphs
from edm2.denoisers import Chunked, Folded, Plain, choose
from edm2.network import UNet
from edm2.sampler import Heun, noise_levels
from tests.conftest import relative_error, tiny_net
from tests.tolerances import SAMPLER

LEVELS = [40.0, 0.02]


def traced(function, inputs, memory) -> graphs.Graph:
    """A capture without a GPU: its output is at one place, and nothing but the inputs can change it."""
    own = [x.clone() for x in inputs]
    module, output = make_fx(lambda *inputs: function(*inputs))(*own), function(*own).clone()
    return graphs.Graph(own, output, lambda: output.copy_(module(*own)))


@pytest.fixture(params=["plainly", "traced", pytest.param("captured", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> torch.device:
    """Where a `Folded` evaluates, and how."""
    if request.param == "traced":
        monkeypatch.setattr(graphs, "captures", lambda x: True)
        monkeypatch.setattr(graphs, "capture", traced)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return torch.device("cuda" if request.param == "captured" else "cpu")


def guides(net: edm2.Precond) -> dict[str, torch.nn.Module]:
    return {
        "none": None,
        "another": tiny_net(gains=0.2).to(net.device),
        "unconditional": tiny_net(0).to(net.device),
        "itself": edm2.Unlabelled(net),
        "another without labels": edm2.Unlabelled(tiny_net(gains=0.2).to(net.device)),
    }


def batch(n: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, classes = torch.randn(n, 2, 8, 8, generator=generator), torch.randint(5, [n], generator=generator)
    return x.to(device), torch.nn.functional.one_hot(classes, 5).float().to(device)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in guides(tiny_net())), ("another", torch.float64)], ids=str)
@torch.no_grad()
def test_folded_evaluates_like_the_networks(name, dtype, device):
    """At every level, for one batch of labels after another, of one size after another, at any strength of guidance."""
    net = tiny_net(dtype=torch.float32).to(device)
    guide = guides(net)[name]
    plain, folded = Plain(net, guide), choose(net, guide, fast=True)
    assert type(folded) is Folded
    evaluations = [(sigma, guide is not None) for sigma in LEVELS]
    for seed, n in enumerate((3, 3, 2, 3)):
        x, labels = batch(n, device, seed)
        expected, actual = (denoiser.along(evaluations, labels, n) for denoiser in (plain, folded))
        for sigma in LEVELS:
            for guidance in (None,) if guide is None else (None, 2.0, 0.3):
                D = actual(sigma * x.to(dtype), sigma, guidance)
                assert D.dtype == dtype
                assert relative_error(D, expected(sigma * x.to(dtype), sigma, guidance)) < SAMPLER


@torch.no_grad()
def test_captured_once_for_each_size_and_way(device, monkeypatch):
    """And again where the kernels divide their sums otherwise."""
    captured = []
    capture = graphs.capture
    monkeypatch.setattr(
        graphs, "capture", lambda function, inputs, memory: captured.append(len(inputs[0])) or capture(function, inputs, memory)
    )
    net = tiny_net().to(device)
    denoiser = choose(net, tiny_net(gains=0.2).to(device), fast=True)
    for n, strength in ((3, 1), (3, 2), (3, 3), (2, 2), (3, 1)):
        x, labels = batch(n, device)
        heun = Heun(4, guidance=strength, guidance_interval=(1, 100))
        heun.integrate(denoiser.along(heun.evaluations(), labels, n), x, torch.float32, torch.randn_like)
    assert captured == ([3, 3, 2, 2] if graphs.captures(x) else [])
    with kernels.batch_invariance():
        denoiser.along([(1.0, False)], labels, 3)(x, 1.0, None)
    assert len(captured) == (5 if graphs.captures(x) else 0)


@pytest.mark.parametrize(("rows", "main", "guide"), [(2048, [32], [7]), (20, [10, 10, 10, 2], [7])])
@torch.no_grad()
def test_modulations_are_made_once_per_batch_of_labels(rows, main, guide, monkeypatch):
    """Of each level one, the guide's only where it is guided, some levels at a time; no evaluation embeds noise or labels."""
    made, embedded = {}, []
    modulation, embed = edm2.Precond.modulation, UNet.embed
    monkeypatch.setattr(denoisers, "ROWS", rows)
    monkeypatch.setattr(UNet, "embed", lambda self, *inputs: embedded.append(0) or embed(self, *inputs))

    def counted(self, sigma, labels):
        made.setdefault(self.label_dim, []).append(sigma)
        return modulation(self, sigma, labels)

    monkeypatch.setattr(edm2.Precond, "modulation", counted)
    x, labels = batch(2, torch.device("cpu"))
    denoiser = choose(tiny_net(), tiny_net(0), fast=True)
    heun = Heun(32, guidance=2, guidance_interval=(0.19, 1.61))
    heun.integrate(denoiser.along(heun.evaluations(), labels, 2), x, torch.float32, torch.randn_like)
    assert [len(sigma) // 2 for sigma in made[5]] == main and [len(sigma) // 2 for sigma in made[0]] == guide
    assert torch.cat(made[5])[::2].tolist() == pytest.approx(noise_levels(32).tolist()[:-1])
    published = [1.60857137, 1.17427065, 0.844619841, 0.597700423, 0.415431909, 0.283043997, 0.188599519]
    assert torch.cat(made[0])[::2].tolist() == pytest.approx(published)
    assert len(embedded) == len(main) + len(guide)


def test_inference_mode_comes_and_goes(device):
    """What was captured within it is replayed outside of it."""
    denoiser = choose(tiny_net().to(device), fast=True)
    x, labels = batch(2, device)
    results = []
    for inference in (True, False, True):
        with torch.inference_mode(inference), torch.no_grad():
            results.append(denoiser.along([(1.0, False)], labels, 2)(x, 1.0, None).clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_nothing_outlives_a_denoiser(device):
    """Its networks and graphs go with it, and do not wait for Python to look for cycles."""
    gc.disable()
    try:
        denoiser = choose(tiny_net().to(device), tiny_net(0).to(device), fast=True)
        x, labels = batch(2, device)
        with torch.no_grad():
            denoiser.along([(1.0, True)], labels, 2)(x, 1.0, 2.0)
        watched = weakref.ref(denoiser.net), weakref.ref(denoiser.guide)
        del denoiser
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


@torch.no_grad()
def test_chunks_are_of_one_size():
    """Whatever the batch, and each image in its place."""
    sizes = []

    class Net(torch.nn.Module):
        def forward(self, x, sigma, labels=None):
            sizes.append((len(x), None if labels is None else len(labels)))
            return x + (0 if labels is None else labels[:, :1, None, None])

    x = torch.arange(5.0).reshape(5, 1, 1, 1)
    denoiser = Chunked(Plain(Net(), None), 3)
    assert torch.equal(denoiser.along([(1.0, False)], None, 5)(x, 1.0, None), x)
    assert torch.equal(denoiser.along([(1.0, False)], 2 * x.flatten(1), 5)(x, 1.0, None), 3 * x)
    assert sizes == [(3, None)] * 2 + [(3, 3)] * 2


def test_what_is_no_network_of_this_project_is_called_plainly():
    class Other(edm2.Precond):
        pass

    other = Other(**tiny_net().config)
    assert type(choose(other, None, fast=True)) is Plain and type(choose(tiny_net(), other, fast=True)) is Plain
    assert type(choose(tiny_net(), None, fast=False)) is Chunked
