"""The ops of `kernels` against `kernels.reference`: values and every gradient, in every dtype and at the edges."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import kernels
from kernels import reference
from kernels.jit import INTERPRET
from kernels.reference import Factors
from kernels.registration import on_triton
from tests.conftest import relative_error
from tests.op_cases import BAD, CASES, DTYPES, Case, Guarded, every_case
from tests.tolerances import ALIKE, EXACT

pytestmark = pytest.mark.filterwarnings(r"ignore:.*(torch.float64|a raw weight of|a weight of):kernels.FallbackWarning")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_every_op_has_a_case():
    assert {case.op for case in CASES.values()} == set(kernels.coverage())


@every_case
@every_dtype
def test_values_and_gradients(case, dtype, device):
    inputs = case.inputs(dtype, device)
    before = [x.detach().clone() for x in inputs]
    case.check(kernels, inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before)), "an input was written to"
    assert all(y.is_contiguous() for y in case.outputs(kernels, inputs))


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs programs one after the other")
@every_case
@every_dtype
def test_two_runs_give_the_same_bits(case, dtype, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # convolutions are the library's
    first, second = (case.run(kernels, case.inputs(dtype, device)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", [c for c in CASES.values() if kernels.coverage()[c.op] == "triton"], ids=lambda c: f"{c.op}{c.shapes[0]}")
def test_nothing_else_is_written_or_read(case, device, monkeypatch):
    """And every element of the outputs is written."""
    if not on_triton(device):
        pytest.skip("no kernels: TRITON_INTERPRET=1 or a CUDA device")
    guarded = Guarded()
    plain = case.inputs(case.kernel_dtype, device)
    inputs = [guarded.empty(x.shape, dtype=x.dtype, device=device).copy_(x.detach()).requires_grad_() for x in plain]
    with monkeypatch.context() as patched:
        guarded.patch(patched)
        actual = case.run(kernels, inputs)
    assert len(guarded.memory) >= len(actual) and guarded.intact()
    case.compare(actual, plain)


def test_weights_of_one_input(device):
    """All but ε of a gradient is projected away: the error is measured against the gradient before that."""
    case = Case("mp_weight", [(7, 1)])
    y, dw = case.run(kernels, case.inputs(torch.float32, device))
    exact = case.inputs(torch.float64, device)
    expected, gradient = case.run(reference, exact)
    assert relative_error(y, expected) < EXACT[torch.float32]
    assert (dw - gradient).norm() < EXACT[torch.float32] * (1 / exact[0]).norm()


def test_half_precision_weights_are_prepared_in_fp32(device):
    w = torch.randn(8, 40, 3, 3, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    y, expected = (module.mp_weight(w, dtype=torch.float16) for module in (kernels, reference))
    assert y.dtype == torch.float16
    assert relative_error(y, expected) < ALIKE
    grads = [torch.autograd.grad(out, w, torch.ones_like(out))[0] for out in (y, expected)]
    assert grads[0].dtype == torch.float32
    assert relative_error(*grads) < EXACT[torch.float32]


SMALL = {
    "mp_weight": Case("mp_weight", [(6, 2, 3, 3), ()], {"heads": 1}),
    "mp_weight factors": Case("mp_weight", [(2, 3, 1, 1), ()], {"factors": Factors(1, 0.5, 2.0)}),
    "conv_silu": Case("conv_silu", [(2, 2, 3, 2), (9, 2, 2), (2, 2)]),
    "mp_weight up": Case("mp_weight", [(3, 2, 3, 3), ()], {"up": True, "factors": Factors(1, 0.5, 2.0)}),
    "conv_silu_up": Case("conv_silu_up", [(2, 2, 1, 2), (16, 2, 2), (2, 2)]),
    "mp_fourier": Case("mp_fourier", [(2,), (3,), (3,)]),
    "precondition_input": Case("precondition_input", [(2, 2, 1, 3), (2,)], {"sigma_data": 0.5}, positive=(1,)),
    "precondition_output": Case("precondition_output", [(2, 1, 3, 4), (2, 2, 1, 3), (2,)], {"sigma_data": 0.5}, positive=(2,)),
    "uncertainty_loss": Case("uncertainty_loss", [(2, 1, 2, 2), (2, 1, 2, 2), (2,), (2,)], {"sigma_data": 0.5}, positive=(2,)),
    "mp_silu": Case("mp_silu", [(2, 5)]),
    "cat_silu": Case("cat_silu", [(1, 2, 2, 2), (1, 2, 2, 3)], {"t": 0.4}),
    "pixel_norm_silu": Case("pixel_norm_silu", [(1, 2, 2, 3)]),
    "conv_sum": Case("conv_sum", [(1, 2, 3, 2), (9, 2, 2), (1, 2, 3, 2)], {"t": 0.3, "clip": 0.6}),
    "conv_cat_sum": Case(
        "conv_cat_sum",
        [(1, 2, 2, 2), (9, 2, 2), (1, 2, 2, 2), (1, 2, 2, 1), (1, 2, 3)],
        {"clip": 0.6},
    ),
    "residual_branch_norm": Case("residual_branch_norm", [(1, 2, 4, 2), (9, 3, 2), (1, 3), (9, 2, 3)], {"t": 0.3, "down": True}),
    "residual_branch_cat": Case(
        "residual_branch_cat",
        [(1, 2, 2, 2), (1, 2, 2, 1), (9, 2, 3), (1, 2), (9, 2, 2), (1, 2, 3)],
        {"cat_t": 0.4},
    ),
    "residual_branch_silu": Case("residual_branch_silu", [(1, 2, 2, 2), (9, 3, 2), (1, 3), (9, 2, 3)], {"t": 0.3}),
    "residual_branch_up": Case("residual_branch_up", [(1, 2, 1, 2), (16, 3, 2), (1, 3), (9, 2, 3)], {"t": 0.3}),
    "attention_branch": Case(
        "attention_branch", [(1, 2, 2, 4), (1, 12, 4), (1, 4, 4)], {"heads": 2, "t": 0.3}
    ),
    "cosine_attention": Case("cosine_attention", [(1, 2, 2, 2 * 3 * 2)], {"heads": 2}),
    "resample": Case("resample", [(1, 2, 1, 2)], {"mode": "up"}),
}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_gradients_are_those_of_finite_differences(case):
    assert torch.autograd.gradcheck(lambda *xs: case.outputs(kernels, xs), case.inputs(torch.float64), fast_mode=False)


@pytest.mark.parametrize("name", ["mp_weight 3x3", "mp_weight linear gain", "pixel_norm_silu", "cosine_attention"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_rows(name, dtype, device):
    case = CASES[name]
    inputs = case.inputs(dtype, device)
    with torch.no_grad():
        inputs[0][0] = 0
        inputs[0][1, ..., : inputs[0].shape[-1] // 2] = 0
    for a, b in zip(case.run(kernels, inputs), case.run(reference, inputs)):
        assert a.isfinite().all()
        assert relative_error(a, b) < EXACT[dtype]


def faults(case: Case, i: int, x: Tensor) -> list[tuple[int, float]]:
    """NaN and both infinities, each at the first, a middle and the last element of the i-th tensor; in the interpreter, which
    takes its time, each at one of these, and of a convolution one."""
    positions = 0, x.numel() // 2, x.numel() - 1
    if INTERPRET:
        once = [(positions[(i + j) % 3], BAD[(i + 2 * j) % 3]) for j in range(3)]
        return once[:1] if case.is_convolution else once
    return list(product(dict.fromkeys(positions), BAD))


@every_case
def test_non_finite_values_propagate(case, device):
    """Into outputs and gradients. (Of an infinite gain, where autograd forms Inf − Inf in the projection, into outputs only.)"""
    for i, shape in enumerate(case.shapes):
        for position, bad in faults(case, i, case.inputs(torch.float32)[i]):
            inputs = case.inputs(case.kernel_dtype, device)
            with torch.no_grad():
                inputs[i].view(-1)[position] = bad
            if case.op == "mp_weight" and shape in [(), (1,)]:
                torch.testing.assert_close(*(case.outputs(module, inputs) for module in (kernels, reference)), equal_nan=True)
            else:
                case.check(kernels, inputs)


@every_case
def test_non_finite_gradients_propagate(case, device):
    inputs = case.inputs(case.kernel_dtype, device)
    for output, y in enumerate(case.outputs(reference, inputs)):
        for fault in faults(case, output, y):
            case.compare(case.run(kernels, inputs, (output, *fault)), inputs, (output, *fault))


@every_dtype
@pytest.mark.parametrize("clip", [256.0, 200.0, 448.0, 0.75])
def test_gradient_stops_where_the_output_is_at_the_clip(dtype, clip, device):
    """The reference lets it pass at the bound itself; the ops see only the clipped output and stop it there."""
    at = torch.tensor(clip, dtype=torch.float64)
    step = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(at)).item()  # between neighbours at the clip
    values = [clip, -clip, clip + step, -clip - step, clip - step, 2 * clip, 0, torch.inf]
    residual = torch.tensor(values, dtype=dtype, device=device).reshape(1, 1, 1, 8)
    passes = torch.tensor([0, 0, 0, 0, 1, 0, 1, 0]).to(residual).reshape(residual.shape)
    zeros, w, w_skip = torch.zeros_like(residual), residual.new_zeros(9, 8, 8), torch.eye(8, 16).to(residual)[None]
    calls = {
        "mp_sum": lambda r: kernels.mp_sum(r, zeros, t=0.0, clip=clip),  # weights 1 and 0
        "conv_sum": lambda r: kernels.conv_sum(zeros, w, r, t=0.0, clip=clip),
        "conv_cat_sum": lambda r: kernels.conv_cat_sum(zeros, w, r.nan_to_num(posinf=4 * clip), zeros, w_skip, clip=clip),
    }  # fmt: skip
    for name, call in calls.items():
        r = residual.clone().requires_grad_()
        y = call(r)
        assert y.abs().max() == clip
        assert torch.equal(torch.autograd.grad(y, r, torch.ones_like(y))[0], passes), name


@every_dtype
@pytest.mark.parametrize("clip", [256.0, 0.75])
def test_gradient_stops_where_what_is_read_is_at_the_clip(dtype, clip, device):
    """And passes just below it; the second source's passes everywhere."""
    below = clip * (1 - torch.finfo(dtype).eps)
    x = torch.tensor([clip, -clip, below, -below, 0, clip / 2, 2 * clip, torch.nan], dtype=dtype, device=device).reshape(1, 1, 1, 8)
    passes = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]).to(device).reshape(x.shape) != 0
    w, m, b = x.new_zeros(9, 8, 8), x.new_zeros(1, 8), x.new_ones(x.shape)
    calls = {
        "fork": lambda x: sum(kernels.fork(x, clip)),
        "residual_branch_silu": lambda x: kernels.residual_branch_silu(x, w, m, w, 0.3, clip, clip),
        "residual_branch_cat": lambda x: kernels.residual_branch_cat(
            x, b, x.new_zeros(9, 8, 16), m, w, torch.eye(8, 16).to(x)[None], 0.5, clip, clip
        ),
    }
    for name, call in calls.items():
        r = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(r).sum(), r)
        assert torch.equal(grad != 0, passes), name


