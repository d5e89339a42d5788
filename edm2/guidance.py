"""Guides: which networks can be, and those other than a network of their own."""

from typing import Any

from torch import Tensor, nn

from edm2.errors import UserError


class Unlabelled(nn.Module):
    """A network that is given no labels: the guide of a network that was trained with label dropout, itself.

    Called like an `edm2.Precond`.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, sigma: Tensor | float, class_labels: Tensor | None = None) -> Tensor:
        return self.net(x, sigma)


def check_fits(net: dict[str, Any], guide: dict[str, Any], net_name: str, guide_name: str) -> None:
    """UserError if a network with the configuration `guide` cannot guide one with `net`."""
    if any(guide[key] != net[key] for key in ("img_channels", "img_resolution")):
        raise UserError(f"{guide_name} makes images of another size than {net_name}")
    if guide["label_dim"] not in (0, net["label_dim"]):
        raise UserError(f"{guide_name} knows {guide['label_dim']} classes, {net_name} {net['label_dim']}")
