"""From seeds to images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kernels
from edm2.backends import to_device
from edm2.denoisers import choose
from edm2.errors import UserError
from edm2.latents import Encoder, RGBEncoder
from edm2.network import Precond
from edm2.sampler import Callback, Heun


@dataclass
class Batch:
    """Some of the samples, in the order of their seeds."""

    seeds: list[int]
    labels: Tensor | None  # float `[N, label_dim]`; None for an unconditional network
    latents: Tensor  # what the network made, fp32 `[N, C, H, W]`
    images: np.ndarray | None  # uint8 `[N, H, W, C]`; None where the encoder makes no pixels
    vae_latents: np.ndarray | None = None  # what it makes then: fp32 `[N, C, H, W]`


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


class ImageGenerator:
    """Makes images with a network, its guide and an encoder, which turns latents into pixels (default: RGB).

    Keeps between calls what is made once: folded networks, and on a GPU CUDA graphs for each size of a batch. On the
    network's device; `fast`: see `generate_images`.
    """

    def __init__(self, net: Precond, gnet: nn.Module | None = None, encoder: Encoder | None = None, fast: bool = False):
        self.encoder, self.fast, self.has_guide = encoder or RGBEncoder(), fast, gnet is not None
        self.device = net.device
        self.denoiser = choose(net, gnet, fast)
        self.net = self.denoiser.net  # folded: the one given may go

    def __call__(
        self,
        seeds: Sequence[int],
        class_idx: int | Sequence[int] | None = None,
        max_batch_size: int = 32,
        dtype: torch.dtype = torch.float32,
        callback: Callback | None = None,
        **heun_kwargs: Any,
    ) -> Iterator[Batch]:
        """See `generate_images`."""
        heun = Heun(**heun_kwargs)
        heun.check(self.has_guide)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        classes = self.check_classes(class_idx)
        starts = range(0, len(seeds), max_batch_size)
        parts = ([int(seed) for seed in seeds[start : start + max_batch_size]] for start in starts)
        batches = (self._start(part, _cycle(classes, start, len(part)), heun, dtype, callback) for start, part in zip(starts, parts))
        return (batch.finished() for batch in (_one_ahead(batches) if self.device.type == "cuda" else batches))

    def check_classes(self, class_idx: int | Sequence[int] | None) -> list[int] | None:
        """As a list; UserError for a class that the network does not know."""
        if class_idx is None:
            return None
        if not self.net.label_dim:
            raise UserError("the network is unconditional: it takes no class")
        classes = np.ravel(class_idx).tolist()
        if not classes or not all(isinstance(c, int) for c in classes):
            raise UserError(f"classes are integers, got {classes}")
        unknown = [c for c in classes if not 0 <= c < self.net.label_dim]
        if unknown:
            raise UserError(f"class {unknown[0]} is out of range: the network knows 0 to {self.net.label_dim - 1}")
        return classes

    @torch.no_grad()
    def _start(self, seeds: list[int], classes: list[int] | None, heun: Heun, dtype: torch.dtype, callback: Callback | None) -> "_Started":
        """Nothing here waits for a GPU, but where a graph is captured."""
        random = SeedGenerators(seeds, self.device)
        noise = random.randn(self.net.img_channels, self.net.img_resolution, self.net.img_resolution)
        labels = _labels(self.net, classes, random)
        with kernels.batch_invariance(not self.fast):
            denoise = self.denoiser.along(heun.evaluations(), labels, len(seeds))
            latents = heun.integrate(denoise, noise, dtype, random.randn_like, callback)
        decoded = self.encoder.decode(latents)
        makes_pixels = self.encoder.makes_pixels
        finite = latents.isfinite().flatten(1).all(dim=1)
        return _Started(seeds, labels, latents, decoded.permute(0, 2, 3, 1) if makes_pixels else decoded, makes_pixels, finite)


class _Started:
    """A batch that is on its way to the host."""

    def __init__(self, seeds: list[int], labels: Tensor | None, latents: Tensor, decoded: Tensor, makes_pixels: bool, finite: Tensor):
        self.batch, self.makes_pixels, self.arrived = Batch(seeds, labels, latents, None), makes_pixels, None
        self.decoded, self.finite = (_on_its_way(x) for x in (decoded, finite))
        if decoded.is_cuda:
            self.arrived = torch.cuda.current_stream(decoded.device).record_event()

    def finished(self) -> Batch:
        """UserError for images that are none."""
        array = self.decoded.numpy()
        if self.arrived is not None:
            self.arrived.synchronize()
            array = array.copy()  # the page-locked memory is for the next
        for seed, finite in zip(self.batch.seeds, self.finite.tolist()):
            if not finite:
                raise UserError(f"the image of seed {seed} has values that are not finite: the network is damaged, or its numbers overflow")
        self.batch.images, self.batch.vae_latents = (array, None) if self.makes_pixels else (None, array)
        return self.batch


def _on_its_way(x: Tensor) -> Tensor:
    """To the host, which does not wait for it."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) if x.is_cuda else x


def _one_ahead(batches: Iterator[_Started]) -> Iterator[_Started]:
    """Each when the next is started, so that a GPU goes on while the host takes the images; also where the next fails."""
    before = next(batches, None)
    while before is not None:
        try:
            following = next(batches, None)
        except BaseException:
            yield before
            raise
        yield before
        before = following


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
    Networks that are not folded yet are, for the length of the call; an `ImageGenerator` keeps them.
    class_idx: the class of all images, or classes to take in turn; None draws each image's class from its own seed.
    `encoder` turns latents into pixels (default: RGB; of VAE latents: `edm2.vae.load_vae`); `sampler_kwargs` are those of
    `edm_sampler`. UserError for a class that the network does not know, and for images that are not finite; ValueError for guidance
    without a guide.
    """
    return ImageGenerator(net, gnet, encoder, fast)(seeds, class_idx, max_batch_size, **sampler_kwargs)


def _cycle(classes: list[int] | None, start: int, n: int) -> list[int] | None:
    """Of classes taken in turn, those of n images from number `start` on."""
    return classes and [classes[i % len(classes)] for i in range(start, start + n)]


def _labels(net: Precond, classes: list[int] | None, random: SeedGenerators) -> Tensor | None:
    if not net.label_dim:
        return None
    indices = random.randint(net.label_dim) if classes is None else to_device(torch.tensor(classes), random.device)
    return torch.nn.functional.one_hot(indices, net.label_dim).float()
