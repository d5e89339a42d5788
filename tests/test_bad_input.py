"""What the ops refuse, in one clear line; what their kernels refuse, which the reference computes; and nothing to do."""

import inspect
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels import attention, reference
from kernels.linear import _refuses as linear_refuses
from kernels.reference import Factors
from kernels.registration import OPS, on_triton
from tests.op_cases import CASES, Case

FAULTS = {
    "axes": lambda x: x.unsqueeze(0).expand(2, *x.shape).contiguous(),
    "channels": lambda x: torch.cat([x, x[..., :1]], dim=-1),
    "integer": lambda x: x.int(),
    "type": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "strides": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}
# What is no fault: of these arguments the op takes any.
ANY = {
    "axes": {"fork x", "mp_silu x", "linear x"},
    "channels": {"cat_silu a", "cat_silu b", "mp_weight w"}
    | {"conv x", "precondition_input x", "precondition_output f"}
    | {f"{op} x" for op in ("down_pixel_norm_silu", "fork", "mp_fourier", "mp_silu", "pixel_norm_silu", "resample")},
    "type": {"precondition_output f"},
    "strides": {f"{op} sigma" for op in ("precondition_input", "precondition_output", "uncertainty_loss")}
    | {"uncertainty_loss logvar", "linear x", "mp_weight w", "mp_weight gain"},
}
FIRST = {case.op: case for name, case in reversed(CASES.items()) if "one channel" not in name}
FIRST["mp_weight"] = CASES["mp_weight 1x1 gain"]


def arguments(op: str) -> list[str]:
    return list(inspect.signature(getattr(kernels, op)).parameters)[: len(FIRST[op].shapes)]


def allowed(op: str, argument: str, fault: str) -> bool:
    alone = fault in ("type", "device") and len(arguments(op)) == 1
    prepared = fault == "strides" and (argument[0] == "w" and op != "mp_weight" or argument == "m")
    scalar = fault == "channels" and argument == "gain"
    return alone or prepared or scalar or f"{op} {argument}" in ANY.get(fault, ())


PAIRS = [(op, argument) for op in FIRST for argument in arguments(op)]
WRONG = [(*pair, fault) for pair in PAIRS for fault in FAULTS if not allowed(*pair, fault)]
STRIDED = [pair for pair in PAIRS if allowed(*pair, "strides")]


def faulty(op: str, argument: str, fault: str) -> list[Tensor]:
    inputs = [x.detach() for x in FIRST[op].inputs(torch.float32)]
    i = arguments(op).index(argument)
    inputs[i] = FAULTS[fault](inputs[i])
    return inputs


@pytest.mark.parametrize(("op", "argument", "fault"), WRONG)
def test_bad_tensors(op, argument, fault):
    """The message names an argument and what it got. (Of two that do not go together either may be at fault.)"""
    inputs = faulty(op, argument, fault)
    x = inputs[arguments(op).index(argument)]
    got = {"integer": "torch.int32", "type": "torch.float64", "device": "meta", "strides": str(list(x.stride()))}
    with pytest.raises((ValueError, TypeError), match=rf"^({'|'.join(arguments(op))}): ") as raised:
        FIRST[op].outputs(kernels, inputs)
    message = str(raised.value)
    assert got[fault] in message if fault in got else re.search(r"\d channels|got \[", message)
    assert "\n" not in message and len(message) < 160


