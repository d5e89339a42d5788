"""The quickened interpreter (`tests.interpreter`) still refuses integers that do not fit their type, and has the same types."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.jit import INTERPRET
from tests import interpreter as quickened
from tests.__main__ import INTERPRETED

needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")


@triton.jit
def calculate(x, y, OPERATION: tl.constexpr):
    if OPERATION == "add":
        return x + y
    elif OPERATION == "sub":
        return x - y
    else:
        return x * y


@triton.jit
def calculation_kernel(x, y, out_ptr, OPERATION: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        x = x.to(tl.int64)
    tl.store(out_ptr, calculate(x, y, OPERATION))


def test_every_file_of_kernels_is_run_in_it():
    """One that is not listed would skip its tests in every run. The gate's do compile."""
    words = "INTERPRET", "on_triton", "memory, arch", "op_cases"
    paths = [path for path in Path(__file__).parent.glob("test_*.py") if any(word in path.read_text() for word in words)]
    files = {path.stem.removeprefix("test_") for path in paths}
    assert files - {"compile_gate", "layers"} <= set(INTERPRETED)


@needs_interpreter
@pytest.mark.parametrize(("operation", "x", "y"), [("add", 2**31 - 2, 2), ("sub", -(2**31) + 1, 2), ("mul", 2**16, 2**15)])
def test_integers_that_do_not_fit(operation, x, y):
    """One less does, and so does 64 bits."""
    out = torch.zeros((), dtype=torch.int64)
    with pytest.raises(InterpreterError, match=f"int32 overflow detected for operation {operation}"):
        calculation_kernel[(1,)](x, y, out, operation, False)
    exact = {"add": x + y, "sub": x - y, "mul": x * y}[operation]
    calculation_kernel[(1,)](x, y, out, operation, True)
    assert out.item() == exact
    calculation_kernel[(1,)](x - (1 if exact > 0 else -1), y, out, operation, False)
    assert abs(out.item()) < abs(exact)


POINTERS = tl.pointer_type(tl.float16), tl.pointer_type(tl.float32), tl.pointer_type(tl.float16, const=True)
TYPES = tl.int1, tl.int64, tl.float16, tl.bfloat16, *POINTERS


@needs_interpreter
@pytest.mark.parametrize("shape", [[4], [8], [2, 1, 8]], ids=str)
def test_types_are_those_of_the_interpreter(shape):
    """Which are made once, and asked for again."""
    for kind in TYPES * 2:
        plain = object.__new__(tl.block_type)
        quickened._make_any_block_type(plain, kind, shape)
        found = tl.block_type(kind, [tl.constexpr(n) for n in shape])
        assert vars(found) == vars(plain) and found.with_element_ty(tl.int8).scalar == tl.int8
        assert interpreter._get_np_dtype(found) == quickened._find_numpy_type(plain)
        x = tl.tensor(None, found)
        assert (x.type, x.dtype, [n.value for n in x.shape]) == (plain, kind, shape) and x.numel.value == plain.numel
    x = tl.tensor(None, tl.float32)
    assert (x.type, x.dtype, len(x.shape), x.numel.value) == (tl.float32, tl.float32, 0, 1)
