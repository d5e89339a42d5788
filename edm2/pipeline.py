"""Sampling with the conventions of diffusers, for programs that know its pipelines. Needs `pip install 'edm2-triton[vae]'`."""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edm2.denoisers import choose
from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.files import make_folder
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, LatentEncoder, RGBEncoder, encoder_from_config
from edm2.model_folder import GUIDE, INDEX, NET, VAE, write_index
from edm2.network import Precond
from edm2.sampler import Heun
from edm2.snapshot import load_snapshot, save_snapshot
from edm2.vae import VAEEncoder, load_vae
from kernels import batch_invariance

with optional_imports("edm2.pipeline needs diffusers", "vae"):
    from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput
    from diffusers.utils.torch_utils import randn_tensor

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
        licence: str | None = None,
    ):
        super().__init__()
        self.register_modules(net=net, gnet=gnet, vae=vae)
        if encoder is None:
            encoder = RGBEncoder().config() if vae is None else LatentEncoder().config()
        self.register_to_config(encoder=encoder, label_dropout=label_dropout, guidance_scale=guidance_scale, fast=fast, licence=licence)
        self._dtype: torch.dtype | None = None
        self._made: dict[str, tuple[tuple, Any]] = {}  # of the components as they were: see `_current`

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        torch_dtype: torch.dtype | None = None,
        vae: str | Path | None = None,
        fast: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> "EDM2Pipeline":
        """From a network snapshot, or a folder as `save_pretrained` writes it. UserError if it is none.

        torch_dtype (or dtype): what is computed in; by default fp16 on a GPU and fp32 on a CPU. `vae`: a folder, or a name on
        huggingface.co, in the place of the folder's; without either, latents are decoded by that which the snapshot names.
        """
        folder = Path(path)
        index = _read_index(folder) if folder.is_dir() else {"components": []}
        components = index.pop("components")
        snapshot = load_snapshot(folder / NET if folder.is_dir() else folder)
        encoder = None
        if isinstance(snapshot.encoder, LatentEncoder):
            encoder = load_vae(snapshot.encoder, vae or (folder / VAE if "vae" in components else None))
        guide = load_snapshot(folder / GUIDE) if "gnet" in components else None
        options = {**index, "label_dropout": snapshot.meta.get("label_dropout") or 0.0} | ({} if fast is None else {"fast": fast})
        options["licence"] = snapshot.meta.get("licence") or (guide and guide.meta.get("licence"))
        config = None if snapshot.encoder is None else snapshot.encoder.config()
        pipe, dtype = cls(snapshot.net, guide and guide.net, encoder and encoder.vae, config, **options), dtype or torch_dtype
        return pipe if dtype is None else pipe.to(dtype)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """A folder for `from_pretrained`. The networks' parameters are stored in `dtype`."""
        folder, encoder = make_folder(path), self._encoder()
        meta = {"licence": self.config.licence} if self.config.licence else {}
        label_dropout = {"label_dropout": self.config.label_dropout}
        save_snapshot(folder / NET, self.net, encoder=encoder, meta=meta | label_dropout, dtype=dtype)
        if self.gnet is not None:
            save_snapshot(folder / GUIDE, self.gnet, encoder=encoder, meta=meta, dtype=dtype)
        if self.vae is not None:
            self.vae.save_pretrained(folder / VAE)
        components = [name for name in ("net", "gnet", "vae") if getattr(self, name) is not None]
        write_index(folder, components, self.config.guidance_scale, self.config.fast)

    def to(self, *where: Any, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> "EDM2Pipeline":
        """To a device; a type is what is computed in from then on: parameters stay as they are."""
        for each in where:
            device, dtype = (device, each) if isinstance(each, torch.dtype) else (each, dtype)
        self._dtype = dtype or self._dtype
        for net in (self.net, self.gnet):
            if dtype is not None and net is not None:
                net.dtype = dtype
        return self if device is None else super().to(device)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in."""
        return self.net.compute_dtype(self.net.device)

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
        **heun_kwargs: float,
    ) -> ImagePipelineOutput | tuple:
        """One image for each of `class_labels`; of a single label, or an unconditional network, `batch_size`.

        guidance_scale: w of w·net + (1−w)·guide; default: the pipeline's. generator: one for all images, or one for each:
        `torch.Generator(device).manual_seed(seed)` gives the image that `edm2.generate_images` makes of the seed.
        `latents` are standard normal `[N, C, H, W]` and take the place of its draws. `heun_kwargs`: further arguments of
        `edm2.edm_sampler`, e.g. `sigma_max`, `S_churn`.
        output_type: `pil`, `np` (float `[N, H, W, C]` in 0…1), `pt` (the same as `[N, C, H, W]`) or `latent` (what the
        network made). `callback_on_step_end(pipe, step, sigma, {"latents": x})` sees each step; what it returns is ignored.
        """
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type: expected one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        labels = self._labels(class_labels, batch_size)
        n, net = batch_size if labels is None else len(labels), self.net
        shape = (n, net.img_channels, net.img_resolution, net.img_resolution)
        noise = randn_tensor(shape, generator=generator, device=net.device) if latents is None else latents.to(net.device)
        if noise.shape != shape:
            raise ValueError(f"latents: expected {list(shape)}, got {list(noise.shape)}")
        scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        heun = Heun(num_inference_steps, **heun_kwargs, guidance=scale, guidance_interval=guidance_interval)

        def randn_like(x: Tensor) -> Tensor:
            return randn_tensor(x.shape, generator=generator, device=x.device, dtype=x.dtype)

        x = self._sample(heun, noise, labels, randn_like, callback_on_step_end)
        images = x if output_type == "latent" else self._images(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _sample(self, heun: Heun, noise: Tensor, labels: Tensor | None, randn_like: Callable, callback: Callable | None) -> Tensor:
        guide = Unlabelled(self.net) if self.gnet is None and self.config.label_dropout else self.gnet
        heun.check(guide is not None)
        fast = self.config.fast
        denoiser = self._current("denoiser", (self.net, self.gnet), lambda: choose(self.net, guide, fast))
        with self.progress_bar(total=heun.num_steps) as bar, batch_invariance(not fast):

            def at_step(i: int, sigma: float, x: Tensor) -> None:
                bar.update()
                if callback is not None:
                    callback(self, i, sigma, {"latents": x})

            return heun.integrate(denoiser.along(heun.evaluations(), labels, len(noise)), noise, torch.float32, randn_like, at_step)

    def _images(self, x: Tensor, output_type: str) -> Any:
        pixels = self._decoder().decode(x)
        if output_type == "pt":
            return pixels.float() / 255
        images = pixels.permute(0, 2, 3, 1).cpu().float().numpy() / 255
        return images if output_type == "np" else self.numpy_to_pil(images)

    def _decoder(self) -> Encoder:
        encoder = self._encoder()
        if isinstance(encoder, LatentEncoder):
            if self.vae is None:
                raise ValueError("the network makes latents, and the pipeline has no VAE: output_type='latent' gives them")
            # a copy becomes another type
            return self._current("vae", (self.vae,), lambda: VAEEncoder(encoder, deepcopy(self.vae), self.config.fast, self._dtype))
        if self.net.img_channels not in (1, 3):
            raise ValueError(f"{self.net.img_channels} channels are no pixels: output_type='latent' gives them")
        return encoder

    def _encoder(self) -> Encoder:
        return encoder_from_config(self.config.encoder)

    def _current(self, name: str, components: Sequence[nn.Module | None], make: Callable[[], Any]) -> Any:
        """What is made of components, made anew when another one has taken a place, or one has changed."""
        key = self._dtype, self.config.fast, self.config.label_dropout, *map(_state, components)
        if name not in self._made or self._made[name][0] != key:
            self._made[name] = key, make()
        return self._made[name][1]

    def _labels(self, classes: int | Sequence[int] | Tensor | None, batch_size: int) -> Tensor | None:
        """One-hot `[N, label_dim]`."""
        known = self.net.label_dim
        if classes is None:
            if known:
                raise ValueError("class_labels: the network needs a class for each image")
            return None
        if not known:
            raise ValueError("class_labels: the network is unconditional")
        classes = torch.as_tensor(classes)
        classes = classes.expand(batch_size) if classes.ndim == 0 else classes.reshape(-1)
        if classes.is_floating_point() or not len(classes) or not 0 <= classes.min() <= classes.max() < known:
            raise ValueError(f"class_labels: expected integers from 0 to {known - 1}, got {classes.tolist()}")
        if batch_size not in (1, len(classes)):
            raise ValueError(f"batch_size: there are {len(classes)} class_labels, got {batch_size}")
        return nn.functional.one_hot(classes.long(), known).float().to(self.net.device)


def _state(module: nn.Module | None) -> tuple:
    """Differs between modules, and when the numbers in one are replaced or written to."""
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    return id(module), *((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)


def _read_index(folder: Path) -> dict[str, Any]:
    """What `save_pretrained` wrote besides the components."""
    path = folder / INDEX
    if not path.exists():
        files = sorted(folder.glob("*.safetensors"))
        raise UserError(f"{folder} holds no pipeline" + (f"; give one of its networks, e.g. {files[-1]}" if files else ""))
    try:
        index = json.loads(path.read_text())
        return {"components": list(index["components"]), "guidance_scale": float(index["guidance_scale"]), "fast": bool(index["fast"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged ({type(e).__name__}: {e})") from e
