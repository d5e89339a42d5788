"""The network and its optimizer as a user of PyTorch would write them: what everything here is measured against.

`Baseline` takes its parameters from a `Precond` and equals it in loss and gradients (`tests/test_bench.py`). One op per
line, weights normalised in every forward, NCHW; optionally in the forms that PyTorch is fastest with.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edm2.layers import MPConv, MPFourier, normalized_weights
from edm2.network import Block, Precond, UNet
from edm2.phema import power_function_beta


def normalize(x: Tensor, dim: Sequence[int], eps: float = 1e-4) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
    norm = eps + norm * math.sqrt(norm.numel() / x.numel())
    return x / norm.to(x.dtype)


def mp_fourier(x: Tensor, layer: MPFourier) -> Tensor:
    return (torch.outer(x, layer.freqs) + layer.phases).cos() * math.sqrt(2)


def mp_silu(x: Tensor) -> Tensor:
    return F.silu(x) / 0.596


def mp_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    return a.lerp(b, t) / math.hypot(1 - t, t)


def mp_cat(a: Tensor, b: Tensor, t: float) -> Tensor:
    scale = math.sqrt((a.shape[1] + b.shape[1]) / ((1 - t) ** 2 + t**2))
    weight_a = scale / math.sqrt(a.shape[1]) * (1 - t)
    weight_b = scale / math.sqrt(b.shape[1]) * t
    return torch.cat([weight_a * a, weight_b * b], dim=1)


def resample(x: Tensor, filter: Sequence[float], mode: str) -> Tensor:
    if mode == "keep":
        return x
    f = torch.tensor(filter, dtype=torch.float32, device=x.device)
    f = torch.outer(f, f) / f.sum() ** 2
    f = f.to(x.dtype).expand(x.shape[1], 1, -1, -1)
    pad = (len(filter) - 1) // 2
    if mode == "down":
        return F.conv2d(x, f, groups=x.shape[1], stride=2, padding=pad)
    return F.conv_transpose2d(x, f * 4, groups=x.shape[1], stride=2, padding=pad)


class Baseline(nn.Module):
    """A `Precond` in plain PyTorch, sharing its parameters and called like it.

    `fast` is the form PyTorch is quickest with: channels-last activations and weights, and
    `scaled_dot_product_attention`; without it, NCHW and attention by two matrix products, as published.
    """

    def __init__(self, net: Precond, fast: bool = False):
        super().__init__()
        self.net, self.fast = net, fast
        self.format = torch.channels_last if fast else torch.contiguous_format

    def forward(
        self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None, return_logvar: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        net = self.net
        x = x.float()
        sigma = torch.as_tensor(sigma, dtype=torch.float32, device=x.device).reshape(-1, 1, 1, 1).expand(len(x), 1, 1, 1)
        labels = x.new_zeros(len(x), net.label_dim) if net.label_dim and class_labels is None else class_labels
        c_skip = net.sigma_data**2 / (sigma**2 + net.sigma_data**2)
        c_out = sigma * net.sigma_data / (sigma**2 + net.sigma_data**2).sqrt()
        c_in = 1 / (net.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.flatten().log() / 4
        x_in = (c_in * x).to(net.compute_dtype(x.device), memory_format=self.format)
        D_x = c_skip * x + c_out * self.unet(net.unet, x_in, c_noise, labels).float()
        if not return_logvar:
            return D_x
        return D_x, self.conv(mp_fourier(c_noise, net.logvar_fourier), net.logvar_linear).reshape(-1, 1, 1, 1)

    def unet(self, unet: UNet, x: Tensor, c_noise: Tensor, labels: Tensor | None) -> Tensor:
        emb = self.conv(mp_fourier(c_noise, unet.emb_fourier), unet.emb_noise)
        if unet.emb_label is not None:
            emb = mp_sum(emb, self.conv(labels * math.sqrt(labels.shape[1]), unet.emb_label), unet.label_balance)
        emb = mp_silu(emb)
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        skips = []
        for module in unet.enc.values():
            x = self.block(module, x, emb) if isinstance(module, Block) else self.conv(x, module)
            skips.append(x)
        for name, block in unet.dec.items():
            if "block" in name:
                x = mp_cat(x, skips.pop(), block.concat_balance)
            x = self.block(block, x, emb)
        return self.conv(x, unet.out_conv, unet.out_gain)

    def block(self, block: Block, x: Tensor, emb: Tensor) -> Tensor:
        x = resample(x, block.resample_filter, block.resample_mode)
        if block.flavor == "enc":
            if block.conv_skip is not None:
                x = self.conv(x, block.conv_skip)
            x = normalize(x, dim=[1])
        y = self.conv(mp_silu(x), block.conv_res0)
        m = self.conv(emb, block.emb_linear, block.emb_gain) + 1
        y = mp_silu(y * m.unsqueeze(2).unsqueeze(3).to(y.dtype))
        y = F.dropout(y, block.dropout, self.training)
        y = self.conv(y, block.conv_res1)
        if block.flavor == "dec" and block.conv_skip is not None:
            x = self.conv(x, block.conv_skip)
        x = mp_sum(x, y, block.res_balance)
        if block.heads:
            y = self.attention(self.conv(x, block.attn_qkv), block.heads)
            x = mp_sum(x, self.conv(y, block.attn_proj), block.attn_balance)
        return x if block.clip_act is None else x.clip(-block.clip_act, block.clip_act)

    def attention(self, y: Tensor, heads: int) -> Tensor:
        n, channels, height, width = y.shape
        y = y.reshape(n, heads, -1, 3, height * width)
        q, k, v = normalize(y, dim=[2]).unbind(3)
        if self.fast:
            y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT
        else:
            w = torch.einsum("nhcq,nhck->nhqk", q, k / math.sqrt(q.shape[2])).softmax(dim=3)
            y = torch.einsum("nhqk,nhck->nhcq", w, v)
        return y.reshape(n, channels // 3, height, width).contiguous(memory_format=self.format)

    def conv(self, x: Tensor, layer: MPConv, gain: Tensor | float = 1) -> Tensor:
        w = self.weight(layer, gain, x.dtype)
        return x @ w.t() if w.ndim == 2 else F.conv2d(x, w, padding=w.shape[-1] // 2)

    def weight(self, layer: MPConv, gain: Tensor | float, dtype: torch.dtype) -> Tensor:
        w = layer.weight.to(torch.float32)
        w = normalize(w, dim=list(range(1, w.ndim)))
        w = w * (gain / math.sqrt(w[0].numel()))
        w = w.to(dtype)
        return w if w.ndim == 2 else w.contiguous(memory_format=self.format)


class BaselineOptimizer:
    """PyTorch's fused Adam, a loop for each average, a loop of forced normalisations: the step of `EDM2Optimizer`."""

    def __init__(
        self,
        net: nn.Module,
        betas: tuple[float, float] = (0.9, 0.99),
        ema_stds: Sequence[float] = (0.05, 0.10),
        weights: "UnpreparedWeights | None" = None,
    ):
        self.params = list(net.parameters())
        self.adam = torch.optim.Adam(self.params, betas=betas, fused=True)
        self.emas = {std: [p.detach().clone() for p in self.params] for std in ema_stds}
        self.normalized = normalized_weights(net)

    @torch.no_grad()
    def step(self, lr: float, next_nimg: int, batch_size: int) -> None:
        for p in self.params:
            torch.nan_to_num(p.grad, nan=0, posinf=0, neginf=0, out=p.grad)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        for std, averages in self.emas.items():
            beta = float(power_function_beta(std, next_nimg, batch_size))
            for average, p in zip(averages, self.params):
                average.lerp_(p, 1 - beta)
        for w in self.normalized:
            w.copy_(normalize(w, dim=list(range(1, w.ndim))))

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)


class UnpreparedWeights:
    """In place of `StepWeights`: every forward prepares the weights."""

    def __init__(self, net: nn.Module):
        pass

    def prepared(self) -> nullcontext:
        return nullcontext()

    def project(self, start_sum: None = None) -> None:
        pass
