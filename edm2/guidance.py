"""Guides other than a network of their own."""

from torch import Tensor, nn


class Unlabelled(nn.Module):
    """A network that is given no labels: the guide of a network that was trained with label dropout, itself.

    Called like an `edm2.Precond`.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, sigma: Tensor | float, class_labels: Tensor | None = None) -> Tensor:
        return self.net(x, sigma)
