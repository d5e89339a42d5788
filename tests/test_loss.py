import pytest
import torch

import edm2
from tests.conftest import tiny_net


class Denoiser(torch.nn.Module):
    def __init__(self, output, logvar):
        super().__init__()
        self.output, self.u = output, logvar

    def forward(self, x, sigma, labels=None, return_logvar=False):
        assert return_logvar
        return self.output, torch.full((x.shape[0], 1, 1, 1), self.u)


@pytest.mark.parametrize(("sigma", "weight"), [(0.1, 104), (0.5, 8), (1.0, 5), (80.0, 4.00015625)])
def test_published_weights(sigma, weight):
    y = torch.zeros(1, 1, 2, 2)
    loss = edm2.denoising_loss(Denoiser(y + 0.5, logvar=0.7), y, torch.tensor([sigma]), y)
    torch.testing.assert_close(loss, torch.full_like(y, weight * 0.25 / torch.tensor(0.7).exp().item() + 0.7))


def test_initial_loss_is_one():
    """With all gains 0 the network is the best linear denoiser for data of standard deviation 0.5."""
    torch.manual_seed(0)
    net = tiny_net(gains=0.0)
    with torch.no_grad():
        net.logvar_linear.weight.zero_()  # u = 0
        loss = edm2.EDM2Loss()(net, torch.randn(512, 2, 8, 8) * 0.5)
    assert loss.mean().item() == pytest.approx(1, abs=0.02)


def test_noise_levels_are_log_normal():
    torch.manual_seed(0)
    log = edm2.EDM2Loss(P_mean=-0.8, P_std=1.6).sigma(torch.randn(100_000)).log()
    assert log.mean().item() == pytest.approx(-0.8, abs=0.02) and log.std().item() == pytest.approx(1.6, abs=0.02)


def test_scale_of_the_weights_does_not_matter():
    net, y = tiny_net(), torch.randn(2, 2, 8, 8)
    loss = edm2.denoising_loss(net, y, torch.ones(2), torch.randn_like(y) * 0)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim:
                p.mul_(7)
    torch.testing.assert_close(edm2.denoising_loss(net, y, torch.ones(2), y * 0), loss, rtol=2e-3, atol=1e-3)
