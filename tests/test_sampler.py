"""The sampler against the official implementation's values, published noise levels and its own rules."""

import math

import pytest
import torch

import edm2
from edm2.sampler import guided_steps, noise_levels
from tests.conftest import Golden, relative_error, tiny_net
from tests.tolerances import SAMPLER

GOLDEN = {
    "heun_8": dict(num_steps=8),
    "heun_32": dict(),
    "heun_18_float64": dict(num_steps=18, dtype=torch.float64),
    "heun_6_custom": dict(num_steps=6, sigma_min=0.01, sigma_max=40, rho=5),
    "heun_8_guided_1.7": dict(num_steps=8, guidance=1.7),
    "heun_8_guided_0.5": dict(num_steps=8, guidance=0.5),
    "churn_8": dict(num_steps=8, S_churn=6, S_min=0.05, S_max=50, S_noise=1.003),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    golden, kwargs = Golden("sampler_cond"), dict(GOLDEN[name])
    net = golden.net().eval()
    if "guidance" in kwargs:
        kwargs["gnet"] = golden.net("gconfig", "ginit/").eval()
    if "S_churn" in kwargs:
        noises = iter(golden["churn_8_noise"])
        kwargs["randn_like"] = lambda x: next(noises)
    x = edm2.edm_sampler(net, golden["noise"], golden["labels"], **kwargs)
    assert x.dtype == kwargs.get("dtype", torch.float32)
    assert relative_error(x, golden[name]) < SAMPLER


def test_published_noise_levels():
    published = """80 66.9308738 55.7362105 46.1863915 38.0748756 31.2164133 25.4453567 20.6140610 16.5913747 13.2612180
    10.5212439 8.28158222 6.46366218 4.99911135 3.82872893 2.90153018 2.17385980 1.60857137 1.17427065 .844619841
    .597700423 .415431909 .283043997 .188599519 .122565612 .0774305497 .0473636585 .0279157458 .0157574652
    .00845304820 .00426683085 .002 0"""
    assert noise_levels(32).tolist() == pytest.approx([float(s) for s in published.split()], rel=1e-8)


class Counting(torch.nn.Module):
    """A denoiser that draws towards `target` and records the noise levels at which it is called."""

    def __init__(self, target: float):
        super().__init__()
        self.target, self.sigmas = target, []

    def forward(self, x, sigma, labels=None):
        self.sigmas.append(sigma)
        return torch.full_like(x, self.target)


def test_one_step_is_one_euler_step():
    net = Counting(0.25)
    x = edm2.edm_sampler(net, torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)), num_steps=1)
    assert net.sigmas == pytest.approx([80])
    torch.testing.assert_close(x, torch.full_like(x, 0.25), rtol=0, atol=1e-5)
    real = edm2.edm_sampler(tiny_net(), torch.randn(2, 2, 8, 8), num_steps=1)
    assert real.isfinite().all()


def test_no_step_is_refused():
    with pytest.raises(ValueError, match="num_steps"):
        edm2.edm_sampler(Counting(0), torch.randn(1, 1, 4, 4), num_steps=0)


def test_number_of_evaluations():
    net, guide = Counting(0), Counting(1)
    edm2.edm_sampler(net, torch.randn(1, 1, 4, 4), gnet=guide, guidance=1)
    assert (len(net.sigmas), len(guide.sigmas)) == (63, 0)
    edm2.edm_sampler(net, torch.randn(1, 1, 4, 4), gnet=guide, guidance=2)
    assert len(guide.sigmas) == 63


def test_published_guidance_intervals():
    """EDM2-S on (0.28, 2.90], and XXL on (0.19, 1.61]: 6 of 32 steps, 12 evaluations of the guide."""
    sigmas = noise_levels(32).tolist()[:-1]
    assert [i for i, g in enumerate(guided_steps(sigmas, (0.19, 1.61))) if g] == list(range(17, 23))
    assert [i for i, g in enumerate(guided_steps(sigmas, (0.28, 2.90))) if g] == list(range(15, 22))
    assert all(guided_steps(sigmas, (0, math.inf)))
    net, guide = Counting(0), Counting(1)
    edm2.edm_sampler(net, torch.randn(1, 1, 4, 4), gnet=guide, guidance=2, guidance_interval=(0.19, 1.61))
    assert (len(net.sigmas), len(guide.sigmas)) == (63, 12)
    assert guide.sigmas[-1] == pytest.approx(0.188599519)  # the correction of the last guided step


def test_guiding_with_the_network_itself_changes_nothing():
    net, noise = tiny_net(), torch.randn(2, 2, 8, 8)
    plain = edm2.edm_sampler(net, noise, num_steps=4)
    assert relative_error(edm2.edm_sampler(net, noise, gnet=net, guidance=2.5, num_steps=4), plain) < 1e-6
    torch.testing.assert_close(edm2.edm_sampler(net, noise, gnet=tiny_net(0), guidance=1, num_steps=4), plain)


def test_unconditional_guide_ignores_the_labels():
    net, guide, noise = tiny_net(), tiny_net(label_dim=0), torch.randn(2, 2, 8, 8)
    x = edm2.edm_sampler(net, noise, torch.eye(5)[:2], gnet=guide, guidance=1.5, num_steps=2)
    assert x.isfinite().all()


def test_guidance_without_a_guide():
    with pytest.raises(ValueError, match="needs a guide"):
        edm2.edm_sampler(Counting(0), torch.randn(1, 1, 4, 4), guidance=2)


def test_callback_sees_each_step():
    seen = []
    x = edm2.edm_sampler(Counting(0.5), torch.randn(1, 1, 4, 4), num_steps=3, callback=lambda *args: seen.append(args))
    assert [i for i, _, _ in seen] == [0, 1, 2]
    assert [sigma for _, sigma, _ in seen] == pytest.approx(noise_levels(3).tolist()[1:])
    torch.testing.assert_close(seen[-1][2], x)
