"""The magnitude-preserving diffusion U-Net (config G) and its preconditioning.

Parameter names and shapes are those of the official release. Inside the U-Net, activations are contiguous
`[N, H, W, C]` tensors; `Precond` takes and returns `[N, C, H, W]`. Equation numbers: Karras et al. 2024.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels as ops
from kernels.reference import EPS

if TYPE_CHECKING:
    from kernels.weight import PreparedWeight


class MPFourier(nn.Module):
    """Random Fourier features of unit variance, Eq. 75: `[N]` → fp32 `[N, num_channels]`."""

    def __init__(self, num_channels: int, bandwidth: float = 1.0):
        super().__init__()
        self.register_buffer("freqs", 2 * math.pi * torch.randn(num_channels) * bandwidth)
        self.register_buffer("phases", 2 * math.pi * torch.rand(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return ops.mp_fourier(x.float().contiguous(), self.freqs.float(), self.phases.float())


class MPConv(nn.Module):
    """Weight-normalised convolution or (with `kernel=()`) linear layer without bias, Eq. 47 and 66.

    The raw weight `[out, in, *kernel]` is fp32. `forward` never writes to it: see `force_weight_norm_`. `heads` orders
    the rows of a qkv weight; `up`: it convolves behind an up-sampling that its op does. `prepared` is the weight as the
    ops want it, where `edm2.weights` has made it beforehand.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: Sequence[int] = (), heads: int = 0, up: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, *kernel))
        self.heads, self.up = heads, up
        self.prepared = None

    def prepare(self, dtype: torch.dtype, gain: Tensor | None = None) -> "Tensor | PreparedWeight":
        """The weight as the ops want it, `[taps, out, in]`: see `kernels.mp_weight`."""
        return ops.mp_weight(self.weight, gain, dtype, self.heads, self.up) if self.prepared is None else self.prepared

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        op = ops.conv if self.weight.ndim == 4 else ops.linear
        return op(x, self.prepare(x.dtype, gain))


@torch.no_grad()
def force_weight_norm_(net: nn.Module) -> None:
    """Forced normalisation of every weight in place, Eq. 47: each row gets an RMS of (almost) 1.

    For weights that are fresh or foreign (initialisation, import, fine-tuning). The optimizer does it after every
    step. Not idempotent in floating point, hence never on resume.
    """
    normalize_rows_(normalized_weights(net))


@torch.no_grad()
def normalize_rows_(weights: Sequence[Tensor]) -> None:
    """Normalise each row of each weight `[out, …]` in place, all weights in few launches."""
    scales = [torch.linalg.vector_norm(w, dim=tuple(range(1, w.ndim)), keepdim=True) for w in weights]
    torch._foreach_mul_(scales, [1 / math.sqrt(w[0].numel()) for w in weights])
    torch._foreach_add_(scales, EPS)
    torch._foreach_div_(weights, scales)


def normalized_weights(net: nn.Module) -> list[nn.Parameter]:
    """The parameters under forced weight normalisation: those of every `MPConv`."""
    return [module.weight for module in net.modules() if isinstance(module, MPConv)]


