"""Sampling with the conventions of diffusers, for programs that know its pipelines. Needs `pip install 'edm2-triton[vae]'`."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edm2.denoisers import choose
from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, LatentEncoder, RGBEncoder, encoder_from_config
from edm2.network import Precond
from edm2.sampler import Heun
from edm2.snapshot import load_snapshot, save_snapshot
from edm2.vae import VAEEncoder, load_vae, own_kernels_hidden
from kernels import batch_invariance

try:
    with own_kernels_hidden():
        from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput
        from diffusers.utils.torch_utils import randn_tensor
except (ImportError, RuntimeError) as e:  # diffusers' form of an ImportError further down
    raise ImportError(f"edm2.pipeline needs diffusers: pip install 'edm2-triton[vae]' ({e})") from e

NET, GUIDE, VAE, INDEX = "net.safetensors", "gnet.safetensors", "vae", "model_index.json"  # in a pipeline's folder
OUTPUT_TYPES = "pil", "np", "pt", "latent"


class EDM2Pipeline(DiffusionPipeline):
    """An EDM2 network, its guide, and for networks of latents the VAE that decodes them, as a pipeline of diffusers.

    A network that was trained with `label_dropout` guides itself where there is no `gnet`. `encoder` is the form of
    `edm2.latents` that snapshots hold (RGB without one). `fast`: see `edm2.generate_images`.
    """

    _optional_components = ["gnet", "vae"]

    def __init__(
        self,
        net: Precond,
        gnet: Precond | None = None,
        vae: AutoencoderKL | None = None,
        encoder: dict[str, Any] | None = None,
        label_dropout: float = 0.0,
        guidance_scale: float = 1.0,
        fast: bool = False,
    ):
        super().__init__()
        self.register_modules(net=net, gnet=gnet, vae=vae)
        self.register_to_config(encoder=encoder, label_dropout=label_dropout, guidance_scale=guidance_scale, fast=fast)
        self._denoiser = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, torch_dtype: torch.dtype | None = None, vae: str | Path | None = None, fast: bool = False
    ) -> "EDM2Pipeline":
        """From a network snapshot, or a folder as `save_pretrained` writes it. UserError if it is none.

        torch_dtype: what the networks compute in; by default fp16 on a GPU and fp32 on a CPU. `vae`: a folder, or a name on
        huggingface.co, in the place of the folder's; without either, latents are decoded by that which the snapshot names.
        """
        folder = Path(path)
        alone = folder.is_file()
        snapshot = load_snapshot(folder if alone else folder / NET)
        gnet = None if alone or not (folder / GUIDE).exists() else load_snapshot(folder / GUIDE).net
        options = {} if alone else _read_index(folder / INDEX)
        encoder, config = None, None if snapshot.encoder is None else snapshot.encoder.config()
        if isinstance(snapshot.encoder, LatentEncoder):
            own = None if alone or not (folder / VAE).exists() else folder / VAE
            encoder = load_vae(snapshot.encoder, vae or own)
        label_dropout = snapshot.meta.get("label_dropout") or 0.0
        pipe = cls(snapshot.net, gnet, encoder and encoder.vae, config, label_dropout, fast=fast, **options)
        return pipe if torch_dtype is None else pipe.to(torch_dtype)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """A folder for `from_pretrained`. The networks' parameters are stored in `dtype`."""
        folder, encoder = make_folder(path), self._encoder()
        save_snapshot(folder / NET, self.net, encoder=encoder, meta={"label_dropout": self.config.label_dropout}, dtype=dtype)
        if self.gnet is not None:
            save_snapshot(folder / GUIDE, self.gnet, encoder=encoder, dtype=dtype)
        if self.vae is not None:
            self.vae.save_pretrained(folder / VAE)
        with replacing(folder / INDEX) as temporary:
            index = {"_class_name": type(self).__name__, "guidance_scale": self.config.guidance_scale}
            temporary.write_text(json.dumps(index, indent=2) + "\n")

    def to(self, *where: torch.device | str | int | torch.dtype, device: Any = None, dtype: torch.dtype | None = None) -> "EDM2Pipeline":
        """To a device; a type is what the networks compute in from then on: their parameters stay as they are."""
        for each in where:
            device, dtype = (device, each) if isinstance(each, torch.dtype) else (each, dtype)
        for net in (self.net, self.gnet):
            if dtype is not None and net is not None:
                net.dtype = dtype
        self._denoiser = None
        return self if device is None else super().to(device)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | Sequence[int] | Tensor | None = None,
        num_inference_steps: int = 32,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        guidance_interval: tuple[float, float] = (0, math.inf),
        batch_size: int = 1,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[["EDM2Pipeline", int, float, dict[str, Tensor]], Any] | None = None,
        **heun_kwargs: Any,
    ) -> ImagePipelineOutput | tuple:
        """One image for each of `class_labels`; of an unconditional network `batch_size`.

        guidance_scale: w of w·net + (1−w)·guide; default: the pipeline's. generator: one for all images, or one for each:
        `torch.Generator(device).manual_seed(seed)` gives the image that `edm2.generate_images` makes of the seed.
        `latents` are standard normal `[N, C, H, W]` and take the place of its draws. `heun_kwargs`: further arguments of
        `edm2.edm_sampler`, e.g. `sigma_max`, `S_churn`.
        output_type: `pil`, `np` (float `[N, H, W, C]` in 0…1), `pt` (the same as `[N, C, H, W]`) or `latent` (what the
        network made). `callback_on_step_end(pipe, step, sigma, {"latents": x})` sees each step; what it returns is ignored.
        """
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type: expected one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        labels = self._labels(class_labels)
        n, net = batch_size if labels is None else len(labels), self.net
        shape = (n, net.img_channels, net.img_resolution, net.img_resolution)
        noise = randn_tensor(shape, generator=generator, device=net.device) if latents is None else latents.to(net.device)
        if noise.shape != shape:
            raise ValueError(f"latents: expected {list(shape)}, got {list(noise.shape)}")
        heun = Heun(num_inference_steps, guidance=self._guidance(guidance_scale), guidance_interval=guidance_interval, **heun_kwargs)
        x = self._sample(heun, noise, labels, callback_on_step_end)
        images = x if output_type == "latent" else self._images(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _sample(self, heun: Heun, noise: Tensor, labels: Tensor | None, callback: Callable | None) -> Tensor:
        guide = self._guide()
        heun.check(guide)
        if self._denoiser is None:
            self._denoiser = choose(self.net, guide, self.config.fast)
        with self.progress_bar(total=heun.num_steps) as bar, batch_invariance(not self.config.fast):

            def at_step(i: int, sigma: float, x: Tensor) -> None:
                bar.update()
                if callback is not None:
                    callback(self, i, sigma, {"latents": x})

            denoise = self._denoiser.along(heun.evaluations(), labels, len(noise))
            return heun.integrate(denoise, noise, torch.float32, torch.randn_like, at_step)

    def _images(self, x: Tensor, output_type: str) -> Any:
        encoder = self._encoder()
        if isinstance(encoder, LatentEncoder):
            if self.vae is None:
                raise ValueError("the network makes latents, and the pipeline has no VAE: output_type='latent' gives them")
            encoder = VAEEncoder(encoder, self.vae, self.config.fast)
        pixels = encoder.decode(x)
        if output_type == "pt":
            return pixels.float() / 255
        images = pixels.permute(0, 2, 3, 1).cpu().float().numpy() / 255
        return images if output_type == "np" else self.numpy_to_pil(images)

    def _guide(self) -> nn.Module | None:
        return Unlabelled(self.net) if self.gnet is None and self.config.label_dropout else self.gnet

    def _guidance(self, scale: float | None) -> float:
        return self.config.guidance_scale if scale is None else scale

    def _encoder(self) -> Encoder:
        return RGBEncoder() if self.config.encoder is None else encoder_from_config(self.config.encoder)

    def _labels(self, classes: int | Sequence[int] | Tensor | None) -> Tensor | None:
        """One-hot `[N, label_dim]`."""
        known = self.net.label_dim
        if classes is None:
            if known:
                raise ValueError("class_labels: the network needs a class for each image")
            return None
        if not known:
            raise ValueError("class_labels: the network is unconditional")
        classes = torch.as_tensor(classes).reshape(-1)
        if classes.is_floating_point() or not len(classes) or not 0 <= classes.min() <= classes.max() < known:
            raise ValueError(f"class_labels: expected integers from 0 to {known - 1}, got {classes.tolist()}")
        return nn.functional.one_hot(classes.long(), known).float().to(self.net.device)


def _read_index(path: Path) -> dict[str, Any]:
    """The options in a folder's index."""
    try:
        return {"guidance_scale": float(json.loads(path.read_text())["guidance_scale"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is missing or damaged ({type(e).__name__}: {e})") from e