@every_case
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(case, guard):
    inputs = case.inputs(torch.float32)
    expected = case.outputs(kernels, inputs)
    saved = []
    with guard(), saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        actual = case.outputs(kernels, inputs)
    assert not saved
    for a, b in zip(actual, expected):
        assert not a.requires_grad
        assert torch.equal(a, b)


@pytest.mark.parametrize("module", [kernels, reference], ids=["op", "reference"])
@pytest.mark.parametrize("name", [f"residual_branch_{kind}" for kind in ("norm", "norm_fork", "silu", "up", "cat")] + ["attention_branch"])
def test_activated_results(name, module):
    """MP-SiLU(activate·y), without a gradient of its own."""
    case = CASES[name]
    y, s, *_ = getattr(module, name)(*case.inputs(torch.float64), **case.kwargs, activate=0.7)
    assert y.requires_grad and not s.requires_grad
    torch.testing.assert_close(s, reference.mp_silu(y.detach(), 0.7))


@every_case
def test_partial_gradients(case):
    """Any single input may be the only one that needs a gradient: frozen weights, first layers."""
    for i in range(len(case.shapes)):
        inputs = [x if i == j else x.detach() for j, x in enumerate(case.inputs(torch.float64))]
        grads, reached = [], []
        for module in (kernels, reference):
            outputs = case.outputs(module, inputs)
            reached.append([y.requires_grad for y in outputs])
            outputs = [y for y in outputs if y.requires_grad]
            grads += torch.autograd.grad(outputs, inputs[i], [torch.ones_like(y) for y in outputs])
        assert reached[0] == reached[1] and relative_error(*grads) < EXACT[torch.float64], f"input {i}"


