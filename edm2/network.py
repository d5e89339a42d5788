"""The magnitude-preserving diffusion U-Net (config G) and its preconditioning.

Parameter names and shapes are those of the official release. Inside the U-Net, activations are contiguous
`[N, H, W, C]` tensors; `Precond` takes and returns `[N, C, H, W]`. Equation numbers: Karras et al. 2024.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels as ops
from edm2.layers import MPConv, MPFourier
from kernels.reference import NO_FACTORS, Branch, cat_scales, joined_factors


class Block(nn.Module):
    """Residual block of the encoder or the decoder, optionally resampling first or attending last (Fig. 21).

    An encoder block projects and pixel-normalises its main path on entry. A decoder block with a skip of
    `skip_channels` joins it to its input by MP-Cat (`in_channels` counts both) and projects on the way out: the factors of
    MP-Cat and MP-Sum are in its weights. The gradient of its output passes the clip: whoever reads that stops it, a block at
    its input, others by `kernels.fork`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        flavor: str = "enc",
        resample_mode: str = "keep",
        resample_filter: Sequence[float] = (1, 1),
        attention: bool = False,
        channels_per_head: int = 64,
        dropout: float = 0.0,
        res_balance: float = 0.3,
        attn_balance: float = 0.3,
        concat_balance: float = 0.5,
        clip_act: float | None = 256.0,
        skip_channels: int = 0,
    ):
        super().__init__()
        self.heads = out_channels // channels_per_head if attention else 0
        if attention and (self.heads == 0 or out_channels % self.heads):
            raise ValueError(f"{out_channels} channels cannot attend in heads of {channels_per_head} or a little more")
        if skip_channels and (flavor == "enc" or in_channels == out_channels or resample_mode != "keep"):
            raise ValueError(f"skip_channels {skip_channels}: only a block of the decoder that projects, and keeps its size, takes a skip")
        self.flavor, self.resample_mode, self.resample_filter = flavor, resample_mode, tuple(resample_filter)
        self.skip_channels = skip_channels
        self.dropout, self.clip_act = dropout, clip_act
        self.res_balance, self.attn_balance, self.concat_balance = res_balance, attn_balance, concat_balance
        self.emb_gain = nn.Parameter(torch.zeros([]))
        factors1 = factors_skip = NO_FACTORS
        if skip_channels:
            factors1, factors_skip = joined_factors(in_channels - skip_channels, skip_channels, concat_balance, res_balance)
        doubles = flavor == "dec" and resample_mode == "up" and self.resample_filter == (1, 1) and in_channels == out_channels
        self.conv_res0 = MPConv(out_channels if flavor == "enc" else in_channels, out_channels, (3, 3), up=doubles)
        self.emb_linear = MPConv(emb_channels, out_channels)
        self.conv_res1 = MPConv(out_channels, out_channels, (3, 3), factors=factors1)
        projects = in_channels != out_channels
        self.conv_skip = MPConv(in_channels, out_channels, (1, 1), factors=factors_skip) if projects else None
        self.attn_qkv = MPConv(out_channels, out_channels * 3, (1, 1), heads=self.heads) if attention else None
        self.attn_proj = MPConv(out_channels, out_channels, (1, 1)) if attention else None

    def modulation(self, emb: Tensor) -> Tensor:
        """What scales each channel of each image: fp32 emb `[N, Cemb]` → `[N, Cout]`. `UNet` makes all blocks' at once."""
        return self.emb_linear(emb, gain=self.emb_gain) + 1

    @property
    def reads_activated(self) -> tuple[float | None, ...]:
        """Of a decoder block: MP-SiLU of these times x and its skip, if it has one, are what it reads as `activated`."""
        if self._goes_by_parts or self.resample_mode == "up" and not self.conv_res0.up:
            return None, None
        channels = self.conv_res0.weight.shape[1] - self.skip_channels, self.skip_channels
        return cat_scales(*channels, self.concat_balance) if self.skip_channels else (1.0, None)

    @property
    def _goes_by_parts(self) -> bool:
        filters = self.resample_mode == "up" and self.resample_filter != (1, 1)
        projects = self.flavor == "dec" and not self.skip_channels and self.conv_skip is not None
        return filters or projects or (self.training and self.dropout > 0)

    def forward(
        self,
        x: Tensor,
        m: Tensor,
        skip: Tensor | None = None,
        activated: Sequence[Tensor | None] = (None, None),
        activate: float | None = None,
        forks: bool = False,
        clip_x: float | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """x `[N, H, W, Cin − Cskip]`, modulation m `[N, Cout]`, skip `[N, H, W, Cskip]` → y `[N, H', W', Cout]`.

        With `activate` also MP-SiLU(activate·y), which the block that reads y takes in `activated`, beside the skip's. An
        encoder block that `forks` also returns x, for the decoder: `kernels.fork(x, clip_x)`.
        """
        if forks:
            return self._encode(x, m, activate, clip_x)
        given = 0 if skip is None else skip.shape[3]
        if given != self.skip_channels:
            raise ValueError(f"skip: expected {self.skip_channels} channels, got {given}")
        branch = self._branch_by_parts if self._goes_by_parts else self._branch
        clip, then = (None, None) if self.heads else (self.clip_act, activate)
        y = branch(x, m, skip, activated, clip, then)
        return self._attend(y, activate) if self.heads else y

    def _encode(self, x: Tensor, m: Tensor, activate: float | None, clip_x: float | None) -> tuple[Tensor, ...]:
        if self.conv_skip is not None or self._goes_by_parts or not (self._halves or self.resample_mode == "keep"):
            x, other = ops.fork(x, clip_x)
            y = self.forward(x, m, activate=activate)
            return (y, other) if activate is None else (*y, other)
        w0, w1 = self.conv_res0.prepare(x.dtype), self.conv_res1.prepare(x.dtype)
        clip, then = (None, None) if self.heads else (self.clip_act, activate)
        *y, other = ops.residual_branch_norm_fork(x, w0, m, w1, self.res_balance, clip, self._halves, clip_x, then)
        if not self.heads:
            return *y, other
        y = self._attend(*y, activate)
        return (y, other) if activate is None else (*y, other)

    def _branch(
        self, x: Tensor, m: Tensor, skip: Tensor | None, activated: Sequence[Tensor | None], clip: float | None, activate: float | None
    ) -> Branch:
        """MP-Sum of the main path and the residual branch, then clip."""
        w0, w1 = self.conv_res0.prepare(x.dtype), self.conv_res1.prepare(x.dtype)
        if skip is not None:
            w_skip = self.conv_skip.prepare(x.dtype)
            constants = self.concat_balance, clip, self.clip_act
            return ops.residual_branch_cat(x, skip, w0, m, w1, w_skip, *constants, *activated, activate)
        if self.conv_res0.up:
            return ops.residual_branch_up(x, w0, m, w1, self.res_balance, clip, self.clip_act, activated[0], activate)
        if self.flavor == "dec":
            x = ops.resample(x, self.resample_filter, self.resample_mode)
            s = activated[0] if self.resample_mode == "keep" else None
            return ops.residual_branch_silu(x, w0, m, w1, self.res_balance, clip, self.clip_act, s, activate)
        main = x if self._halves else self._main_path(x)
        return ops.residual_branch_norm(main, w0, m, w1, self.res_balance, clip, self._halves, activate)

    def _branch_by_parts(
        self, x: Tensor, m: Tensor, skip: Tensor | None, _: Sequence[Tensor | None], clip: float | None, activate: float | None
    ) -> Branch:
        """The same with dropout between the branch's convolutions, and for main paths of the decoder that no op takes."""
        if self.flavor == "dec":
            (x,) = ops.fork(x, self.clip_act, 1)
        if skip is not None:
            main, y = x, ops.cat_silu(x, skip, self.concat_balance)
        elif self.flavor == "dec":
            low, x = x, ops.resample(x, self.resample_filter, self.resample_mode)
            main, y = x if self.conv_skip is None else self.conv_skip(x), ops.mp_silu(low if self.conv_res0.up else x)
        else:
            main, y = ops.down_pixel_norm_silu(x) if self._halves else ops.pixel_norm_silu(self._main_path(x))
        y = (ops.conv_silu_up if self.conv_res0.up else ops.conv_silu)(y, self.conv_res0.prepare(y.dtype), m)
        y = F.dropout(y, self.dropout, self.training)
        w = self.conv_res1.prepare(y.dtype)
        if skip is None:
            y = ops.conv_sum(y, w, main, self.res_balance, clip)
        else:
            y = ops.conv_cat_sum(y, w, main, skip, self.conv_skip.prepare(y.dtype), clip)
        return y if activate is None else (y, ops.mp_silu(y.detach(), activate))

    @property
    def _halves(self) -> bool:
        """Does an op take the resampling of this block's entry?"""
        return self.conv_skip is None and self.resample_mode == "down" and self.resample_filter == (1, 1)

    def _main_path(self, x: Tensor) -> Tensor:
        """Of the encoder, before its pixel norm."""
        x = ops.resample(x, self.resample_filter, self.resample_mode)
        return x if self.conv_skip is None else self.conv_skip(x)

    def _attend(self, x: Tensor, activate: float | None) -> Branch:
        w_qkv, w_proj = self.attn_qkv.prepare(x.dtype), self.attn_proj.prepare(x.dtype)
        return ops.attention_branch(x, w_qkv, w_proj, self.heads, self.attn_balance, self.clip_act, activate)


Skip = tuple[Tensor, Tensor | None]  # an output of the encoder, and as its reader in the decoder wants it activated


class UNet(nn.Module):
    """The raw network F, Fig. 21. Defaults are those of the published ImageNet networks.

    `img_resolution` names the levels and chooses where to attend (`attn_resolutions`, in pixels of the network's
    own grid); `forward` takes any H and W that are multiples of `granularity`.
    """

    def __init__(
        self,
        img_resolution: int,
        img_channels: int,
        label_dim: int,
        model_channels: int = 192,
        channel_mult: Sequence[float] = (1, 2, 3, 4),
        channel_mult_noise: float | None = None,
        channel_mult_emb: float | None = None,
        num_blocks: int = 3,
        attn_resolutions: Sequence[int] = (16, 8),
        label_balance: float = 0.5,
        concat_balance: float = 0.5,
        **block_kwargs: Any,
    ):
        super().__init__()
        widths = [int(model_channels * mult) for mult in channel_mult]
        noise_channels = widths[0] if channel_mult_noise is None else int(model_channels * channel_mult_noise)
        emb_channels = max(widths) if channel_mult_emb is None else int(model_channels * channel_mult_emb)
        self.granularity = 2 ** (len(widths) - 1)
        if img_resolution % self.granularity:
            raise ValueError(f"img_resolution {img_resolution} is not a multiple of {self.granularity} ({len(widths)} levels)")
        self.label_dim, self.label_balance = label_dim, label_balance
        self.out_gain = nn.Parameter(torch.zeros([]))
        self.emb_fourier = MPFourier(noise_channels)
        self.emb_noise = MPConv(noise_channels, emb_channels)
        self.emb_label = MPConv(label_dim, emb_channels) if label_dim else None

        block = partial(Block, emb_channels=emb_channels, concat_balance=concat_balance, **block_kwargs)
        resolutions = [img_resolution >> level for level in range(len(widths))]
        attend = [res in attn_resolutions for res in resolutions]
        self.enc = nn.ModuleDict()
        skips = []  # widths on the skip stack
        for level, (res, width) in enumerate(zip(resolutions, widths)):
            if level == 0:
                self.enc[f"{res}x{res}_conv"] = MPConv(img_channels + 1, width, (3, 3))
                skips.append(width)
            else:
                self.enc[f"{res}x{res}_down"] = block(skips[-1], skips[-1], resample_mode="down")
                skips.append(skips[-1])
            for i in range(num_blocks):
                self.enc[f"{res}x{res}_block{i}"] = block(skips[-1], width, attention=attend[level])
                skips.append(width)

        block = partial(block, flavor="dec")
        self.dec = nn.ModuleDict()
        current = skips[-1]
        for level, (res, width) in reversed(list(enumerate(zip(resolutions, widths)))):
            if level == len(widths) - 1:
                self.dec[f"{res}x{res}_in0"] = block(current, current, attention=True)
                self.dec[f"{res}x{res}_in1"] = block(current, current)
            else:
                self.dec[f"{res}x{res}_up"] = block(current, current, resample_mode="up")
            for i in range(num_blocks + 1):
                skip = skips.pop()
                self.dec[f"{res}x{res}_block{i}"] = block(current + skip, width, attention=attend[level], skip_channels=skip)
                current = width
        self.out_conv = MPConv(current, img_channels, (3, 3))
        self.prepared_modulation = None  # all blocks' emb_linear as one weight, like `MPConv.prepared`

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x as `precondition_input` makes it, `modulation` of its noise levels and labels → `[N, H, W, C]`.

        With a weight prepared for the step, zeros follow after the C channels.
        """
        modulations = iter(modulation.split([len(block.emb_linear.weight) for block in self.blocks()], dim=1))
        x, activated, skips = self._encode(x, modulations)
        x = self._decode(x, activated, skips, modulations)
        return self.out_conv(x, gain=self.out_gain)

    def _encode(self, x: Tensor, modulations: Iterator[Tensor]) -> tuple[Tensor, Tensor | None, list[Skip]]:
        """x and, for the first block of the decoder, x activated; the skips."""
        decoder = list(self.dec.values())
        scales = [block.reads_activated[1] for block in decoder if block.skip_channels]  # of the skips, the last first
        skips, clip, activated = [], None, None
        for module in self.enc.values():
            scale = scales.pop()
            if isinstance(module, Block):
                y, *more, skip = module(x, next(modulations), activate=scale, forks=True, clip_x=clip)
                skips.append((skip, activated))
                x, activated, clip = y, more[0] if more else None, module.clip_act
            else:
                x = module(x)
                activated = None if scale is None else ops.mp_silu(x.detach(), scale)
        x, skip = ops.fork(x, clip)
        skips.append((skip, activated))
        return x, activated if scale == decoder[0].reads_activated[0] else None, skips

    def _decode(self, x: Tensor, activated: Tensor | None, skips: list[Skip], modulations: Iterator[Tensor]) -> Tensor:
        decoder = list(self.dec.values())
        for block, reader in zip(decoder, [*decoder[1:], None]):
            skip, activated_skip = skips.pop() if block.skip_channels else (None, None)
            scale = None if reader is None else reader.reads_activated[0]
            y = block(x, next(modulations), skip, (activated, activated_skip), scale)
            x, activated = (y, None) if scale is None else y
        (x,) = ops.fork(x, decoder[-1].clip_act, 1)
        return x

    def blocks(self) -> list[Block]:
        """In the order of `forward`."""
        return [module for module in (*self.enc.values(), *self.dec.values()) if isinstance(module, Block)]

    def modulation(self, c_noise: Tensor, labels: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`Block.modulation` of one block after the other, `[N, ΣCout]` in `dtype`, as one matrix product."""
        emb, w = self.embed(c_noise, labels), self.prepared_modulation
        if w is None:
            w = torch.cat([block.emb_linear.prepare(emb.dtype, block.emb_gain) for block in self.blocks()], dim=1)
        return ops.linear(emb, w, shift=1.0, dtype=dtype)

    def embed(self, c_noise: Tensor, labels: Tensor | None) -> Tensor:
        """The fp32 embedding `[N, Cemb]` of the noise level and the class."""
        emb = self.emb_noise(self.emb_fourier(c_noise))
        if self.emb_label is not None:
            w = self.emb_label.prepare(labels.dtype)
            emb = ops.mp_sum(emb, ops.linear(labels, w, scale=math.sqrt(self.label_dim)), self.label_balance)
        return ops.mp_silu(emb)


class Precond(nn.Module):
    """The denoiser D(x; σ) around the U-Net, Eq. 4–8, with the uncertainty head u(σ) of Eq. 14.

    `dtype` is the compute dtype and overrides `use_fp16` on every device; without it a CPU computes in fp32.
    `unet_kwargs` go to `UNet` and `Block`. `config` holds the arguments, for snapshots.
    """

    def __init__(
        self,
        img_resolution: int,
        img_channels: int,
        label_dim: int,
        use_fp16: bool = True,
        sigma_data: float = 0.5,
        logvar_channels: int = 128,
        dtype: torch.dtype | None = None,
        **unet_kwargs: Any,
    ):
        super().__init__()
        self.img_resolution, self.img_channels, self.label_dim = img_resolution, img_channels, label_dim
        self.use_fp16, self.sigma_data, self.dtype = use_fp16, sigma_data, dtype
        self.config = dict(
            img_resolution=img_resolution, img_channels=img_channels, label_dim=label_dim, use_fp16=use_fp16,
            sigma_data=sigma_data, logvar_channels=logvar_channels, **unet_kwargs,
        )  # fmt: skip
        self.unet = UNet(img_resolution, img_channels, label_dim, **unet_kwargs)
        self.logvar_fourier = MPFourier(logvar_channels)
        self.logvar_linear = MPConv(logvar_channels, 1)
        self.folded = None  # the only compute dtype of a network without raw weights: see `edm2.fold`

    @property
    def device(self) -> torch.device:
        return self.logvar_fourier.freqs.device

    def train(self, mode: bool = True) -> "Precond":
        if mode and self.folded is not None:
            raise ValueError("a folded network cannot be trained")
        return super().train(mode)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor | float,
        class_labels: Tensor | None = None,
        force_fp32: bool = False,
        return_logvar: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Denoise x `[N, C, H, W]` at noise level sigma (`[N]`, `[N, 1, 1, 1]` or a scalar); returns fp32.

        class_labels: float `[N, label_dim]` or int64 class indices `[N]`; None means all zeros; ignored by an
        unconditional network. With `return_logvar` also returns u(σ), fp32 `[N, 1, 1, 1]`.
        """
        self._check_shape(x)
        x = x.float().contiguous()
        sigma = self._sigma(sigma, x)
        labels = self._labels(class_labels, len(x), x.device)
        dtype = self._dtype(x.device, force_fp32)
        x_in, c_noise = ops.precondition_input(x, sigma, self.sigma_data, dtype)
        F_x = self.unet(x_in, self.unet.modulation(c_noise, labels, dtype))
        D_x = ops.precondition_output(F_x, x, sigma, self.sigma_data)
        return (D_x, self.logvar(c_noise)) if return_logvar else D_x

    def modulation(self, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """What `forward` makes of noise levels fp32 `[N]` and labels alone, for `denoise`: `[N, ΣCout]` in the compute type."""
        labels = self._labels(class_labels, len(sigma), sigma.device)
        return self.unet.modulation(sigma.log() / 4, labels, self._dtype(sigma.device))

    def denoise(self, x: Tensor, sigma: Tensor, modulation: Tensor) -> Tensor:
        """`forward`, with the modulation of the noise levels sigma (`[N]` or `[1]`) and the labels of x given."""
        self._check_shape(x)
        x = x.float().contiguous()
        sigma = self._sigma(sigma, x)
        x_in, _ = ops.precondition_input(x, sigma, self.sigma_data, self._dtype(x.device))
        return ops.precondition_output(self.unet(x_in, modulation), x, sigma, self.sigma_data)

    def logvar(self, c_noise: Tensor) -> Tensor:
        """The learned log-variance u of the loss at c_noise = ln(σ)/4: `[N]` → `[N, 1, 1, 1]`."""
        return self.logvar_linear(self.logvar_fourier(c_noise)).reshape(-1, 1, 1, 1)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The type of the U-Net's activations for an input on `device`."""
        if self.dtype is not None:
            return self.dtype
        return torch.float16 if self.use_fp16 and device.type != "cpu" else torch.float32

    def _dtype(self, device: torch.device, force_fp32: bool = False) -> torch.dtype:
        dtype = torch.float32 if force_fp32 else self.compute_dtype(device)
        if self.folded not in (None, dtype):
            raise ValueError(f"the network is folded for {self.folded}: it cannot compute in {dtype}; fold it on its device, for its type")
        return dtype

    def _check_shape(self, x: Tensor) -> None:
        step = self.unet.granularity
        if x.ndim != 4 or x.shape[1] != self.img_channels or x.shape[2] % step or x.shape[3] % step:
            raise ValueError(f"x: expected [N, {self.img_channels}, H, W] with H and W multiples of {step}, got {list(x.shape)}")

    def _sigma(self, sigma: Tensor | float, x: Tensor) -> Tensor:
        if not isinstance(sigma, Tensor):
            sigma = torch.full([1], sigma, device=x.device)  # without a copy, which would make a GPU wait
        sigma = sigma.to(x.device, torch.float32).reshape(-1)
        if sigma.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"sigma: expected a scalar or {x.shape[0]} values, got {sigma.shape[0]}")
        return sigma.expand(x.shape[0])

    def _labels(self, labels: Tensor | None, n: int, device: torch.device) -> Tensor | None:
        """Class labels as fp32 `[N, label_dim]`, or None for an unconditional network."""
        if self.label_dim == 0:
            return None
        if labels is None:
            return torch.zeros(n, self.label_dim, device=device)
        if labels.ndim == 1 and not labels.is_floating_point():
            labels = F.one_hot(labels.long(), self.label_dim)
        if labels.ndim != 2 or labels.shape[1] != self.label_dim or labels.shape[0] not in (1, n):
            raise ValueError(f"class_labels: expected [{n}, {self.label_dim}], got {list(labels.shape)}")
        return labels.to(device=device, dtype=torch.float32)