class Block(nn.Module):
    """Residual block of the encoder or the decoder, optionally resampling first or attending last (Fig. 21).

    An encoder block projects and pixel-normalises its main path on entry. A decoder block called with a `skip`
    joins it to its input by MP-Cat (`in_channels` counts both) and projects on the way out. The gradient of its output
    passes the clip: a decoder block stops it at its input, others by `kernels.fork`.
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
    ):
        super().__init__()
        self.heads = out_channels // channels_per_head if attention else 0
        if attention and (self.heads == 0 or out_channels % self.heads):
            raise ValueError(f"{out_channels} channels cannot attend in heads of {channels_per_head} or a little more")
        self.flavor, self.resample_mode, self.resample_filter = flavor, resample_mode, tuple(resample_filter)
        self.dropout, self.clip_act = dropout, clip_act
        self.res_balance, self.attn_balance, self.concat_balance = res_balance, attn_balance, concat_balance
        self.emb_gain = nn.Parameter(torch.zeros([]))
        doubles = flavor == "dec" and resample_mode == "up" and self.resample_filter == (1, 1) and in_channels == out_channels
        self.conv_res0 = MPConv(out_channels if flavor == "enc" else in_channels, out_channels, (3, 3), up=doubles)
        self.emb_linear = MPConv(emb_channels, out_channels)
        self.conv_res1 = MPConv(out_channels, out_channels, (3, 3))
        self.conv_skip = MPConv(in_channels, out_channels, (1, 1)) if in_channels != out_channels else None
        self.attn_qkv = MPConv(out_channels, out_channels * 3, (1, 1), heads=self.heads) if attention else None
        self.attn_proj = MPConv(out_channels, out_channels, (1, 1)) if attention else None

    def modulation(self, emb: Tensor) -> Tensor:
        """What scales each channel of each image: fp32 emb `[N, Cemb]` → `[N, Cout]`. `UNet` makes all blocks' at once."""
        return self.emb_linear(emb, gain=self.emb_gain) + 1

    def forward(self, x: Tensor, m: Tensor, skip: Tensor | None = None) -> Tensor:
        """x `[N, H, W, Cin − Cskip]`, modulation m `[N, Cout]`, skip `[N, H, W, Cskip]` → `[N, H', W', Cout]`."""
        dropout = self.dropout if self.training else 0.0
        filters = self.resample_mode == "up" and self.resample_filter != (1, 1)
        projects = self.flavor == "dec" and skip is None and self.conv_skip is not None
        branch = self._branch_by_parts if dropout or filters or projects else self._branch
        x = branch(x, m, skip, None if self.heads else self.clip_act)
        return self._attend(x) if self.heads else x

    def _branch(self, x: Tensor, m: Tensor, skip: Tensor | None, clip: float | None) -> Tensor:
        """MP-Sum of the main path and the residual branch, then clip."""
        w0, w1 = self.conv_res0.prepare(x.dtype), self.conv_res1.prepare(x.dtype)
        balances = self.concat_balance, self.res_balance
        if skip is not None:
            return ops.residual_branch_cat(x, skip, w0, m, w1, self.conv_skip.prepare(x.dtype), *balances, clip, self.clip_act)
        if self.conv_res0.up:
            return ops.residual_branch_up(x, w0, m, w1, self.res_balance, clip, self.clip_act)
        if self.flavor == "dec":
            x = ops.resample(x, self.resample_filter, self.resample_mode)
            return ops.residual_branch_silu(x, w0, m, w1, self.res_balance, clip, self.clip_act)
        main = x if self._halves else self._main_path(x)
        return ops.residual_branch_norm(main, w0, m, w1, self.res_balance, clip, self._halves)

    def _branch_by_parts(self, x: Tensor, m: Tensor, skip: Tensor | None, clip: float | None) -> Tensor:
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
            return ops.conv_sum(y, w, main, self.res_balance, clip)
        w_skip = self.conv_skip.prepare(y.dtype)
        return ops.conv_cat_sum(y, w, main, skip, w_skip, self.concat_balance, self.res_balance, clip)

    @property
    def _halves(self) -> bool:
        """Does an op take the resampling of this block's entry?"""
        return self.conv_skip is None and self.resample_mode == "down" and self.resample_filter == (1, 1)

    def _main_path(self, x: Tensor) -> Tensor:
        """Of the encoder, before its pixel norm."""
        x = ops.resample(x, self.resample_filter, self.resample_mode)
        return x if self.conv_skip is None else self.conv_skip(x)

    def _attend(self, x: Tensor) -> Tensor:
        w_qkv, w_proj = self.attn_qkv.prepare(x.dtype), self.attn_proj.prepare(x.dtype)
        return ops.attention_branch(x, w_qkv, w_proj, self.heads, self.attn_balance, self.clip_act)


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
                self.dec[f"{res}x{res}_block{i}"] = block(current + skips.pop(), width, attention=attend[level])
                current = width
        self.out_conv = MPConv(current, img_channels, (3, 3))
        self.prepared_modulation = None  # all blocks' emb_linear as one weight, like `MPConv.prepared`

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None = None) -> Tensor:
        """x and c_noise as `precondition_input` makes them, labels `[N, label_dim]` or None → `[N, H, W, C]`.

        With a weight prepared for the step, zeros follow after the C channels.
        """
        modulations = iter(self.modulations(self.embed(c_noise, labels), x.dtype))
        skips = []
        for module in self.enc.values():
            if isinstance(module, Block):
                x, skip = ops.fork(module(x, next(modulations)), module.clip_act)
            else:
                x = skip = module(x)
            skips.append(skip)
        for name, block in self.dec.items():
            x = block(x, next(modulations), skips.pop() if "block" in name else None)
        (x,) = ops.fork(x, block.clip_act, 1)
        return self.out_conv(x, gain=self.out_gain)

    def blocks(self) -> list[Block]:
        """In the order of `forward`."""
        return [module for module in (*self.enc.values(), *self.dec.values()) if isinstance(module, Block)]

    def modulations(self, emb: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """`Block.modulation` of every block, in `dtype`, as one matrix product."""
        blocks, w = self.blocks(), self.prepared_modulation
        if w is None:
            w = torch.cat([block.emb_linear.prepare(emb.dtype, block.emb_gain) for block in blocks], dim=1)
        return ops.linear(emb, w, shift=1.0, dtype=dtype).split([len(block.emb_linear.weight) for block in blocks], dim=1)

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
        labels = self._labels(class_labels, x)
        dtype = torch.float32 if force_fp32 else self.compute_dtype(x.device)
        x_in, c_noise = ops.precondition_input(x, sigma, self.sigma_data, dtype)
        F_x = self.unet(x_in, c_noise, labels)
        D_x = ops.precondition_output(F_x, x, sigma, self.sigma_data)
        return (D_x, self.logvar(c_noise)) if return_logvar else D_x

    def logvar(self, c_noise: Tensor) -> Tensor:
        """The learned log-variance u of the loss at c_noise = ln(σ)/4: `[N]` → `[N, 1, 1, 1]`."""
        return self.logvar_linear(self.logvar_fourier(c_noise)).reshape(-1, 1, 1, 1)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """The type of the U-Net's activations for an input on `device`."""
        if self.dtype is not None:
            return self.dtype
        return torch.float16 if self.use_fp16 and device.type != "cpu" else torch.float32

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

    def _labels(self, labels: Tensor | None, x: Tensor) -> Tensor | None:
        """Class labels as fp32 `[N, label_dim]`, or None for an unconditional network."""
        if self.label_dim == 0:
            return None
        if labels is None:
            return x.new_zeros(x.shape[0], self.label_dim)
        if labels.ndim == 1 and not labels.is_floating_point():
            labels = F.one_hot(labels.long(), self.label_dim)
        if labels.ndim != 2 or labels.shape[1] != self.label_dim or labels.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"class_labels: expected [{x.shape[0]}, {self.label_dim}], got {list(labels.shape)}")
        return labels.to(device=x.device, dtype=torch.float32)