@every_case
def test_flops_and_saved_tensors_on_meta(case):
    """As many FLOPs as the reference, forward and backward."""
    flops = []
    for module in (kernels, reference):
        inputs = case.inputs(torch.float16, "meta")
        with FlopCounterMode(display=False) as counter:
            results = case.run(module, inputs)
        assert [g.shape for g in results[-len(inputs) :]] == [x.shape for x in inputs]
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1]


@every_case
def test_no_more_is_saved_than_by_autograd(case):
    sizes = []
    for module in (kernels, reference):
        saved = {}
        keep = saved.setdefault
        with saved_tensors_hooks(lambda x, keep=keep: keep(x.untyped_storage().data_ptr(), x), lambda x: x):
            inputs = case.inputs(torch.float32)
            outputs = case.outputs(module, inputs)  # alive, so that no address is used twice
        sizes.append(sum(x.untyped_storage().nbytes() for x in saved.values()))
        del outputs
    assert sizes[0] <= sizes[1]


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(kernels.mp_silu(x), x, torch.ones(2, 3, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_retained_graph_gives_the_same_gradients_again():
    for name in ("mp_weight 3x3", "cat_silu", "conv_silu", "conv_cat_sum clip", "cosine_attention", "pixel_norm_silu"):
        inputs = CASES[name].inputs(torch.float32)
        outputs = CASES[name].outputs(kernels, inputs)
        ones = [torch.ones_like(y) for y in outputs]
        first, second = (torch.autograd.grad(outputs, inputs, ones, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second)), name
