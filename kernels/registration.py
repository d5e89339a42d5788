"""How an op becomes one node of PyTorch's dispatcher: `edm2::name`, its device implementations, its fake, its FLOPs."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from kernels.fallback import note
from kernels.jit import INTERPRET

Function = Callable[..., Any]


class Implementations(NamedTuple):
    """Who computes an op: `triton` on CUDA (None where there is no kernel), `eager` on a CPU."""

    triton: Function | None
    eager: Function


OPS: dict[str, Implementations] = {}


def on_triton(device: str) -> bool:
    """Do tensors of this type of device go to kernels?"""
    return device == "cuda" or INTERPRET


def register(
    name: str,
    eager: Function,
    fake: Function,
    triton: Function | None = None,
    flops: Function | None = None,
    refuses: Function = lambda *args: None,
) -> Any:
    """Define the op `edm2::name`; all functions have its signature. `fake` makes outputs of the right form.

    CUDA tensors take `triton`, CPU tensors `eager`; in the interpreter these too take `triton`. Without a kernel
    every device takes `eager`. `flops` counts matrix products, 2 per multiply-add, from shapes in place of tensors.
    `refuses` tells why the kernel cannot take its arguments, or None: such a call falls back to `eager`, noted.
    """
    accelerated = triton and _with_fallback(name, eager, triton, refuses)
    OPS[name] = Implementations(accelerated, eager)
    on_cpu = accelerated if accelerated and INTERPRET else eager
    op = torch.library.custom_op(f"edm2::{name}", on_cpu, mutates_args=(), device_types="cpu" if triton else None)
    op.register_fake(fake)
    if accelerated:
        op.register_kernel("cuda", accelerated)
    if flops:
        register_flop_formula(getattr(torch.ops.edm2, name))(lambda *args, out_shape=None, **kwargs: flops(*args, **kwargs))
    return op


def register_derivative(op: Any, save: Function, derivative: Function) -> None:
    """`save(ctx, inputs, output)` in the forward, `derivative(ctx, *gradients)` → those of all inputs.

    An output that nobody uses has the gradient None, not zeros of its size: pre-activations and norms are outputs too.
    """

    def setup(ctx: FunctionCtx, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.nothing = (None,) * len(inputs)
        save(ctx, inputs, output)

    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        return ctx.nothing if all(g is None for g in gradients) else derivative(ctx, *gradients)

    op.register_autograd(backward, setup_context=setup)


def _with_fallback(name: str, eager: Function, triton: Function, refuses: Function) -> Function:
    @wraps(eager)  # whose signature becomes the op's
    def run(*args: Any) -> Any:
        reason = _refused_type(args) or refuses(*args)
        if reason is None:
            return triton(*args)
        note(name, reason)
        return eager(*args)

    return run


def _refused_type(args: tuple[Any, ...]) -> str | None:
    """Kernels compute in fp32: they take fp16, bf16 and fp32."""
    return next((f"{x.dtype}" for x in args if isinstance(x, Tensor) and x.dtype == torch.float64), None)
