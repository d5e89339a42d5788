"""Rows of the table of tiles that name the library: its convolutions with an epilogue kernel, in training only."""

from collections import Counter

import pytest
import torch

import kernels
from kernels import branches_eager, conv_tiles, convolve, eager, reference, registration, wgrad
from kernels.jit import INTERPRET
from tests.conftest import relative_error
from tests.op_cases import CASES, Case

pytestmark = pytest.mark.skipif(not INTERPRET, reason="about kernels")
BRANCH = CASES["residual_branch_norm"]
WIDE = Case("residual_branch_norm", [(5, 4, 4, 8), (9, 72, 8), (5, 72), (1, 8, 72)], {"t": 0.3, "clip": 0.5})
OPS = [name for name, case in CASES.items() if case.op.startswith(("conv", "residual_branch")) and case.shapes[0][3] > 1]


class Rows:
    """A table that names the library for one kind of convolution, whatever its size."""

    def __init__(self, op: str):
        self.op = op

    def __contains__(self, row: tuple) -> bool:
        return row[1] == self.op


@pytest.fixture(params=["forward", "input gradient", "weight gradient"])
def op(request, monkeypatch):
    monkeypatch.setattr(conv_tiles, "LIBRARY", Rows(request.param))
    return request.param


@pytest.fixture
def started(monkeypatch):
    """How often each kernel has started."""
    counts = Counter()

    def counting(launch):
        return lambda kernel, *args, **kwargs: counts.update([kernel.__name__]) or launch(kernel, *args, **kwargs)

    for module in (convolve, wgrad):
        monkeypatch.setattr(module, "launch", counting(module.launch))
    return counts


@pytest.mark.parametrize("case", [*(CASES[name] for name in OPS), WIDE], ids=[*OPS, "wide"])
def test_no_worse_than_pytorch(case, op):
    inputs = case.inputs(torch.float16)
    exact = case.run(reference, [x.detach().float().requires_grad_() for x in inputs])
    for a, b, truth in zip(case.run(kernels, inputs), case.run(reference, inputs), exact, strict=True):
        assert relative_error(a.float(), truth) < max(2 * relative_error(b.float(), truth), torch.finfo(torch.float16).eps)


def test_a_result_of_two_tensors_is_in_the_table_without_the_second(monkeypatch, started):
    monkeypatch.setattr(conv_tiles, "LIBRARY", {conv_tiles.row(90, "input gradient", 9, 4, 4, 16, 24)})
    g, w = torch.randn(1, 4, 4, 16).half(), torch.randn(9, 16, 24).half()
    both = convolve.convolve(g, w, transposed=True, training=True, rest=convolve.Rest(8))
    assert [y.shape[3] for y in both] == [16, 8] and not started


def test_kernels_of_other_kinds_stay(op, started):
    """Of two convolutions forward and two for the input gradients, of which one has nothing after it; both weight gradients
    are one launch."""
    BRANCH.run(kernels, BRANCH.inputs(torch.float16))
    replaced = 0 if op == "weight gradient" else 2
    assert started["conv_kernel"] == 4 - replaced
    assert started["epilogue_kernel"] == replaced - (op == "input gradient")
    assert started["wgrad_kernel"] == (0 if op == "weight gradient" else 1)


@pytest.mark.parametrize("name", OPS)
def test_fp32_around_the_library(name, started, monkeypatch):
    """In fp32 the library convolves, kernels do all that is around it, and nothing is left to `kernels.eager`."""
    for module in (eager, branches_eager):
        for op in vars(module).keys() & registration.OPS.keys():
            monkeypatch.setattr(module, op, None)
    CASES[name].run(kernels, CASES[name].inputs(torch.float32))
    assert not started["conv_kernel"] and not started["wgrad_kernel"]
    assert started["epilogue_kernel"] or CASES[name].op in ("conv", "conv_cat_sum")


def test_sampling_takes_kernels(op, started):
    with torch.no_grad():
        BRANCH.outputs(kernels, BRANCH.inputs(torch.float16))
    assert started == {"conv_kernel": 2}
