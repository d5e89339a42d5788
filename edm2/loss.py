"""The uncertainty-weighted denoising loss (Karras et al. 2024, Eq. 13–16 and 21)."""

import torch
from torch import Tensor, nn

import kernels as ops
from edm2.network import Precond
from kernels import reference


def denoising_loss(
    net: nn.Module,
    images: Tensor,
    sigma: Tensor,
    noise: Tensor,
    labels: Tensor | None = None,
    sigma_data: float = 0.5,
) -> Tensor:
    """Per-element loss `[N, C, H, W]` for given draws: `λ(σ) / exp(u(σ)) · (D(y + n; σ) − y)² + u(σ)`.

    images y and noise n (already scaled by σ): `[N, C, H, W]`; sigma: `[N]` or `[N, 1, 1, 1]`. `net` is
    called as a `Precond` is; of another network than that, compiled or not, the loss is in plain PyTorch.
    """
    denoised, logvar = net(images + noise, sigma.reshape(-1, 1, 1, 1), labels, return_logvar=True)
    if not isinstance(getattr(net, "_orig_mod", net), Precond):  # where torch.compile keeps it
        return reference.uncertainty_loss(denoised, images, sigma, logvar, sigma_data)
    sigma, images = sigma.to(denoised).reshape(-1).expand(len(denoised)), images.to(denoised).expand_as(denoised).contiguous()
    return ops.uncertainty_loss(denoised, images, sigma, logvar.flatten(), sigma_data)


class EDM2Loss:
    """`denoising_loss` with ln σ drawn from N(P_mean, P_std²), one σ per image."""

    def __init__(self, P_mean: float = -0.4, P_std: float = 1.0, sigma_data: float = 0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def __call__(self, net: nn.Module, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Per-element loss `[N, C, H, W]`; the draws come from PyTorch's global generator."""
        sigma = self.sigma(torch.randn(images.shape[0], 1, 1, 1, device=images.device))
        return denoising_loss(net, images, sigma, torch.randn_like(images) * sigma, labels, self.sigma_data)

    def sigma(self, normal: Tensor) -> Tensor:
        """Noise levels from standard normal draws."""
        return (normal * self.P_std + self.P_mean).exp()
