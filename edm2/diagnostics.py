"""What a run tells of itself beside its loss: by noise level, by block, its gradients."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from edm2.distributed import Processes
from edm2.network import Block, Precond

EDGES = torch.linspace(math.log(0.002), math.log(80), 23, dtype=torch.float64)  # of 22 bins of ln σ; the outer ones are open


class NoiseLevels:
    """Loss and error of training images by their noise level, summed on the device between two status lines.

    Of each image the loss per element, u(σ), and, where the loss is `edm2.denoising_loss` (`weighted`), the weighted error
    λ·(D − y)², which is what exp(u) learns (Eq. 14).
    """

    def __init__(self, procs: Processes, weighted: bool = True):
        self.procs, self.weighted, self.edges = procs, weighted, EDGES[1:-1].to(procs.device, torch.float32)
        self._sums = torch.zeros(4, len(EDGES) - 1, dtype=torch.float64, device=procs.device)

    @torch.no_grad()
    def add(self, net: Precond, sigma: Tensor, loss: Tensor) -> None:
        """sigma and the images' mean loss, `[N]`."""
        log_sigma = sigma.flatten().float().log()
        u = net.logvar(log_sigma / 4).flatten()
        error = (loss - u) * u.exp() if self.weighted else torch.full_like(u, math.nan)
        rows = torch.stack([torch.ones_like(u), loss, error, u]).double()
        self._sums.index_add_(1, torch.bucketize(log_sigma, self.edges), rows)

    def take(self) -> dict[str, list[float | None]]:
        """Means over the bins since the last call, of all processes; `sigma` are the bins' middles. None where no image was."""
        images, *sums = self.procs.sum(self._sums.clone()).cpu()
        self._sums.zero_()
        means = (sum / images for sum in sums)
        middles = ((EDGES[1:] + EDGES[:-1]) / 2).exp()
        named = dict(zip(("sigma", "images", "loss", "error", "u"), (middles, images, *means)))
        return {name: [x if math.isfinite(x) else None for x in values.tolist()] for name, values in named.items()}


@torch.no_grad()
def magnitudes(net: Precond, x: Tensor, sigma: Tensor, labels: Tensor | None) -> dict[str, dict[str, float | None]]:
    """Root mean squares of every block's output for some noisy images, and of its raw weights; its embedding gain (Fig. 3).

    The network is evaluated once, as in training but for dropout, and left as it was.
    """
    blocks = {name: module for name, module in net.unet.named_modules() if isinstance(module, Block)}
    was_training = net.training
    with _outputs(blocks) as activations:
        net.eval()(x, sigma, labels)
        net.train(was_training)
    weights = {name: _rms([p for p in block.parameters() if p.ndim]) for name, block in blocks.items()}
    gains = {name: block.emb_gain for name, block in blocks.items()}
    return {"activations": _numbers(activations), "weights": _numbers(weights), "gains": _numbers(gains)}


@contextmanager
def _outputs(blocks: dict[str, Block]) -> Iterator[dict[str, Tensor]]:
    """The RMS of what each block returns first."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        return lambda _, __, y: found.update({name: _rms([y if isinstance(y, Tensor) else y[0]])})

    handles = [block.register_forward_hook(hook(name)) for name, block in blocks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _rms(tensors: list[Tensor]) -> Tensor:
    return (sum(x.float().square().sum() for x in tensors) / sum(x.numel() for x in tensors)).sqrt()


def _numbers(scalars: dict[str, Tensor]) -> dict[str, float | None]:
    """In one transfer; None where not finite."""
    values = torch.stack([x.detach().float() for x in scalars.values()]).tolist()
    return {name: x if math.isfinite(x) else None for name, x in zip(scalars, values)}


@torch.no_grad()
def gradient_norm(gradients: list[Tensor]) -> float | None:
    """The 2-norm of all together; None if it is not finite."""
    norm = float(torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt())
    return norm if math.isfinite(norm) else None

