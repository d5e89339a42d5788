"""Around a network that denoises: its inputs from an image at a noise level σ, and the denoised image from its output, Eq. 4–8.

N images of C channels and P pixels. Images are fp32 `[N, C, H, W]`, what the network takes and gives `[N, H, W, channels]`
in its own type. σ is read as it lies, one number for each image or one for all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_activation, check_dense, check_floating, check_like, check_shape
from kernels.jit import launch
from kernels.reference import input_channels
from kernels.registration import register, register_derivative

BLOCK = 2048  # elements of the network's side per program: with 4 warps 16 per thread


@triton.jit
def total_variance(sigma, SIGMA_DATA: tl.constexpr):
    return sigma * sigma + SIGMA_DATA * SIGMA_DATA


@triton.jit
def both_layouts(P, C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """The image of this program, and whether no other is before it; offsets `[BLOCK_P, BLOCK_C]` of its pixels in
    `[N, C, P]` and `[N, P, CHANNELS]`; masks of both; channels."""
    blocks = tl.maximum(tl.cdiv(P, BLOCK_P), 1)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    offs_p, offs_c = (tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P))[:, None], tl.arange(0, BLOCK_C)[None, :]
    outer = image * C * P + offs_c.to(tl.int64) * P + offs_p
    inner = image * P * CHANNELS + offs_p.to(tl.int64) * CHANNELS + offs_c
    first = tl.program_id(0) % blocks == 0
    return image, first, outer, inner, (offs_p < P) & (offs_c < C), (offs_p < P) & (offs_c < CHANNELS), offs_c


@triton.jit
def precondition_input_kernel(
    x_ptr, sigma_ptr, y_ptr, noise_ptr, P, stride_sigma,
    SIGMA_DATA: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """c_in·x, a channel of ones, zeros; by the first program of an image c_noise."""
    image, first, outer, inner, mask, mask_y, offs_c = both_layouts(P, C, CHANNELS, BLOCK_P, BLOCK_C)
    sigma = tl.load(sigma_ptr + image * stride_sigma).to(tl.float32)
    c_in = tl.div_rn(1.0, tl.sqrt_rn(total_variance(sigma, SIGMA_DATA)))
    x = tl.load(x_ptr + outer, mask, other=0.0).to(tl.float32)
    y = tl.where(offs_c == C, 1.0, tl.where(offs_c < C, x * c_in, 0.0))
    tl.store(y_ptr + inner, y.to(y_ptr.dtype.element_ty), mask_y)
    if first:
        tl.store(noise_ptr + image, (tl.log(sigma) * 0.25).to(noise_ptr.dtype.element_ty))


def precondition_input_triton(x: Tensor, sigma: Tensor, sigma_data: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, noise = _empty_input(x, sigma, sigma_data, dtype)
    _launch(precondition_input_kernel, x, y, x, sigma, y, noise, sigma=sigma, sigma_data=sigma_data)
    return y, noise


@triton.jit
def precondition_output_kernel(
    f_ptr, x_ptr, sigma_ptr, d_ptr, P, stride_sigma,
    SIGMA_DATA: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """D = c_skip·x + c_out·F."""
    image, _, outer, inner, mask, _, _ = both_layouts(P, C, CHANNELS, BLOCK_P, BLOCK_C)
    sigma = tl.load(sigma_ptr + image * stride_sigma).to(tl.float32)
    total = total_variance(sigma, SIGMA_DATA)
    c_skip, c_out = tl.div_rn(SIGMA_DATA * SIGMA_DATA, total), tl.div_rn(sigma * SIGMA_DATA, tl.sqrt_rn(total))
    x = tl.load(x_ptr + outer, mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + inner, mask, other=0.0).to(tl.float32)
    tl.store(d_ptr + outer, (c_skip * x + c_out * f).to(d_ptr.dtype.element_ty), mask)


def precondition_output_triton(f: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    d = torch.empty_like(x)
    _launch(precondition_output_kernel, x, f, f, x, sigma, d, sigma=sigma, sigma_data=sigma_data)
    return d


@triton.jit
def precondition_output_backward_kernel(
    g_ptr, sigma_ptr, df_ptr, P, stride_sigma,
    SIGMA_DATA: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dF = c_out·g, 0 in channels that D has not."""
    image, _, outer, inner, mask, mask_f, _ = both_layouts(P, C, CHANNELS, BLOCK_P, BLOCK_C)
    sigma = tl.load(sigma_ptr + image * stride_sigma).to(tl.float32)
    c_out = tl.div_rn(sigma * SIGMA_DATA, tl.sqrt_rn(total_variance(sigma, SIGMA_DATA)))
    g = tl.load(g_ptr + outer, mask, other=0.0).to(tl.float32)
    tl.store(df_ptr + inner, tl.where(mask, c_out * g, 0.0).to(df_ptr.dtype.element_ty), mask_f)


def precondition_output_backward_triton(g: Tensor, sigma: Tensor, sigma_data: float, channels: int, dtype: torch.dtype) -> Tensor:
    df = _empty_gradient(g, sigma, sigma_data, channels, dtype)
    _launch(precondition_output_backward_kernel, g, df, g, sigma, df, sigma=sigma, sigma_data=sigma_data)
    return df


