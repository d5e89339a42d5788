"""What lies between a dataset and the network: pixels ↔ [−1, 1], and VAE latents ↔ standardised latents.

An encoder is saved with every snapshot (`config()`), so that a sample can be turned back into what it stands for.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from edm2.errors import UserError

# Pixel range that the Stability VAE `sd-vae-ft-mse` is fed with → means and standard deviations of ImageNet-512's latents.
RAW_STATISTICS = {
    (0, 1): ((5.81, 3.25, 0.12, -2.15), (4.17, 4.62, 3.71, 3.28)),  # official
    (-1, 1): ((1.56, -0.695, 0.483, 0.729), (5.27, 5.91, 4.21, 4.31)),  # what it was trained with: arXiv 2410.11081, G.1
}


VAE = "stabilityai/sd-vae-ft-mse"
VAE_SHA256 = "a1d993488569e928462932c8c38a0760b874d166399b14414135bd9c42df5815"  # of its weights, diffusion_pytorch_model.safetensors


@dataclass(frozen=True)
class LatentFacts:
    """What a dataset of latents tells of them, as `latents` in its `dataset.json`: the name of the VAE and the SHA-256 of its
    weights (None: not known), the range of the pixels that it was fed with, (0, 1) or (-1, 1), and the mean and standard deviation
    of each channel over the dataset. ValueError for others."""

    vae: str
    pixel_range: tuple[int, int]
    raw_mean: tuple[float, ...]
    raw_std: tuple[float, ...]
    vae_sha256: str | None = None

    def __post_init__(self):
        numbers = (*self.raw_mean, *self.raw_std)
        if not isinstance(self.vae, str) or not self.vae or tuple(self.pixel_range) not in RAW_STATISTICS:
            raise ValueError("they have no VAE, or no known range of pixels")
        if not len(self.raw_mean) == len(self.raw_std) > 0 or not all(type(x) in (int, float) and abs(x) < 1e30 for x in numbers):
            raise ValueError("their means and standard deviations are not a number for each channel")
        if min(self.raw_std) <= 0:
            raise ValueError("their standard deviations are not positive")
        if self.vae_sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.vae_sha256):
            raise ValueError("what stands for the SHA-256 of the VAE is none")

    @classmethod
    def from_json(cls, facts: Any) -> "LatentFacts":
        """ValueError for what are none."""
        try:
            return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})
        except (AttributeError, TypeError) as e:
            raise ValueError("they are no such facts") from e

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RGBEncoder:
    """uint8 pixels ↔ [−1, 1]; also serves grey images."""

    kind: ClassVar[str] = "rgb"
    draws_noise: ClassVar[bool] = False  # does `encode` need normal draws?
    makes_pixels: ClassVar[bool] = True  # does `decode` return uint8 images?

    def config(self) -> dict[str, Any]:
        """JSON form, understood by `encoder_from_config`."""
        return {"type": self.kind}

    def encode(self, x: Tensor, normal: Tensor | None = None) -> Tensor:
        """uint8 `[N, C, H, W]` → fp32 in [−1, 1]."""
        return x.float() / 127.5 - 1

    def decode(self, x: Tensor) -> Tensor:
        """The nearest uint8 pixels, as the official release rounds: x·127.5 + 128, clipped and truncated."""
        return (x.float() * 127.5 + 128).clamp(0, 255).to(torch.uint8)


class LatentEncoder:
    """Stored latent Gaussians of a VAE ↔ latents of mean 0 and standard deviation 0.5 (the affine part).

    `vae` names the VAE, `vae_sha256` is that of its weights (None: not known), and `pixel_range`, (0, 1) or (-1, 1), is what it is
    fed with: recorded here, used by `edm2.vae`.
    `raw_mean` and `raw_std` are the channel statistics of the latents, by default `RAW_STATISTICS` of that range.
    UserError for another range, ValueError for deviations that are not positive.
    """

    kind: ClassVar[str] = "vae-latents"
    draws_noise: ClassVar[bool] = True
    makes_pixels: ClassVar[bool] = False

    def __init__(
        self,
        raw_mean: Sequence[float] | None = None,
        raw_std: Sequence[float] | None = None,
        final_std: float = 0.5,
        vae: str = VAE,
        pixel_range: Sequence[int] = (0, 1),
        vae_sha256: str | None = None,
    ):
        self.vae, self.pixel_range, self.final_std, self.vae_sha256 = vae, _known_range(pixel_range), final_std, vae_sha256
        mean, std = RAW_STATISTICS[self.pixel_range]
        self.raw_mean = tuple(mean if raw_mean is None else raw_mean)
        self.raw_std = tuple(std if raw_std is None else raw_std)
        if not all(x > 0 for x in self.raw_std):
            raise ValueError(f"standard deviations of latents must be positive, got {self.raw_std}")
        scale = final_std / np.array(self.raw_std, np.float64)
        self.scale = torch.tensor(scale, dtype=torch.float32).reshape(-1, 1, 1)
        self.bias = torch.tensor(-np.array(self.raw_mean) * scale, dtype=torch.float32).reshape(-1, 1, 1)

    @classmethod
    def of(cls, facts: LatentFacts) -> "LatentEncoder":
        """Of a dataset, by its own statistics."""
        return cls(facts.raw_mean, facts.raw_std, vae=facts.vae, pixel_range=facts.pixel_range, vae_sha256=facts.vae_sha256)

    def config(self) -> dict[str, Any]:
        """JSON form, understood by `encoder_from_config`."""
        facts = {name: getattr(self, name) for name in ("raw_mean", "raw_std", "final_std", "vae", "pixel_range")}
        return {"type": self.kind, **facts} | ({} if self.vae_sha256 is None else {"vae_sha256": self.vae_sha256})

    def encode(self, x: Tensor, normal: Tensor) -> Tensor:
        """Means ⊕ standard deviations `[N, 2C, H, W]` and normal draws `[N, C, H, W]` → standardised latents."""
        mean, std = x.float().chunk(2, dim=1)
        self._move(x.device)
        return (mean + std * normal) * self.scale + self.bias

    def decode(self, x: Tensor) -> Tensor:
        """Standardised latents → latents of the VAE, fp32 `[N, C, H, W]`."""
        self._move(x.device)
        return (x.float() - self.bias) / self.scale

    def _move(self, device: torch.device) -> None:
        """Keep the factors where they are used: a copy to a GPU makes it wait."""
        if self.scale.device != device:
            self.scale, self.bias = self.scale.to(device), self.bias.to(device)


def _known_range(pixel_range: Sequence[int]) -> tuple[int, int]:
    for known in RAW_STATISTICS:
        if pixel_range in (known, list(known)):
            return known
    raise UserError(f"the pixel range {pixel_range!r} is neither (0, 1) nor (-1, 1)")


class Encoder(Protocol):
    """What is common to them, and to `edm2.vae.VAEEncoder`."""

    kind: ClassVar[str]
    draws_noise: ClassVar[bool]
    makes_pixels: ClassVar[bool]

    def config(self) -> dict[str, Any]: ...

    def encode(self, x: Tensor, normal: Tensor | None) -> Tensor: ...

    def decode(self, x: Tensor) -> Tensor: ...


def encoder_from_config(config: dict[str, Any]) -> Encoder:
    """The encoder that a snapshot names. ValueError for an unknown kind, and for statistics that are none."""
    kwargs = dict(config)
    kind = kwargs.pop("type", None)
    if kind not in (RGBEncoder.kind, LatentEncoder.kind):
        raise ValueError(f"unknown encoder {kind!r}")
    if kind == RGBEncoder.kind:
        return RGBEncoder(**kwargs)
    encoder = LatentEncoder(**kwargs)
    numbers = torch.cat([encoder.scale.flatten(), encoder.bias.flatten()])
    known = encoder.vae_sha256 is None or isinstance(encoder.vae_sha256, str)
    if not isinstance(encoder.vae, str) or not known or not numbers.isfinite().all() or not (encoder.scale > 0).all():
        raise ValueError("an encoder whose VAE is no name, or whose statistics are none")
    return encoder


def check_channels(encoder: Encoder, channels: int) -> None:
    """ValueError unless a network of so many channels can have this encoder."""
    if isinstance(encoder, LatentEncoder) and len(encoder.raw_mean) != channels:
        raise ValueError(f"its encoder is for {len(encoder.raw_mean)} channels and its network for {channels}")


STATISTICS = "published", "data"  # for `encoder_for`


def encoder_for(
    channels: int,
    dtype: np.dtype,
    pixel_range: Sequence[int] | None = None,
    facts: LatentFacts | None = None,
    statistics: str | None = None,
) -> tuple[Encoder, int]:
    """The encoder for a dataset of such arrays `[channels, H, W]`, and the number of channels that the network sees.

    `facts` is what a dataset of latents tells of itself; one that does not is taken for the official VAE's. Latents are standardised
    by the `published` statistics of ImageNet or by those of the `data`; default: published for the official VAE.
    UserError for options that the dataset contradicts.
    """
    if dtype == np.uint8:
        if pixel_range is not None and _known_range(pixel_range) != (0, 1) or statistics is not None:
            raise UserError("--pixel-range and --latent-stats are for datasets of VAE latents; this one holds pixels")
        return RGBEncoder(), channels
    if facts is None:
        if channels != 8:
            raise UserError(f"float32 arrays must be latents of 8 channels (4 means and 4 standard deviations), got {channels}")
        if statistics == "data":
            raise UserError("--latent-stats=data: this dataset does not tell its statistics; `python -m edm2 dataset encode` records them")
        return LatentEncoder(pixel_range=pixel_range or (0, 1)), 4
    if channels != 2 * len(facts.raw_mean):
        raise UserError(f"the arrays have {channels} channels, and dataset.json tells of {len(facts.raw_mean)} means and deviations")
    if pixel_range is not None and _known_range(pixel_range) != facts.pixel_range:
        ranges = *pixel_range, *facts.pixel_range
        raise UserError("--pixel-range {},{}: the dataset tells that its pixels were in [{}, {}]".format(*ranges))
    if statistics == "published" and facts.vae != VAE:
        raise UserError(f"--latent-stats=published are those of {VAE}, and these latents are of {facts.vae}")
    if facts.vae == VAE and statistics != "data":
        return LatentEncoder(pixel_range=facts.pixel_range, vae_sha256=facts.vae_sha256), channels // 2
    return LatentEncoder.of(facts), channels // 2


def differences(a: Encoder, b: Encoder) -> dict[str, str]:
    """What two encoders have unlike, for messages: of each key of `config()` both values. A checksum that one of them does not know is
    none."""
    a, b = a.config(), b.config()
    unlike = [key for key in sorted(a.keys() | b.keys()) if _plain(a.get(key)) != _plain(b.get(key))]
    if "vae_sha256" not in a.keys() & b.keys():
        unlike = [key for key in unlike if key != "vae_sha256"]
    return {key: f"{key} {_plain(a.get(key))} and {_plain(b.get(key))}" for key in unlike}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
