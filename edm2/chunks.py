"""The same image from any batch on a CPU, whose library divides its sums by the number of images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIXELS = 2048  # of a chunk, or one image: enough for small images to share what an evaluation costs anyway


class InChunks(nn.Module):
    """Evaluates a network on a fixed number of images at a time, the last ones beside zeros, called like an `edm2.Precond`.

    At a given number of threads each image then has the same bits whatever the batch it is in: a test shows it.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, sigma: Tensor | float, class_labels: Tensor | None = None) -> Tensor:
        """sigma: one number for all."""
        size = max(1, PIXELS // (x.shape[2] * x.shape[3]))
        labels = [None] * len(x) if class_labels is None else class_labels.split(size)
        return torch.cat([self._evaluate(part, sigma, own, size) for part, own in zip(x.split(size), labels)])

    def _evaluate(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None, size: int) -> Tensor:
        missing = size - len(x)
        if missing:
            x = F.pad(x, (0, 0) * 3 + (0, missing))
            labels = None if labels is None else F.pad(labels, (0, 0, 0, missing))
        return self.net(x, sigma, labels)[: size - missing]
