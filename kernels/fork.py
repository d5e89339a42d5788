"""An activation with several readers, clipped before: the sum of their gradients and the clip's derivative in one pass."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels import eager
from kernels.checks import check_dense
from kernels.modulation import masked_gradient
from kernels.registration import register

fork_backward = register(
    "fork_backward", eager.fork_backward,
    lambda g, other, x, clip: torch.empty_like(x),
    lambda g, other, x, clip: masked_gradient(g, x, 1.0, clip, other),
)  # fmt: skip


class _Fork(torch.autograd.Function):
    """Not an op of the dispatcher: its outputs are its input."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, clip: float, readers: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.clip = clip
        ctx.save_for_backward(x)
        return tuple(x.view_as(x) for _ in range(readers))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        given = [g.contiguous() for g in gradients if g is not None]
        if not given:
            return None, None, None
        total = given[0] if len(given) < 3 else torch.stack(given[:-1]).sum(0)
        return fork_backward(total, given[-1] if len(given) > 1 else None, *ctx.saved_tensors, ctx.clip), None, None


def fork(x: Tensor, clip: float | None, readers: int = 2) -> tuple[Tensor, ...]:
    """x for several readers, whose gradients add up and are 0 where |x| ≥ clip: the derivative of an earlier straight clip."""
    check_dense("x", x)
    if not torch.is_grad_enabled():
        return (x.detach(),) * readers
    return (x,) * readers if clip is None else _Fork.apply(x, clip, readers)
