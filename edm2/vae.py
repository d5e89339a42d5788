"""Latents ↔ pixels through the VAE of diffusers, an optional dependency, which is imported when it is asked for."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.files import sha256
from edm2.latents import VAE, LatentEncoder, RGBEncoder

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

AT_ONCE = {"cuda": 8, "cpu": 1}  # images: a layer of the decoder takes 134 MB per image of 512x512 pixels in fp16
FILES = "config.json", "diffusion_pytorch_model.safetensors"


class VAEEncoder:
    """A `LatentEncoder` that makes pixels, with the VAE that its latents belong to.

    The VAE stays on its device and becomes `dtype`, by default fp16 on a GPU, fp32 elsewhere. It sees a fixed number of
    images at a time, and cuDNN chooses nothing by its time, so that an image has the same bits whatever the images beside
    it, on one kind of GPU or on a CPU with a given number of threads; `fast` lifts that. The latents are those of the VAE
    itself, without the scaling factor in its configuration. UserError for a VAE of another number of channels.
    """

    kind: ClassVar[str] = LatentEncoder.kind
    draws_noise: ClassVar[bool] = LatentEncoder.draws_noise
    makes_pixels: ClassVar[bool] = True

    def __init__(self, latents: LatentEncoder, vae: "AutoencoderKL", fast: bool = False, dtype: torch.dtype | None = None):
        channels, expected = vae.config.latent_channels, len(latents.raw_mean)
        if channels != expected:
            raise UserError(f"the VAE makes latents of {channels} channels, and these have {expected}; give their own VAE with --vae")
        self.latents, self.device, self.fast = latents, vae.device, fast
        dtype = dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        nn.Module.to(vae, dtype=dtype, memory_format=torch.channels_last)  # its own `to` warns of a dtype that harms nothing here
        self.vae = vae.eval().requires_grad_(False)
        self.sha256: str | None = None  # of the file of its weights
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)

    def config(self) -> dict[str, Any]:
        """That of the `LatentEncoder`: a snapshot names the VAE and does not hold it."""
        return self.latents.config()

    def encode(self, x: Tensor, normal: Tensor) -> Tensor:
        """Means ⊕ standard deviations `[N, 2C, h, w]` and normal draws `[N, C, h, w]` → standardised latents."""
        return self.latents.encode(x, normal)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """Standardised latents `[N, C, h, w]` → uint8 pixels `[N, 3, 8h, 8w]`, on the VAE's device."""
        return self.decode_raw(self.latents.decode(x))

    @torch.no_grad()
    def decode_raw(self, x: Tensor) -> Tensor:
        """The same of the VAE's own latents, which are not standardised."""
        return self._in_batches(self._pixels, x)

    @torch.no_grad()
    def encode_pixels(self, x: Tensor) -> Tensor:
        """uint8 `[N, 3, H, W]` → means ⊕ standard deviations of the VAE's latents, fp32 `[N, 2C, H/8, W/8]`.

        That is what a dataset of latents holds. UserError for other pixels.
        """
        if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[1] != 3 or x.shape[2] % self.factor or x.shape[3] % self.factor:
            shape = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            raise UserError(f"the VAE takes uint8 RGB images [N, 3, H, W] whose sides are multiples of {self.factor}, got {shape}")
        return self._in_batches(self._moments, x)

    def _pixels(self, x: Tensor) -> Tensor:
        y = self.vae.decode(self._as_input(x)).sample
        if self.latents.pixel_range == (-1, 1):
            return RGBEncoder().decode(y)
        return (y.float().clamp(0, 1) * 255).to(torch.uint8)

    def _moments(self, x: Tensor) -> Tensor:
        x = RGBEncoder().encode(x) if self.latents.pixel_range == (-1, 1) else x.float() / 255
        gaussian = self.vae.encode(self._as_input(x)).latent_dist
        return torch.cat([gaussian.mean.float(), gaussian.logvar.float().mul(0.5).exp()], dim=1).contiguous()

    def _as_input(self, x: Tensor) -> Tensor:
        return x.to(self.vae.dtype, memory_format=torch.channels_last)

    def _in_batches(self, evaluate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        size = AT_ONCE.get(self.device.type, 1)
        parts = x.to(self.device).split(size)
        with nullcontext() if self.fast else torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            return torch.cat([evaluate(part if self.fast else _filled(part, size))[: len(part)] for part in parts])


def _filled(part: Tensor, size: int) -> Tensor:
    """With images of zeros behind its own, `size` in all."""
    return F.pad(part, (0, 0) * 3 + (0, size - len(part)))


def load_vae(encoder: LatentEncoder, path: str | Path | None = None, device: str | torch.device = "cpu", fast: bool = False) -> VAEEncoder:
    """The encoder that also makes pixels of its latents. `path`: a folder, or a name on huggingface.co; default `encoder.vae`,
    if it is the official one: what a file names is not fetched unasked.

    UserError without diffusers, and where there is no such VAE, it cannot be downloaded, is damaged or of another kind.
    Nothing in its files is executed.
    """
    if path is None and encoder.vae != VAE:
        raise UserError(f"its latents are those of the VAE {encoder.vae[:200]!r}; give that, or a folder that holds it, with --vae")
    return _load(str(path or encoder.vae), lambda vae: encoder, device, fast)


def load_vae_to_encode(
    name: str, pixel_range: Sequence[int] = (0, 1), path: str | Path | None = None, device: str | torch.device = "cpu", fast: bool = False
) -> VAEEncoder:
    """The VAE at `path`, default at `name`, for `encode_pixels`: in fp32 on every device, since deviations of latents may be far smaller
    than fp16's steps. What standardises the latents is not known yet. Errors as `load_vae`."""

    def plain(vae: "AutoencoderKL") -> LatentEncoder:
        channels = vae.config.latent_channels
        return LatentEncoder((0.0,) * channels, (1.0,) * channels, vae=name, pixel_range=pixel_range)

    return _load(str(path or name), plain, device, fast, torch.float32)


def _load(
    path: str,
    encoder: Callable[["AutoencoderKL"], LatentEncoder],
    device: str | torch.device,
    fast: bool,
    dtype: torch.dtype | None = None,
) -> VAEEncoder:
    kind, folder = autoencoder_kl(), _folder(path)
    vae = _read(kind, folder)
    loaded = VAEEncoder(encoder(vae), vae.to(device), fast, dtype)
    loaded.sha256, expected = sha256(folder / FILES[1]), loaded.latents.vae_sha256
    if expected not in (None, loaded.sha256):
        warnings.warn(f"{folder} holds another VAE than the latents were made with: {loaded.sha256}, and not {expected}", stacklevel=3)
    return loaded


def autoencoder_kl() -> type["AutoencoderKL"]:
    """The class, from diffusers. UserError without it."""
    with optional_imports("decoding latents needs diffusers", "vae"):
        from diffusers import AutoencoderKL
    return AutoencoderKL


def _folder(path: str) -> Path:
    """Where the VAE is on this machine, after a download if it is a name."""
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise UserError(f"{path} is no folder; --vae takes a folder with {' and '.join(FILES)}, or a name on huggingface.co")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=FILES))
    except Exception as e:  # a downloader raises almost anything
        raise UserError(f"the VAE {path} cannot be downloaded ({_lines(e)[0]}); give a folder that holds it with --vae") from e


def _read(kind: type["AutoencoderKL"], folder: Path) -> "AutoencoderKL":
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} holds no VAE: it has no {missing[0]}; --vae takes a folder with {' and '.join(FILES)}")
    with _damage_named(folder):
        name = json.loads((folder / FILES[0]).read_text())["_class_name"]
    if name != kind.__name__:
        raise UserError(f"{folder} holds a {name}; --vae takes an {kind.__name__}")
    with _damage_named(folder):
        vae, info = kind.from_pretrained(folder, low_cpu_mem_usage=False, use_safetensors=True, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it has no {min(info['missing_keys'])}")
    return vae


@contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """One line for whatever is wrong with the files, and not what diffusers logs about them besides."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as e:
        raise UserError(f"the VAE in {folder} is damaged ({_lines(e)[0]}); fetch it anew") from e
    finally:
        logger.setLevel(level)


def _lines(e: Exception) -> list[str]:
    return str(e).splitlines() or [type(e).__name__]
