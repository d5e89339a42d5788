"""Triton's interpreter in half of its time; what it computes and what it checks stay the same.

At every call of a device function it looks through all of `triton.language` for what to replace, mostly to find it
replaced; and that a sum or product of integers fits its type it finds out by some ten interpreted operations.
"""

from functools import cache
from inspect import getmembers
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def quicken() -> None:
    """From here on."""
    interpreter._patch_builtin = _replace_builtins
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


@cache
def _builtins(owner: ModuleType | type) -> list[str]:
    """Asked for before any is replaced."""
    return [name for name, member in getmembers(owner) if tl.core.is_builtin(member)]


def _replace_builtins(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    names = _builtins(owner)
    if names and tl.core.is_builtin(getattr(owner, names[0])):  # all are, or none
        for name in names:
            interpreter._patch_attr(owner, name, getattr(owner, name), builder, scope)


def _check_overflow(self: TritonSemantic, a: tl.tensor, b: tl.tensor, operation: Any) -> None:
    kind = a.type.scalar
    if kind.int_bitwidth < 64:
        exact = OPERATIONS[operation.__name__](*(x.handle.data.astype(np.int64) for x in (a, b)))
        fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
        assert fits, f"{kind} overflow detected for operation {operation.__name__}"
