"""Seeds to images."""

import numpy as np
import pytest
import torch

import edm2
from edm2.generate import ImageGenerator, _one_ahead
from edm2.latents import LatentEncoder
from tests.conftest import relative_error, tiny_net
from tests.tolerances import NETWORK, SAMPLER


def generate(net=None, seeds=range(5), **kwargs):
    batches = list(edm2.generate_images(net or tiny_net(), seeds, num_steps=2, **kwargs))
    seeds = [seed for batch in batches for seed in batch.seeds]
    return seeds, torch.cat([batch.latents for batch in batches]), batches


def test_batches():
    seeds, latents, batches = generate(max_batch_size=2)
    assert seeds == [0, 1, 2, 3, 4] and latents.shape == (5, 2, 8, 8)
    assert [len(batch.seeds) for batch in batches] == [2, 2, 1]
    assert all(b.images.dtype == np.uint8 and b.images.shape == (len(b.seeds), 8, 8, 2) for b in batches)


def digits_net() -> edm2.Precond:
    torch.manual_seed(0)
    net = edm2.build("digits", 8, 1, 10)
    for name, p in net.named_parameters():
        if name.endswith("gain"):
            torch.nn.init.constant_(p, 0.5)
    return net.eval()


def test_one_ahead():
    """A batch is handed out when the next one is started, and none is lost."""
    for n in range(4):
        started = []
        batches = (started.append(i) or i for i in range(n))
        assert [(batch, len(started)) for batch in _one_ahead(batches)] == [(i, min(i + 2, n)) for i in range(n)]


def test_a_generator_goes_on(device):
    """Between calls of one nothing is left over, whatever they asked for."""
    net = tiny_net().to(device)
    guide = tiny_net(0).to(device)
    again = ImageGenerator(net, guide)
    for options in (dict(num_steps=2), dict(num_steps=3, guidance=2), dict(num_steps=2, class_idx=1), dict(num_steps=2)):
        for seeds in ([1, 2, 3], [4]):
            (actual,), (expected,) = again(seeds, **options), edm2.generate_images(net, seeds, guide, **options)
            assert torch.equal(actual.latents, expected.latents)
            np.testing.assert_array_equal(actual.images, expected.images)


OPTIONS = [{}, {"S_churn": 1}, {"gnet": "unconditional", "guidance": 2}, {"dtype": torch.float64}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_image_depends_on_its_seed_alone(options, device):
    """To the bit: not on the batch, its size, its order. `fast` gives the same image."""
    net, options = digits_net().to(device), dict(options)
    if "gnet" in options:
        options["gnet"] = tiny_net(0, img_channels=1).to(device)
    options |= {"class_idx": 3}
    _, latents, _ = generate(net, range(70), max_batch_size=70, **options)
    for seeds, batch in (([4, 2, 0], 3), ([7], 1), (range(69, 60, -1), 4)):
        _, others, _ = generate(net, seeds, max_batch_size=batch, **options)
        assert torch.equal(others, latents[list(seeds)])
    _, fast, _ = generate(net, [7], fast=True, **options)
    assert relative_error(fast, latents[[7]]) < NETWORK[net.compute_dtype(net.device)][0]


@pytest.mark.parametrize("own", [True, False])
def test_networks_are_folded_once(own, monkeypatch):
    """The guide too, behind its wrapper as well; those that do more than a network of this project stay as they are."""
    folded = []
    monkeypatch.setattr("edm2.denoisers.fold", lambda net: folded.append(net) or edm2.fold(net))
    net = tiny_net()
    guide = edm2.Unlabelled(net if own else tiny_net(gains=0.2))
    _, raw, _ = generate(net, gnet=guide, guidance=2)
    assert [id(x) for x in folded] == [id(net), *[id(guide.net)] * (not own)]
    _, again, _ = generate(edm2.fold(net), gnet=edm2.Unlabelled(edm2.fold(guide.net)), guidance=2)
    assert torch.equal(raw, again) and len(folded) == 2 - own

    class Other(edm2.Precond):
        def forward(self, *args, **kwargs):
            return 0.5 * super().forward(*args, **kwargs)

    other = Other(**net.config)
    other.load_state_dict(net.state_dict())
    assert relative_error(generate(other)[1], generate(net)[1]) > 0.1 and len(folded) == 3 - own


def test_noise_comes_first_then_the_class():
    """The order of draws of the official release, with the seed taken modulo 2³²."""
    net = tiny_net()
    random = torch.Generator().manual_seed(7)
    noise = torch.randn(2, 8, 8, generator=random)
    label = torch.nn.functional.one_hot(torch.randint(5, (), generator=random), 5).float()
    expected = edm2.edm_sampler(net, noise[None], label[None], num_steps=2)
    for seed in (7, 7 + 2**32):
        _, latents, batches = generate(net, [seed], fast=True)
        assert relative_error(latents, expected) < SAMPLER
        torch.testing.assert_close(batches[0].labels, label[None])


def test_classes():
    labels = [batch.labels.argmax(1).tolist() for batch in generate(class_idx=3)[2]]
    assert labels == [[3] * 5]
    labels = sum((batch.labels.argmax(1).tolist() for batch in generate(class_idx=[0, 4], max_batch_size=3)[2]), [])
    assert labels == [0, 4, 0, 4, 0]
    assert generate(tiny_net(0))[2][0].labels is None
    assert generate(seeds=torch.tensor([3]), class_idx=np.int64(2))[2][0].labels.argmax().item() == 2


@pytest.mark.parametrize("class_idx", [[], [1.5], "1"])
def test_what_is_no_class(class_idx):
    with pytest.raises(edm2.UserError, match="classes are integers, got"):
        generate(class_idx=class_idx)


def test_no_batch_size():
    with pytest.raises(ValueError, match="max_batch_size must be at least 1, got 0"):
        generate(max_batch_size=0)


@pytest.mark.parametrize("class_idx", [5, -1, [0, 7]])
def test_class_out_of_range(class_idx):
    with pytest.raises(edm2.UserError, match="out of range: the network knows 0 to 4"):
        generate(class_idx=class_idx)


def test_class_of_an_unconditional_network():
    with pytest.raises(edm2.UserError, match="unconditional"):
        generate(tiny_net(0), class_idx=1)


def test_latents_have_no_pixels():
    (batch,) = generate(tiny_net(img_channels=4), encoder=LatentEncoder())[2]
    assert batch.images is None
    torch.testing.assert_close(LatentEncoder().encode(torch.from_numpy(batch.vae_latents).tile(1, 2, 1, 1), torch.zeros(1)), batch.latents)


def test_the_one_before_is_not_lost_when_one_fails():
    def batches():
        yield from (1, 2)
        raise ZeroDivisionError

    got = []
    with pytest.raises(ZeroDivisionError):
        for batch in _one_ahead(batches()):
            got.append(batch)
    assert got == [1, 2]


def test_images_that_are_not_finite():
    """Told, and not made black."""
    net = tiny_net()
    batches = edm2.generate_images(net, [1, 2], num_steps=2, dtype=torch.float32)
    assert next(batches).images.shape[0] == 2
    with torch.no_grad():
        net.unet.out_gain.fill_(float("nan"))
    with pytest.raises(edm2.UserError, match="the image of seed 7 has values that are not finite"):
        list(edm2.generate_images(net, [7, 8], num_steps=2))