def _launch(kernel, image: Tensor, inner: Tensor, *tensors: Tensor, sigma: Tensor, sigma_data: float) -> None:
    """Programs over the pixels of `[N, C, H, W]` and `[N, H, W, channels]`, at least one for each image."""
    (n, c, *_), channels, pixels = image.shape, inner.shape[3], image.shape[2:].numel()
    block_c = triton.next_power_of_2(channels)
    block_p = max(BLOCK // block_c, 1)
    launch(
        kernel, (n * max(triton.cdiv(pixels, block_p), 1),), *tensors, pixels, sigma.stride(0),
        SIGMA_DATA=sigma_data, C=c, CHANNELS=channels, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip


def _empty_input(x: Tensor, sigma: Tensor, sigma_data: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n, c, height, width = x.shape
    return x.new_empty(n, height, width, input_channels(c), dtype=dtype), x.new_empty(n)


def _empty_gradient(g: Tensor, sigma: Tensor, sigma_data: float, channels: int, dtype: torch.dtype) -> Tensor:
    n, _, height, width = g.shape
    return g.new_empty(n, height, width, channels, dtype=dtype)


_precondition_input = register("precondition_input", eager.precondition_input, _empty_input, precondition_input_triton)
_precondition_output = register(
    "precondition_output", eager.precondition_output, lambda f, x, *_: torch.empty_like(x), precondition_output_triton
)
_precondition_output_backward = register(
    "precondition_output_backward", eager.precondition_output_backward, _empty_gradient, precondition_output_backward_triton
)


def _save_input(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, sigma, ctx.sigma_data, _ = inputs
    ctx.channels = x.shape[1]
    if not ctx.needs_input_grad[1]:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, sigma)


def _input_autograd(ctx: FunctionCtx, g: Tensor | None, g_noise: Tensor | None) -> tuple[Tensor | None, ...]:
    """In plain PyTorch: training asks for none of it."""
    x, sigma = ctx.saved_tensors
    needs_x, needs_sigma, _, _ = ctx.needs_input_grad
    if g is not None:
        g = g[..., : ctx.channels].permute(0, 3, 1, 2)
    dx = eager.precondition_input_dx(g, sigma, ctx.sigma_data) if needs_x and g is not None else None
    dsigma = eager.precondition_input_dsigma(g, g_noise, x, sigma, ctx.sigma_data) if needs_sigma else None
    return dx, dsigma, None, None


def _save_output(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    f, x, sigma, ctx.sigma_data = inputs
    ctx.channels, ctx.dtype = f.shape[3], f.dtype
    ctx.save_for_backward(*((f, x) if ctx.needs_input_grad[2] else (None, None)), sigma)


def _output_autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    """Those of x and σ in plain PyTorch: training asks for neither."""
    f, x, sigma = ctx.saved_tensors
    needs_f, needs_x, needs_sigma, _ = ctx.needs_input_grad
    df = _precondition_output_backward(g.contiguous(), sigma, ctx.sigma_data, ctx.channels, ctx.dtype) if needs_f else None
    dx = eager.precondition_output_dx(g, sigma, ctx.sigma_data) if needs_x else None
    return df, dx, eager.precondition_output_dsigma(g, f, x, sigma, ctx.sigma_data) if needs_sigma else None, None


register_derivative(_precondition_input, _save_input, _input_autograd)
register_derivative(_precondition_output, _save_output, _output_autograd)


def precondition_input(x: Tensor, sigma: Tensor, sigma_data: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[N, C, H, W]` at noise levels σ `[N]` → what the network takes: c_in·x in `dtype` `[N, H, W, channels]`, and c_noise `[N]`.

    After the C channels follow one of ones and zeros up to a multiple of 8.
    """
    _check_image("x", x)
    _check_sigma(sigma, "x", x)
    check_floating("dtype", dtype)
    return _precondition_input(x, sigma, sigma_data, dtype)


def precondition_output(f: Tensor, x: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """`c_skip·x + c_out·f`: f `[N, H, W, C]`, x `[N, C, H, W]`, σ `[N]` → `[N, C, H, W]` in x's type.

    f is of any type and may have more channels, which do not matter.
    """
    _check_image("x", x)
    _check_sigma(sigma, "x", x)
    check_activation("f", f)
    n, c, height, width = x.shape
    check_shape("f", f, (n, height, width, max(f.shape[3], c)))
    if f.device != x.device:
        raise ValueError(f"f: {f.dtype} on {f.device} does not go with x, {x.dtype} on {x.device}")
    return _precondition_output(f, x, sigma, sigma_data)


def _check_image(name: str, x: Tensor) -> None:
    if x.ndim != 4 or not x.shape[1]:
        raise ValueError(f"{name}: expected [N, C, H, W], got {list(x.shape)}")
    check_dense(name, x)


def _check_sigma(sigma: Tensor, name: str, x: Tensor) -> None:
    check_shape("sigma", sigma, (len(x),))
    check_like("sigma", sigma, name, x)
