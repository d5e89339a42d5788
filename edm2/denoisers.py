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
from edm2.graphs import Beside, Graphed, Memory
from edm2.guidance import Unlabelled
from edm2.network import Precond

CHUNK_PIXELS = 4096  # or one image: of small images as many as share well what any evaluation costs (digits: 64)
ROWS = 2048  # noise levels times images whose modulations are made at once: 75 MB for EDM2-S, 172 MB for XXL in fp16

Denoise = Callable[[Tensor, float, float | None], Tensor]  # x `[N, C, H, W]`, σ, guidance or None → D in x's type
Evaluations = Sequence[tuple[float, bool]]  # noise level, and whether it is guided


class Denoiser(Protocol):
    net: nn.Module

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
    """Folded networks: modulations are made beforehand; on a GPU an evaluation is a CUDA graph.

    `guide` is a folded network, or `Unlabelled` of one. One network that guides itself evaluates both halves of one batch.
    """

    def __init__(self, net: Precond, guide: Precond | Unlabelled | None, graphs: bool = True):
        self.net = net
        self.labels_guide = not isinstance(guide, Unlabelled)
        self.guide = guide if self.labels_guide else guide.net
        memory = Memory()
        functions = partial(_denoise, net), partial(_denoise_guided, net, self.guide, Beside())  # not of this object: no cycle
        self._alone, self._guided = (Graphed(function, memory) for function in functions) if graphs else functions

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


def _denoise(net: Precond, x: Tensor, sigma: Tensor, modulation: Tensor) -> Tensor:
    return net.denoise(x, sigma, modulation).to(x.dtype)


def _denoise_guided(
    net: Precond, guide: Precond, beside: Beside, x: Tensor, sigma: Tensor, modulation: Tensor, guides: Tensor, guidance: Tensor
) -> Tensor:
    if guide is net:
        D, D_guide = net.denoise(x.repeat(2, 1, 1, 1), sigma, torch.cat([modulation, guides])).chunk(2)
    else:
        D, D_guide = beside(partial(net.denoise, x, sigma, modulation), partial(guide.denoise, x, sigma, guides), x.device)
    return D_guide.to(x.dtype).lerp(D.to(x.dtype), guidance)


class Modulations:
    """Those of a network for n images, of some noise levels at a time, which are asked for in the order given here."""

    def __init__(self, net: Precond, sigmas: Iterable[float], labels: Tensor | None, n: int):
        self.net, self.labels, self.n = net, labels, n
        levels = list(dict.fromkeys(sigmas))
        self.places = {sigma: i for i, sigma in enumerate(levels)}
        self.levels = to_device(torch.tensor(levels, dtype=torch.float32), net.device)
        self.at_once = max(1, ROWS // n)
        self._part, self._table = None, None

    def at(self, sigma: float) -> tuple[Tensor, Tensor]:
        """The noise level, fp32 `[1]`, and the modulation `[N, ΣCout]`."""
        place = self.places[sigma]
        part, row = divmod(place, self.at_once)
        if part != self._part:
            self._part, self._table = part, None  # the memory of the one before is free for it
            self._table = self._make(self.levels[part * self.at_once :][: self.at_once])
        return self.levels[place : place + 1], self._table[row]

    def _make(self, levels: Tensor) -> Tensor:
        labels = None if self.labels is None else self.labels.repeat(len(levels), 1)
        return self.net.modulation(levels.repeat_interleave(self.n), labels).unflatten(0, (len(levels), self.n))


class Chunked:
    """Gives another denoiser `size` images at a time, the last ones beside ones.

    For a CPU, whose library divides its sums by the number of images: so each image has the same bits whatever the batch it
    is in, at a given number of threads. A test shows it.
    """

    def __init__(self, denoiser: Denoiser, size: int):
        self.denoiser, self.net, self.size = denoiser, denoiser.net, size

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
