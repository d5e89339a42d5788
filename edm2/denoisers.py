"""Evaluations of a network and its guide, D_w = w·D + (1−w)·D_guide (Eq. 152), for batches of labels along trajectories.

A denoiser's `along` is told what is known of a batch before its trajectory starts, and returns what evaluates it. `Plain`
takes any networks. `Folded` takes those of this project: what depends on noise levels and labels alone it computes there,
and on a GPU it replays CUDA graphs. `Chunked` gives another one fixed numbers of images.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edm2.backends import to_device
from edm2.folding import fold
from edm2.graphs import Graphed, side_by_side
from edm2.guidance import Unlabelled
from edm2.network import Precond

CHUNK_PIXELS = 4096  # or one image: of small images as many as share well what any evaluation costs (digits: 64)

Denoise = Callable[[Tensor, float, float | None], Tensor]  # x `[N, C, H, W]`, σ, guidance or None → D in x's type
Evaluations = Sequence[tuple[float, bool]]  # noise level, and whether it is guided


class Denoiser(Protocol):
    def along(self, evaluations: Evaluations, labels: Tensor | None, n: int) -> Denoise:
        """For n images with these labels `[N, label_dim]`, at noise levels among those of `evaluations`."""


class Plain:
    """Calls the networks as they are, like an `edm2.Precond`."""

    def __init__(self, net: nn.Module, guide: nn.Module | None = None):
        self.net, self.guide = net, guide

    def along(self, evaluations: Evaluations, labels: Tensor | None, n: int) -> Denoise:
        def denoise(x: Tensor, sigma: float, guidance: float | None) -> Tensor:
            D = self.net(x, sigma, labels).to(x.dtype)
            return D if guidance is None else self.guide(x, sigma, labels).to(x.dtype).lerp(D, guidance)

        return denoise


class Folded:
    """Folded networks: modulations of all noise levels are made at once; on a GPU an evaluation is a CUDA graph.

    `guide` is a folded network, or `Unlabelled` of one. One network that guides itself evaluates both halves of one batch.
    """

    def __init__(self, net: Precond, guide: Precond | Unlabelled | None, graphs: bool = True):
        self.net = net
        self.labels_guide = not isinstance(guide, Unlabelled)
        self.guide = guide if self.labels_guide else guide.net
        functions = self._denoise, self._denoise_guided
        self._alone, self._guided = map(Graphed, functions) if graphs else functions

    def along(self, evaluations: Evaluations, labels: Tensor | None, n: int) -> Denoise:
        own = Modulations(self.net, (sigma for sigma, _ in evaluations), labels, n)
        guided = [sigma for sigma, guided in evaluations if guided]
        guides = Modulations(self.guide, guided, labels if self.labels_guide else None, n) if guided else None

        def denoise(x: Tensor, sigma: float, guidance: float | None) -> Tensor:
            level, modulation = own.at(sigma)
            if guidance is None:
                return self._alone(x, level, modulation)
            return self._guided(x, level, modulation, guides.at(sigma)[1], torch.full([], guidance, dtype=x.dtype, device=x.device))

        return denoise

    def _denoise(self, x: Tensor, sigma: Tensor, modulation: Tensor) -> Tensor:
        return self.net.denoise(x, sigma, modulation).to(x.dtype)

    def _denoise_guided(self, x: Tensor, sigma: Tensor, modulation: Tensor, guides: Tensor, guidance: Tensor) -> Tensor:
        if self.guide is self.net:
            D, D_guide = self.net.denoise(x.repeat(2, 1, 1, 1), sigma, torch.cat([modulation, guides])).chunk(2)
        else:
            main, guide = (partial(net.denoise, x, sigma, m) for net, m in ((self.net, modulation), (self.guide, guides)))
            D, D_guide = side_by_side(main, guide, x.device)
        return D_guide.to(x.dtype).lerp(D.to(x.dtype), guidance)


class Modulations:
    """Those of a network at some noise levels for n images, made at once."""

    def __init__(self, net: Precond, sigmas: Iterable[float], labels: Tensor | None, n: int):
        levels = list(dict.fromkeys(sigmas))
        self.places = {sigma: i for i, sigma in enumerate(levels)}
        self.levels = to_device(torch.tensor(levels, dtype=torch.float32), net.device)
        rows = None if labels is None else labels.repeat(len(levels), 1)
        self.table = net.modulation(self.levels.repeat_interleave(n), rows).unflatten(0, (len(levels), n))

    def at(self, sigma: float) -> tuple[Tensor, Tensor]:
        """The noise level, fp32 `[1]`, and the modulation `[N, ΣCout]`."""
        place = self.places[sigma]
        return self.levels[place : place + 1], self.table[place]


class Chunked:
    """Gives another denoiser `size` images at a time, the last ones beside ones.

    For a CPU, whose library divides its sums by the number of images: so each image has the same bits whatever the batch it
    is in, at a given number of threads. A test shows it.
    """

    def __init__(self, denoiser: Denoiser, size: int):
        self.denoiser, self.size = denoiser, size

    def along(self, evaluations: Evaluations, labels: Tensor | None, n: int) -> Denoise:
        chunks = [None] * -(-n // self.size) if labels is None else self._split(labels)
        parts = [self.denoiser.along(evaluations, chunk, self.size) for chunk in chunks]

        def denoise(x: Tensor, sigma: float, guidance: float | None) -> Tensor:
            return torch.cat([part(chunk, sigma, guidance) for part, chunk in zip(parts, self._split(x))])[:n]

        return denoise

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        return F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % self.size), value=1).split(self.size)


def choose(net: nn.Module, guide: nn.Module | None = None, fast: bool = False, graphs: bool = True) -> Denoiser:
    """The best for these networks and the device that they are on. Those of this project are folded, if they are not yet.

    Without `fast` one that gives an image the same bits whatever the batch it is in, within `kernels.batch_invariance()`.
    """
    folded, guide = _fold_both(net, guide)
    inner = guide.net if isinstance(guide, Unlabelled) else guide
    ours = all(type(x) is Precond for x in (folded, inner) if x is not None)
    denoiser = Folded(folded, guide, graphs) if ours else Plain(folded, guide)
    if fast or folded.device.type != "cpu":
        return denoiser
    return Chunked(denoiser, max(1, CHUNK_PIXELS // folded.img_resolution**2))


def _fold_both(net: nn.Module, guide: nn.Module | None) -> tuple[nn.Module, nn.Module | None]:
    """Both folded, once where they are one; what is no plain `Precond` stays as it is."""
    folded = fold(net) if type(net) is Precond and net.folded is None else net
    inner = guide.net if isinstance(guide, Unlabelled) else guide
    if inner is net:
        inner = folded
    elif type(inner) is Precond and inner.folded is None:
        inner = fold(inner)
    return folded, Unlabelled(inner) if isinstance(guide, Unlabelled) else inner
