"""From seeds to images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kernels
from edm2.chunks import InChunks
from edm2.errors import UserError
from edm2.folding import fold
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, RGBEncoder
from edm2.network import Precond
from edm2.sampler import edm_sampler


@dataclass
class Batch:
    """Some of the samples, in the order of their seeds."""

    seeds: list[int]
    labels: Tensor | None  # float `[N, label_dim]`; None for an unconditional network
    latents: Tensor  # what the network made, fp32 `[N, C, H, W]`
    images: np.ndarray | None  # uint8 `[N, H, W, C]`; None where a decoder is needed that this package lacks


class SeedGenerators:
    """One random generator per image, so that a sample depends on its seed alone and not on its batch."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self.device = device
        self.generators = [torch.Generator(device).manual_seed(seed % 2**32) for seed in seeds]

    def randn(self, *shape: int) -> Tensor:
        """`[N, *shape]` standard normal."""
        return torch.stack([torch.randn(shape, generator=g, device=self.device) for g in self.generators])

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(*x.shape[1:]).to(x.dtype)

    def randint(self, high: int) -> Tensor:
        """int64 `[N]` in 0 … high−1."""
        draws = [torch.randint(high, (), generator=g, device=self.device) for g in self.generators]
        return torch.stack(draws)


def generate_images(
    net: Precond,
    seeds: Sequence[int],
    gnet: nn.Module | None = None,
    class_idx: int | Sequence[int] | None = None,
    encoder: Encoder | None = None,
    max_batch_size: int = 32,
    fast: bool = False,
    **sampler_kwargs: Any,
) -> Iterator[Batch]:
    """Sample one image per seed, in batches, on the network's device.

    The same seed gives the same bits whatever the batch it is in, on one kind of GPU or on one CPU with a given number of
    threads; `fast` lifts that where it costs time. (On a GPU in fp16 and bf16: in fp32 cuDNN convolves, and bits may differ.)
    Networks that are not folded yet are, for the length of the call.
    class_idx: the class of all images, or classes to take in turn; None draws each image's class from its own seed.
    `encoder` turns latents into pixels (default: RGB); `sampler_kwargs` go to `edm_sampler`. UserError for a class
    that the network does not know.
    """
    encoder = encoder or RGBEncoder()
    classes = _check_classes(net, class_idx)
    net, gnet = _folded(net, gnet)
    device = net.device
    chunks = device.type == "cpu" and not fast
    denoiser, guide = (InChunks(x) if x is not None and chunks else x for x in (net, gnet))
    for start in range(0, len(seeds), max_batch_size):
        part = [int(seed) for seed in seeds[start : start + max_batch_size]]
        random = SeedGenerators(part, device)
        noise = random.randn(net.img_channels, net.img_resolution, net.img_resolution)
        labels = _labels(net, classes, range(start, start + len(part)), random)
        with kernels.batch_invariance(not fast):
            latents = edm_sampler(denoiser, noise, labels, guide, randn_like=random.randn_like, **sampler_kwargs)
        images = encoder.decode(latents).permute(0, 2, 3, 1).cpu().numpy() if encoder.makes_pixels else None
        yield Batch(part, labels, latents, images)


def _folded(net: Precond, gnet: nn.Module | None) -> tuple[nn.Module, nn.Module | None]:
    """Both folded, once where they are one; what is no plain `Precond` stays as it is."""
    folded = fold(net) if type(net) is Precond and net.folded is None else net
    inner = gnet.net if isinstance(gnet, Unlabelled) else gnet
    if inner is net:
        inner = folded
    elif type(inner) is Precond and inner.folded is None:
        inner = fold(inner)
    return folded, Unlabelled(inner) if isinstance(gnet, Unlabelled) else inner


def _check_classes(net: Precond, class_idx: int | Sequence[int] | None) -> list[int] | None:
    if class_idx is None:
        return None
    classes = np.ravel(class_idx).astype(int).tolist()
    if not net.label_dim:
        raise UserError("the network is unconditional: it takes no class")
    unknown = [c for c in classes if not 0 <= c < net.label_dim]
    if unknown:
        raise UserError(f"class {unknown[0]} is out of range: the network knows 0 to {net.label_dim - 1}")
    return classes


def _labels(net: Precond, classes: list[int] | None, numbers: range, random: SeedGenerators) -> Tensor | None:
    if not net.label_dim:
        return None
    if classes is None:
        indices = random.randint(net.label_dim)
    else:
        indices = torch.tensor([classes[i % len(classes)] for i in numbers], device=random.device)
    return torch.nn.functional.one_hot(indices, net.label_dim).float()
