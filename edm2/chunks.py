"""The same image from any batch on a CPU, whose library divides its sums by the number of images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXELS = 4096  # of a chunk, or one image: of small images as many as share well what any evaluation costs (digits: 64)


class InChunks(nn.Module):
    """Evaluates a network on a fixed number of images at a time, the last ones beside ones, called like an `edm2.Precond`.

    At a given number of threads each image then has the same bits whatever the batch it is in: a test shows it.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, sigma: Tensor | float, class_labels: Tensor | None = None) -> Tensor:
        size = max(1, PIXELS // (x.shape[2] * x.shape[3]))
        sigma = sigma if isinstance(sigma, Tensor) else torch.full([len(x)], sigma)
        given = [x, sigma.reshape(-1).expand(len(x))] + ([] if class_labels is None else [class_labels])
        return torch.cat([self._evaluate(part, size) for part in zip(*(each.split(size) for each in given))])

    def _evaluate(self, part: tuple[Tensor, ...], size: int) -> Tensor:
        n = len(part[0])
        filled = [F.pad(each, (0, 0) * (each.ndim - 1) + (0, size - n), value=1) for each in part] if n < size else part
        return self.net(*filled)[:n]
