"""A folded network evaluates as the network does, to the bit, and has nothing else to evaluate with."""

import pytest
import torch

import edm2
from bench.baseline import Baseline
from edm2.generate import generate_images
from edm2.snapshot import save_snapshot
from tests.conftest import relative_error, tiny_net
from tests.tolerances import NETWORK

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(net: edm2.Precond) -> tuple[torch.Tensor, ...]:
    x = torch.randn(3, net.img_channels, 8, 8, generator=torch.Generator().manual_seed(1))
    return x, torch.tensor([0.02, 0.5, 40.0]), torch.eye(5)[[0, 3, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"label_dim": 0}, {"resample_filter": (1, 3, 3, 1)}, {"clip_act": None}, {"dropout": 0.5}],
    ids=["plain", "unconditional", "filter", "no clip", "dropout"],
)
@torch.no_grad()
def test_the_same_bits(kwargs, dtype):
    net = tiny_net(**kwargs, dtype=dtype)
    before = {name: x.clone() for name, x in net.state_dict().items()}
    folded = edm2.fold(net)
    for actual, expected in zip(folded(*inputs(net), return_logvar=True), net(*inputs(net), return_logvar=True), strict=True):
        assert torch.equal(actual, expected)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items()) and net.folded is None


@torch.no_grad()
def test_as_plain_pytorch_evaluates():
    net = tiny_net()
    assert relative_error(edm2.fold(net)(*inputs(net)), Baseline(net)(*inputs(net))) < NETWORK[torch.float32][0]


def test_nothing_is_left_of_the_raw_weights():
    """No parameter, and no memory but that of the prepared weights, which may change no more."""
    net = tiny_net(model_channels=32, dtype=torch.float16)
    folded = edm2.fold(net)
    assert not list(folded.parameters()) and all(module.weight.is_meta for module in folded.modules() if hasattr(module, "weight"))
    held, raw = (sum(x.nbytes for x in y) for y in (folded.buffers(), net.parameters()))
    assert 0.4 < held / raw < 0.75
    expected = folded(*inputs(net))
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.zero_()
    assert torch.equal(folded(*inputs(net)), expected) and not expected.requires_grad


def test_it_moves_with_its_weights():
    """To another type of device, as a module does; here the one without memory."""
    folded = edm2.fold(tiny_net(dtype=torch.float32)).to("meta")
    assert folded.device.type == "meta"
    assert folded(*(x.to("meta") for x in inputs(folded))).shape == (3, 2, 8, 8)


def test_a_device_that_computes_in_another_type():
    """Folded on a CPU for fp32, it refuses to be slow on a GPU, which would take fp16."""
    folded = edm2.fold(tiny_net())
    assert folded.compute_dtype(torch.device("cuda")) == torch.float16
    folded.to("meta")
    with pytest.raises(ValueError, match="folded for torch.float32: it cannot compute in torch.float16; fold it on its device"):
        folded(*(x.to("meta") for x in inputs(folded)))


def test_for_another_type():
    net = tiny_net()
    folded = edm2.fold(net, torch.float16)
    assert relative_error(folded(*inputs(net)), net(*inputs(net))) < NETWORK[torch.float16][0]
    with pytest.raises(ValueError, match="folded for torch.float16: it cannot compute in torch.float32"):
        folded(*inputs(net), force_fp32=True)


def test_what_it_is_not_for(tmp_path):
    folded = edm2.fold(tiny_net())
    with pytest.raises(ValueError, match="folded already"):
        edm2.fold(folded)
    with pytest.raises(ValueError, match="only an edm2.Precond can be folded, not a Unlabelled"):
        edm2.fold(edm2.Unlabelled(folded))
    with pytest.raises(ValueError, match="cannot be trained"):
        folded.train()
    with pytest.raises(ValueError, match="no raw weights to save"):
        save_snapshot(tmp_path / "net.safetensors", folded)
    assert not list(tmp_path.iterdir())


def test_images_come_from_folded_networks():
    """Whether they are given folded or not, the guide too."""
    net, gnet = tiny_net(), tiny_net(gains=0.2)
    options = dict(seeds=[0, 1, 2], guidance=2, num_steps=3, class_idx=[1])
    first = next(iter(generate_images(net, gnet=gnet, **options)))
    second = next(iter(generate_images(edm2.fold(net), gnet=edm2.fold(gnet), **options)))
    assert torch.equal(first.latents, second.latents)
