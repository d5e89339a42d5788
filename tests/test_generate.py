"""Seeds to images."""

import numpy as np
import pytest
import torch

import edm2
from edm2.latents import LatentEncoder
from tests.conftest import relative_error, tiny_net


def generate(net=None, seeds=range(5), **kwargs):
    batches = list(edm2.generate_images(net or tiny_net(), seeds, num_steps=2, **kwargs))
    seeds = [seed for batch in batches for seed in batch.seeds]
    return seeds, torch.cat([batch.latents for batch in batches]), batches


def test_batches():
    seeds, latents, batches = generate(max_batch_size=2)
    assert seeds == [0, 1, 2, 3, 4] and latents.shape == (5, 2, 8, 8)
    assert [len(batch.seeds) for batch in batches] == [2, 2, 1]
    assert all(b.images.dtype == np.uint8 and b.images.shape == (len(b.seeds), 8, 8, 2) for b in batches)


@pytest.mark.parametrize("churn", [0, 1])
def test_an_image_depends_on_its_seed_alone(churn):
    _, latents, _ = generate(max_batch_size=2, S_churn=churn)
    _, others, _ = generate(seeds=[4, 2, 0], max_batch_size=3, S_churn=churn)
    assert relative_error(others, latents[[4, 2, 0]]) < 1e-5


def test_noise_comes_first_then_the_class():
    """The order of draws of the official release, with the seed taken modulo 2³²."""
    net = tiny_net()
    random = torch.Generator().manual_seed(7)
    noise = torch.randn(2, 8, 8, generator=random)
    label = torch.nn.functional.one_hot(torch.randint(5, (), generator=random), 5).float()
    expected = edm2.edm_sampler(net, noise[None], label[None], num_steps=2)
    for seed in (7, 7 + 2**32):
        _, latents, batches = generate(net, [seed])
        torch.testing.assert_close(latents, expected)
        torch.testing.assert_close(batches[0].labels, label[None])


def test_classes():
    labels = [batch.labels.argmax(1).tolist() for batch in generate(class_idx=3)[2]]
    assert labels == [[3] * 5]
    labels = sum((batch.labels.argmax(1).tolist() for batch in generate(class_idx=[0, 4], max_batch_size=3)[2]), [])
    assert labels == [0, 4, 0, 4, 0]
    assert generate(tiny_net(0))[2][0].labels is None
    assert generate(seeds=torch.tensor([3]), class_idx=np.int64(2))[2][0].labels.argmax().item() == 2


@pytest.mark.parametrize("class_idx", [5, -1, [0, 7]])
def test_class_out_of_range(class_idx):
    with pytest.raises(edm2.UserError, match="out of range: the network knows 0 to 4"):
        generate(class_idx=class_idx)


def test_class_of_an_unconditional_network():
    with pytest.raises(edm2.UserError, match="unconditional"):
        generate(tiny_net(0), class_idx=1)


def test_latents_have_no_pixels():
    assert generate(encoder=LatentEncoder())[2][0].images is None
