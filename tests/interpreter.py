"""Triton's interpreter in a third of its time; what it computes and what it checks stay the same.

At every call of a device function it looks through all of `triton.language` for what to replace, mostly to find it
replaced; that a sum or product of integers fits its type it finds out by some ten interpreted operations; and each of
these makes the types of its blocks anew, of which there are few.
"""

import math
from functools import cache
from inspect import getmembers
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import _unwrap_if_constexpr as unwrapped
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def quicken() -> None:
    """From here on."""
    interpreter._patch_lang = _patch_languages
    interpreter._patch_builtin = _replace_builtins
    interpreter._get_np_dtype = _numpy_type
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.block_type.__init__ = _make_block_type
    tl.tensor.__init__ = _make_tensor


_patch_any = interpreter._patch_lang


def _patch_languages(fn: FunctionType) -> Any:
    return _patch_any(_languages(fn))


@cache
def _languages(fn: FunctionType) -> SimpleNamespace:
    """Of its globals those that are looked for."""
    return SimpleNamespace(__globals__={name: x for name, x in fn.__globals__.items() if x is tl or x is tl.core})


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


_broadcast_any = TritonSemantic.broadcast_impl_value
_make_any_block_type = tl.block_type.__init__
_find_numpy_type = interpreter._get_np_dtype
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_numpy_types: dict[str, np.dtype] = {}


def _broadcast(self: TritonSemantic, a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values:
        return a, b
    return _broadcast_any(self, a, b)


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = str(element_ty), getattr(element_ty, "address_space", None), *map(unwrapped, shape)
    if key not in _block_types:
        _make_any_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    vars(self).update(_block_types[key])


def _make_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(*(type.shape.values if type.is_block() else ()))


@cache
def _sizes(*shape: int) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))


def _numpy_type(of: tl.dtype) -> np.dtype:
    name = of.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _find_numpy_type(of)
    return _numpy_types[name]
