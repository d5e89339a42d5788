"""The ops of `kernels` against `kernels.reference`: values and every gradient, in every dtype and at the edges."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import kernels
from kernels import reference
from kernels.jit import INTERPRET
from tests.conftest import relative_error

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-6}
HALF = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]  # the interpreter's bf16 does not round
DTYPES = [torch.float64, torch.float32, *HALF]
pytestmark = pytest.mark.filterwarnings(r"ignore:.*(torch.float64|a raw weight of|t = 0):kernels.FallbackWarning")


@dataclass
class Case:
    """A call of the op: shapes of the inputs and keyword arguments. `scale` multiplies one input, by index."""

    op: str
    shapes: list[tuple[int, ...]]
    kwargs: dict = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        """Fresh leaves. A prepared weight (the shapes of three axes) gets unit-norm rows."""
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        for i, x in enumerate(values):
            if x.ndim == 3:
                x /= (x.shape[0] * x.shape[2]) ** 0.5
            x *= self.scale.get(i, 1)
        return [x.to(device, dtype).requires_grad_() for x in values]

    def run(self, module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, then the gradients of all inputs for fixed random gradients of the outputs."""
        outputs = self.outputs(module, inputs)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, grads)]

    def outputs(self, module, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        kwargs = self.kwargs
        if self.op == "mp_weight":
            kwargs = {"dtype": inputs[0].dtype, **kwargs}
        y = getattr(module, self.op)(*inputs, **kwargs)
        return y if isinstance(y, tuple) else (y,)


CASES = {
    "mp_weight 3x3": Case("mp_weight", [(40, 8, 3, 3)]),
    "mp_weight 1x1 gain": Case("mp_weight", [(8, 40, 1, 1), ()]),
    "mp_weight linear gain": Case("mp_weight", [(5, 7), (1,)]),
    "mp_weight heads": Case("mp_weight", [(2 * 4 * 3, 8, 1, 1)], {"heads": 2}),
    "mp_weight small": Case("mp_weight", [(5, 8, 3, 3)], {}, {0: 1e-4}),
    "linear": Case("linear", [(5, 8), (1, 40, 8)]),
    "conv 3x3": Case("conv", [(2, 5, 3, 8), (9, 40, 8)]),
    "conv one channel": Case("conv", [(1, 5, 3, 1), (9, 1, 1)]),
    "conv 1x1": Case("conv", [(1, 3, 5, 40), (1, 8, 40)]),
    "conv_silu": Case("conv_silu", [(3, 5, 3, 8), (9, 40, 8), (3, 40)]),
    "conv_silu one image": Case("conv_silu", [(1, 1, 1, 8), (1, 8, 8), (1, 8)]),
    "mp_silu": Case("mp_silu", [(3, 5, 3, 8)]),
    "mp_silu vector": Case("mp_silu", [(3, 40)], {}, {0: 20}),
    "mp_sum": Case("mp_sum", [(3, 8), (3, 8)], {"t": 0.3, "clip": 0.5}),
    "cat_silu": Case("cat_silu", [(2, 3, 5, 8), (2, 3, 5, 40)], {"t": 0.4}),
    "cat_silu equal": Case("cat_silu", [(1, 3, 3, 40), (1, 3, 3, 40)], {"t": 0.5}),
    "pixel_norm_silu": Case("pixel_norm_silu", [(2, 3, 5, 40)]),
    "down_pixel_norm_silu": Case("down_pixel_norm_silu", [(1, 6, 10, 8)]),
    "conv_sum": Case("conv_sum", [(2, 5, 3, 8), (9, 40, 8), (2, 5, 3, 40)], {"t": 0.3}),
    "conv_sum clip": Case("conv_sum", [(1, 5, 3, 8), (9, 40, 8), (1, 5, 3, 40)], {"t": 0.3, "clip": 0.5}),
    "conv_sum 1x1": Case("conv_sum", [(2, 3, 5, 40), (1, 8, 40), (2, 3, 5, 8)], {"t": 0.5, "clip": 0.5}),
    "conv_cat_sum": Case(
        "conv_cat_sum", [(2, 5, 3, 40), (9, 8, 40), (2, 5, 3, 8), (2, 5, 3, 40), (1, 8, 48)], {"cat_t": 0.4, "t": 0.3}
    ),
    "conv_cat_sum clip": Case(
        "conv_cat_sum",
        [(1, 3, 3, 8), (9, 40, 8), (1, 3, 3, 8), (1, 3, 3, 8), (1, 40, 16)],
        {"cat_t": 0.5, "t": 0.3, "clip": 0.5},
    ),
    "residual_branch": Case(
        "residual_branch", [(2, 5, 3, 8), (9, 40, 8), (2, 40), (9, 16, 40), (2, 5, 3, 16)], {"t": 0.3}
    ),
    "residual_branch clip": Case(
        "residual_branch", [(3, 4, 4, 16), (9, 24, 16), (3, 24), (1, 8, 24), (3, 4, 4, 8)], {"t": 0.4, "clip": 0.5}
    ),
    "residual_branch_cat": Case(
        "residual_branch_cat",
        [(1, 3, 5, 8), (1, 3, 5, 16), (9, 16, 24), (1, 16), (9, 40, 16), (1, 40, 24)],
        {"cat_t": 0.4, "t": 0.3, "clip": 0.5},
    ),
    "residual_branch_cat no clip": Case(
        "residual_branch_cat",
        [(2, 4, 4, 16), (2, 4, 4, 8), (1, 8, 24), (2, 8), (1, 16, 8), (1, 16, 24)],
        {"cat_t": 0.5, "t": 0.3},
    ),
    "residual_branch_silu": Case("residual_branch_silu", [(2, 5, 3, 16), (9, 8, 16), (2, 8), (9, 16, 8)], {"t": 0.3}),
    "residual_branch_silu clip": Case(
        "residual_branch_silu", [(2, 5, 7, 8), (1, 24, 8), (2, 24), (9, 8, 24)], {"t": 0.3, "clip": 0.5}
    ),
    "cosine_attention": Case("cosine_attention", [(2, 3, 5, 2 * 3 * 40)], {"heads": 2}),
    "cosine_attention two tokens": Case("cosine_attention", [(1, 1, 2, 2 * 3 * 8)], {"heads": 2}),
    "resample up": Case("resample", [(2, 3, 5, 8)], {"mode": "up"}),
    "resample up one channel": Case("resample", [(1, 3, 5, 1)], {"filter": [1, 1], "mode": "up"}),
    "resample down": Case("resample", [(2, 4, 6, 8)], {"mode": "down"}),
    "resample long": Case("resample", [(2, 4, 6, 8)], {"filter": (1, 3, 3, 1), "mode": "up"}),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def test_every_op_has_a_case():
    assert {case.op for case in CASES.values()} == set(kernels.coverage())


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(case, dtype):
    inputs = case.inputs(dtype)
    before = [x.detach().clone() for x in inputs]
    actual, expected = case.run(kernels, inputs), case.run(reference, inputs)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype == dtype
        assert relative_error(a, b) < TOLERANCE[dtype], f"result {i}"
    assert all(torch.equal(x, y) for x, y in zip(inputs, before)), "an input was written to"
    if case.op != "mp_weight":
        assert all(y.is_contiguous() for y in actual[: len(actual) - len(inputs)])


@every_case
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_no_worse(case, dtype):
    inputs = case.inputs(dtype)
    exact = case.run(reference, [x.detach().float().requires_grad_() for x in inputs])
    for i, (a, b, truth) in enumerate(zip(case.run(kernels, inputs), case.run(reference, inputs), exact)):
        assert a.dtype == b.dtype == dtype
        rounding = torch.finfo(dtype).eps / 4  # of one rounding, about
        assert relative_error(a.float(), truth) < 2 * max(relative_error(b.float(), truth), rounding), f"result {i}"


@pytest.mark.parametrize("case", [c for c in CASES.values() if len(c.shapes[0]) == 4 and c.op != "mp_weight"], ids=str)
def test_no_images(case):
    inputs = [x[:0] if x.ndim in (2, 4) else x for x in case.inputs(torch.float32)]
    for a, b in zip(case.run(kernels, inputs), case.run(reference, inputs)):
        assert a.shape == b.shape
        assert torch.equal(a, b)


def test_half_precision_weights_are_prepared_in_fp32():
    w = torch.randn(8, 40, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y, expected = (module.mp_weight(w, dtype=torch.float16) for module in (kernels, reference))
    assert y.dtype == torch.float16
    assert relative_error(y.float(), expected.float()) < 1e-4
    grads = [torch.autograd.grad(out, w, torch.ones_like(out))[0] for out in (y, expected)]
    assert grads[0].dtype == torch.float32
    assert relative_error(*grads) < TOLERANCE[torch.float32]


SMALL = {
    "mp_weight": Case("mp_weight", [(6, 2, 3, 3), ()], {"heads": 1}),
    "conv_silu": Case("conv_silu", [(2, 2, 3, 2), (9, 2, 2), (2, 2)]),
    "mp_silu": Case("mp_silu", [(2, 5)]),
    "cat_silu": Case("cat_silu", [(1, 2, 2, 2), (1, 2, 2, 3)], {"t": 0.4}),
    "pixel_norm_silu": Case("pixel_norm_silu", [(1, 2, 2, 3)]),
    "conv_sum": Case("conv_sum", [(1, 2, 3, 2), (9, 2, 2), (1, 2, 3, 2)], {"t": 0.3, "clip": 0.6}),
    "conv_cat_sum": Case(
        "conv_cat_sum",
        [(1, 2, 2, 2), (9, 2, 2), (1, 2, 2, 2), (1, 2, 2, 1), (1, 2, 3)],
        {"cat_t": 0.4, "t": 0.3, "clip": 0.6},
    ),
    "residual_branch": Case(
        "residual_branch", [(2, 2, 2, 2), (9, 2, 2), (2, 2), (9, 2, 2), (2, 2, 2, 2)], {"t": 0.3, "clip": 0.6}
    ),
    "residual_branch_cat": Case(
        "residual_branch_cat",
        [(1, 2, 2, 2), (1, 2, 2, 1), (9, 2, 3), (1, 2), (9, 2, 2), (1, 2, 3)],
        {"cat_t": 0.4, "t": 0.3, "clip": 0.6},
    ),
    "residual_branch_silu": Case("residual_branch_silu", [(1, 2, 2, 2), (9, 3, 2), (1, 3), (9, 2, 3)], {"t": 0.3, "clip": 0.6}),
    "cosine_attention": Case("cosine_attention", [(1, 2, 2, 2 * 3 * 2)], {"heads": 2}),
    "resample": Case("resample", [(1, 2, 1, 2)], {"mode": "up"}),
}


@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_gradients_are_those_of_finite_differences(case):
    assert torch.autograd.gradcheck(lambda *xs: case.outputs(kernels, xs), case.inputs(torch.float64), fast_mode=False)


@pytest.mark.parametrize("name", ["mp_weight 3x3", "mp_weight linear gain", "pixel_norm_silu", "cosine_attention"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_rows(name, dtype):
    case = CASES[name]
    inputs = case.inputs(dtype)
    with torch.no_grad():
        inputs[0][0] = 0
        inputs[0][1, ..., : inputs[0].shape[-1] // 2] = 0
    for a, b in zip(case.run(kernels, inputs), case.run(reference, inputs)):
        assert a.isfinite().all()
        assert relative_error(a, b) < TOLERANCE[dtype]


@every_case
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_propagate(case, bad):
    for i in range(len(case.shapes)):
        inputs = [x.detach() for x in case.inputs(torch.float32)]
        inputs[i].view(-1)[inputs[i].numel() // 2] = bad
        for a, b in zip(case.outputs(kernels, inputs), case.outputs(reference, inputs)):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)


@every_case
def test_non_finite_gradients_propagate(case):
    results = []
    for module in (kernels, reference):
        inputs = case.inputs(torch.float32)
        outputs = case.outputs(module, inputs)
        grads = [torch.ones_like(y).contiguous() for y in outputs]
        grads[0].view(-1)[0] = torch.nan
        results.append(torch.autograd.grad(outputs, inputs, grads))
    for a, b in zip(*results):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", [256.0, 200.0, 448.0, 0.75])
def test_gradient_stops_where_the_output_is_at_the_clip(dtype, clip):
    """The reference lets it pass at the bound itself; the ops see only the clipped output and stop it there."""
    at = torch.tensor(clip, dtype=torch.float64)
    step = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(at)).item()  # between neighbours at the clip
    values = [clip, -clip, clip + step, -clip - step, clip - step, 2 * clip, 0, torch.inf]
    residual = torch.tensor(values, dtype=dtype).reshape(1, 1, 1, 8)
    passes = torch.tensor([0, 0, 0, 0, 1, 0, 1, 0], dtype=dtype).reshape(residual.shape)
    zeros, w, w_skip = torch.zeros_like(residual), torch.zeros(9, 8, 8, dtype=dtype), torch.eye(8, 16, dtype=dtype)[None]
    calls = {
        "mp_sum": lambda r: kernels.mp_sum(r, zeros, t=0.0, clip=clip),  # weights 1 and 0
        "conv_sum": lambda r: kernels.conv_sum(zeros, w, r, t=0.0, clip=clip),
        "conv_cat_sum": lambda r: kernels.conv_cat_sum(zeros, w, r.nan_to_num(posinf=4 * clip), zeros, w_skip, cat_t=0.5, t=0.0, clip=clip),
    }  # fmt: skip
    for name, call in calls.items():
        r = residual.clone().requires_grad_()
        y = call(r)
        assert y.abs().max() == clip
        assert torch.equal(torch.autograd.grad(y, r, torch.ones_like(y))[0], passes), name


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


@every_case
def test_partial_gradients(case):
    """Any single input may be the only one that needs a gradient: frozen weights, first layers."""
    for i in range(len(case.shapes)):
        inputs = [x if i == j else x.detach() for j, x in enumerate(case.inputs(torch.float64))]
        grads = []
        for module in (kernels, reference):
            outputs = case.outputs(module, inputs)
            grads += torch.autograd.grad(outputs, inputs[i], [torch.ones_like(y) for y in outputs])
        assert relative_error(*grads) < 1e-9, f"input {i}"


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.conv(torch.zeros(1, 2, 2, 3), torch.zeros(9, 8, 4)), "x: 3 channels"),
        (lambda: kernels.conv_sum(torch.zeros(1, 2, 2, 3), torch.zeros(9, 8, 4), torch.zeros(1, 2, 2, 8), 0.3), "x: 3 channels"),
        (lambda: kernels.mp_weight(torch.zeros(4)), r"w: expected .* got \[4\]"),
        (lambda: kernels.cosine_attention(torch.zeros(1, 2, 2, 10), 2), "qkv: 10 channels"),
        (lambda: kernels.resample(torch.zeros(1, 2, 2, 1), (1, 2, 1), "up"), "even-length filter"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
