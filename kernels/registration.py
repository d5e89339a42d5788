"""How an op becomes one node of PyTorch's dispatcher: `edm2::name`, its device implementations, its fake, its FLOPs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

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
    name: str, eager: Function, fake: Function, triton: Function | None = None, flops: Function | None = None
) -> Any:
    """Define the op `edm2::name`; all functions have its signature. `fake` makes outputs of the right form.

    CUDA tensors take `triton`, CPU tensors `eager`; in the interpreter these too take `triton`. Without a kernel
    every device takes `eager`. `flops` counts matrix products, 2 per multiply-add, from shapes in place of tensors.
    """
    OPS[name] = Implementations(triton, eager)
    on_cpu = triton if triton and INTERPRET else eager
    op = torch.library.custom_op(f"edm2::{name}", on_cpu, mutates_args=(), device_types="cpu" if triton else None)
    op.register_fake(fake)
    if triton:
        op.register_kernel("cuda", triton)
    if flops:
        register_flop_formula(getattr(torch.ops.edm2, name))(lambda *args, out_shape=None, **kwargs: flops(*args, **kwargs))
    return op