@pytest.mark.parametrize(("op", "argument"), STRIDED)
def test_any_strides(op, argument):
    inputs = faulty(op, argument, "strides")
    for a, b in zip(FIRST[op].outputs(kernels, inputs), FIRST[op].outputs(kernels, [x.contiguous() for x in inputs]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


ZEROS = torch.zeros(1, 2, 2, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.mp_weight(torch.zeros(4)), r"w: expected .* got \[4\]"),
        (lambda: kernels.mp_weight(torch.zeros(4, 2, 3, 1)), r"w: expected .* got \[4, 2, 3, 1\]"),
        (lambda: kernels.mp_weight(torch.zeros(4, 0)), r"w: expected .* got \[4, 0\]"),
        (lambda: kernels.mp_weight(torch.zeros(4, 2), dtype=torch.int32), "dtype: expected floating point, got torch.int32"),
        (lambda: kernels.mp_weight(torch.zeros(4, 2), heads=1), "w: 4 rows are not a multiple of 3 × 1 heads"),
        (lambda: kernels.mp_weight(torch.zeros(4, 2), factors=Factors(3)), "factors: expected a split of 0 to 2 input channels, got 3"),
        (lambda: kernels.linear(torch.tensor(1.0), torch.zeros(1, 1, 1)), r"x: expected \[..., Cin\], got \[\]"),
        (lambda: kernels.linear(ZEROS, torch.zeros(9, 1, 6)), r"w: expected .* got \[9, 1, 6\]"),
        (lambda: kernels.cosine_attention(ZEROS, 4), "qkv: 6 channels"),
        (lambda: kernels.cosine_attention(ZEROS, 0), "qkv: 6 channels"),
        (lambda: kernels.mp_silu(ZEROS.int()), "x: expected floating point"),
        (lambda: kernels.pixel_norm_silu(ZEROS[..., :0]), r"x: expected .* got \[1, 2, 2, 0\]"),
        (lambda: kernels.down_pixel_norm_silu(ZEROS[:, :1]), r"x: expected even H and W, got \[1, 1, 2, 6\]"),
        (lambda: kernels.resample(ZEROS[:, :1], mode="down"), r"x: expected even H and W, got \[1, 1, 2, 6\]"),
        (lambda: kernels.resample(ZEROS, (1, 2, 1), "up"), "even-length filter"),
        (lambda: kernels.resample(ZEROS, mode="sideways"), "got sideways"),
    ],
)
def test_bad_sizes(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def without(case: Case, axis: str) -> Case:
    """The same without images, rows or columns (of a weight: without rows)."""

    def shape(old: tuple[int, ...]) -> tuple[int, ...]:
        if axis == "images":
            return old if len(old) in (0, 3) else (0, *old[1:])
        return tuple(0 if len(old) == 4 and i == "images height width".split().index(axis) else n for i, n in enumerate(old))

    return replace(case, shapes=[s if case.op == "mp_weight" and len(s) < 2 else shape(s) for s in case.shapes], scale={})


EMPTY = {
    f"{name}, no {axis}": without(case, axis)
    for name, case in CASES.items()
    for axis in ("images", "height", "width")
    if axis == "images" or (len(case.shapes[0]) == 4 and case.op != "mp_weight" and not case.positive)
}
EMPTY["precondition_input, no height"] = Case("precondition_input", [(3, 4, 0, 3), (3,)], {"sigma_data": 0.5}, positive=(1,))
EMPTY["precondition_output, no width"] = Case("precondition_output", [(3, 5, 0, 8), (3, 4, 5, 0), (3,)], {"sigma_data": 0.5}, positive=(2,))
EMPTY["linear, no outputs"] = Case("linear", [(5, 8), (1, 0, 8)])
EMPTY["linear, no inputs"] = Case("linear", [(5, 0), (1, 3, 0)])
EMPTY["linear, no rows of one image"] = Case("linear", [(2, 0, 8), (1, 3, 8)])


@pytest.mark.filterwarnings(r"ignore:.*a weight of shape:kernels.FallbackWarning")
@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY.keys())
def test_nothing_to_do(case, device):
    """The outputs have their shapes and the gradients are 0."""
    results = [case.run(module, case.inputs(torch.float32, device)) for module in (kernels, reference)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


REFUSED = {
    "torch.float64": (Case("mp_silu", [(3, 5)]), torch.float64),
    "8200 channels, the kernel takes 8192": (Case("pixel_norm_silu", [(1, 1, 2, 8200)]), torch.float32),
    "136 channels per head, the kernel takes 128": (Case("cosine_attention", [(1, 2, 2, 3 * 136)], {"heads": 1}), torch.float32),
    "4 taps, the kernel takes 1 and 9": (Case("mp_weight", [(3, 5, 2, 2), ()]), torch.float32),
    "a raw weight of torch.float16, the kernel takes fp32": (Case("mp_weight", [(3, 5, 1, 1)]), torch.float16),
    r"a weight of shape \[1, 3, 0\]": (Case("linear", [(5, 0), (1, 3, 0)]), torch.float32),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_kernel_cannot_take_goes_to_the_reference(reason, device):
    """With one warning for the op and one for its derivative, however often it happens."""
    case, dtype = REFUSED[reason]
    if not on_triton(device):
        pytest.skip("no kernels: TRITON_INTERPRET=1 or a CUDA device")
    inputs = case.inputs(dtype, device)
    kernels.clear_fallbacks()
    with pytest.warns(kernels.FallbackWarning, match=rf"{case.op}(_backward)? fell back: {reason}") as warned:
        case.run(kernels, inputs)
    assert len(warned) == 2 and set(kernels.fallbacks()) == {case.op, f"{case.op}_backward"} <= set(OPS)
    case.check(kernels, inputs)
    kernels.clear_fallbacks()


def test_sizes_that_do_not_fit_here():
    """Refused by their numbers alone."""
    qkv = torch.empty(1, 2**14, 2**14, 12, device="meta")
    assert "offsets inside one have 32 bits" in attention.refuses(qkv.shape, 1)
    assert "a weight of shape" in linear_refuses(torch.empty(1, 2**23, 1, device="meta"))
