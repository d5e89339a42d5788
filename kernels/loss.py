"""The uncertainty-weighted denoising loss per element, Eq. 13–16 and 21, of N images of L elements.

σ and u, one number for each image, are read as they lie. λ(σ) = (σ² + σ_data²)/(σ·σ_data)².
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_dense, check_like, check_shape
from kernels.jit import launch
from kernels.registration import register, register_derivative

BLOCK = 4096  # elements at a time: with 8 warps 16 per thread


@triton.jit
def loss_weight(sigma_ptr, u_ptr, image, stride_sigma, stride_u, SIGMA_DATA: tl.constexpr):
    """λ(σ)/exp(u), u and exp(u)."""
    sigma = tl.load(sigma_ptr + image * stride_sigma).to(tl.float32)
    u = tl.load(u_ptr + image * stride_u).to(tl.float32)
    product, e = sigma * SIGMA_DATA, tl.exp(u)
    weight = tl.div_rn(sigma * sigma + SIGMA_DATA * SIGMA_DATA, product * product)
    return tl.div_rn(weight, e), u, e


@triton.jit
def uncertainty_loss_kernel(
    d_ptr, y_ptr, sigma_ptr, u_ptr, loss_ptr, L, stride_sigma, stride_u, SIGMA_DATA: tl.constexpr, BLOCK: tl.constexpr
):
    """λ/exp(u)·(D − y)² + u."""
    blocks = tl.cdiv(L, BLOCK)
    image, offs = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    weight, u, _ = loss_weight(sigma_ptr, u_ptr, image, stride_sigma, stride_u, SIGMA_DATA)
    d = tl.load(d_ptr + image * L + offs, offs < L).to(tl.float32)
    error = d - tl.load(y_ptr + image * L + offs, offs < L).to(tl.float32)
    tl.store(loss_ptr + image * L + offs, (weight * (error * error) + u).to(loss_ptr.dtype.element_ty), offs < L)


def uncertainty_loss_triton(denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float) -> Tensor:
    loss, size = torch.empty_like(denoised), denoised[0].numel() if len(denoised) else 0
    grid = (len(denoised) * triton.cdiv(size, BLOCK),)
    args = (denoised, images, sigma, logvar, loss, size, sigma.stride(0), logvar.stride(0))
    launch(uncertainty_loss_kernel, grid, *args, SIGMA_DATA=sigma_data, BLOCK=BLOCK, num_warps=8)
    return loss


@triton.jit
def uncertainty_loss_backward_kernel(
    g_ptr, d_ptr, y_ptr, sigma_ptr, u_ptr, dd_ptr, du_ptr, L, stride_g, stride_sigma, stride_u,
    SIGMA_DATA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dD = 2g·λ/exp(u)·(D − y), and of the whole image, which a program has, du = Σg − λ/exp(u)·Σg·(D − y)²."""
    image = tl.program_id(0).to(tl.int64)
    weight, _, e = loss_weight(sigma_ptr, u_ptr, image, stride_sigma, stride_u, SIGMA_DATA)
    of_one, of_square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, L, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + image * L + offs, offs < L, other=0.0).to(tl.float32)
        error = d - tl.load(y_ptr + image * L + offs, offs < L, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + (image * L + offs) * stride_g, offs < L, other=0.0).to(tl.float32)
        of_one += g
        of_square += g * (error * error)
        tl.store(dd_ptr + image * L + offs, (g * weight * (2 * error)).to(dd_ptr.dtype.element_ty), offs < L)
    du = tl.sum(of_one, axis=0) - tl.sum(of_square, axis=0) * tl.div_rn(weight, e) * e  # of an infinite u NaN, as by autograd
    tl.store(du_ptr + image, du.to(du_ptr.dtype.element_ty))


def uncertainty_loss_backward_triton(
    g: Tensor, denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float
) -> tuple[Tensor, Tensor]:
    """g is often a single number: the loss is summed."""
    dd, du = torch.empty_like(denoised), logvar.new_empty(len(logvar))
    size = denoised[0].numel() if len(denoised) else 0
    single = not any(g.stride())
    g = g[(slice(1),) * g.ndim] if single else g.contiguous()
    args = (g, denoised, images, sigma, logvar, dd, du, size, int(not single), sigma.stride(0), logvar.stride(0))
    launch(uncertainty_loss_backward_kernel, (len(denoised),), *args, SIGMA_DATA=sigma_data, BLOCK=BLOCK, num_warps=8)
    return dd, du


_uncertainty_loss = register(
    "uncertainty_loss", eager.uncertainty_loss, lambda denoised, *_: torch.empty_like(denoised), uncertainty_loss_triton
)
_uncertainty_loss_backward = register(
    "uncertainty_loss_backward", eager.uncertainty_loss_backward,
    lambda g, denoised, images, sigma, logvar, sigma_data: (torch.empty_like(denoised), logvar.new_empty(len(logvar))),
    uncertainty_loss_backward_triton,
)  # fmt: skip


def _save(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.sigma_data = inputs
    ctx.save_for_backward(*tensors)


def _autograd(ctx: FunctionCtx, g: Tensor) -> tuple[Tensor | None, ...]:
    """That of σ in plain PyTorch: training does not ask for it."""
    dd, du = _uncertainty_loss_backward(g, *ctx.saved_tensors, ctx.sigma_data)
    _, needs_images, needs_sigma, _, _ = ctx.needs_input_grad
    dsigma = eager.uncertainty_loss_dsigma(g, *ctx.saved_tensors, ctx.sigma_data) if needs_sigma else None
    return dd, -dd if needs_images else None, dsigma, du, None


register_derivative(_uncertainty_loss, _save, _autograd)


def uncertainty_loss(denoised: Tensor, images: Tensor, sigma: Tensor, logvar: Tensor, sigma_data: float) -> Tensor:
    """`λ(σ)/exp(u)·(denoised − images)² + u` for each element: images `[N, …]`, σ and u = logvar `[N]`."""
    for name, x in (("denoised", denoised), ("images", images)):
        check_dense(name, x)
        check_shape(name, x, denoised.shape)
        check_like(name, x, "denoised", denoised)
    for name, x in (("sigma", sigma), ("logvar", logvar)):
        check_shape(name, x, denoised.shape[:1])
        check_like(name, x, "denoised", denoised)
    return _uncertainty_loss(denoised, images, sigma, logvar, sigma_data)
