"""The quickened interpreter (`tests.interpreter`) still refuses integers that do not fit their type."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from kernels.jit import INTERPRET
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
