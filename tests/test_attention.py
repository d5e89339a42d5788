"""Cosine attention at the edges of its blocks: every form of the kernels against `kernels.reference`, memory poisoned."""

import pytest
import torch

import kernels
from kernels import attention, eager, reference, tiles
from kernels.jit import INTERPRET, recording
from tests.conftest import relative_error
from tests.op_cases import BAD, Case
from tests.tolerances import ATTENTION_AT_ITS_BOUND, EXACT

# Tokens, channels per head, heads, architecture: one program per head at 64 and 256 tokens, else two kernels.
SMALL = [(1, 8, 1, 90), (15, 40, 3, 90), (33, 16, 2, 80)]
SIZES = [*SMALL, (64, 64, 2, 90), (64, 128, 1, 80), (256, 64, 1, 90), (256, 64, 1, 80), (257, 40, 1, 90), (257, 128, 1, 80)]


@pytest.fixture(autouse=True)
def poisoned():
    """What `torch.empty` returns is NaN, and what nobody wrote stays NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.zeros(2).new_empty(2).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=SIZES, ids=lambda s: f"{s[0]}x{s[1]}x{s[2]}-sm{s[3]}")
def case(request, monkeypatch):
    tokens, depth, heads, architecture = request.param
    monkeypatch.setattr(attention, "capability", lambda x: architecture)
    return Case("cosine_attention", [(1 + (tokens < 64), 1, tokens, heads * 3 * depth)], {"heads": heads})


small_sizes = pytest.mark.parametrize("case", SMALL, indirect=True, ids=str)
kernels_only = pytest.mark.skipif(not INTERPRET, reason="about kernels")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=kernels_only)], ids=str)


def parts(case, x):
    """A view `[N, T, heads, 3, D]`."""
    return x[:, 0].unflatten(-1, (case.kwargs["heads"], 3, -1))


@every_dtype
def test_values_and_gradients(case, dtype):
    case.check(kernels, case.inputs(dtype))


@small_sizes
def test_twice_the_same_bits(case):
    inputs = case.inputs(torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(case.run(kernels, inputs), case.run(kernels, inputs), strict=True))


@small_sizes
@every_dtype
def test_zero_vectors(case, dtype):
    """The first token's q, k and v, and the whole second image."""
    inputs = case.inputs(dtype)
    with torch.no_grad():
        inputs[0][0, 0, 0] = 0
        inputs[0][1] = 0
    assert all(y.isfinite().all() for y in case.run(kernels, inputs))
    case.check(kernels, inputs)


@small_sizes
@pytest.mark.parametrize("part", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("bad", BAD)
def test_non_finite_values(case, part, bad):
    inputs = case.inputs(torch.float32)
    with torch.no_grad():
        parts(case, inputs[0])[0, -1, 0, part, 3] = bad
    case.check(kernels, inputs)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", [(33, 128, 1, 90)], indirect=True, ids=str)
def test_logits_at_their_bound(case, sign):
    """All products are ±√D; e^√128 is more than fp16 holds, and e^−√128 less than its normal numbers."""
    inputs = case.inputs(torch.float16)
    with torch.no_grad():
        x = parts(case, inputs[0])
        x[..., 0, :] = 1
        x[..., 1, :] = sign
    expected = case.run(reference, [x.detach().float().requires_grad_() for x in inputs])[0]
    assert relative_error(case.run(kernels, inputs)[0], expected) < ATTENTION_AT_ITS_BOUND


@small_sizes
def test_saved_sums_are_those_of_eager(case):
    """Forward and backward may each fall back alone."""
    (qkv,) = case.inputs(torch.float32)
    heads = case.kwargs["heads"]
    with torch.no_grad():
        actual, expected = attention._attention(qkv, heads), eager.cosine_attention(qkv, heads)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)
        g = torch.randn_like(actual[0])
        grads = [attention._attention_backward(g, qkv, *saved, heads) for saved in (actual, expected)]
    assert relative_error(*grads) < EXACT[torch.float32]


def test_launches():
    """Each tensor moves once in the one-program form, and every architecture has a form for every size."""
    for architecture in (80, 86, 90, 100, 120):
        for tokens, depth, dtype in (
            (64, 64, torch.float16),
            (256, 64, torch.bfloat16),
            (4096, 128, torch.float16),
            (9, 24, torch.float32),
        ):
            qkv, launches = torch.empty(2, 1, tokens, 3 * 3 * depth, dtype=dtype, device="meta"), []
            with recording(launches.append, architecture):
                y, lse = attention.cosine_attention_triton(qkv, 3)
                attention.cosine_attention_backward_triton(y, qkv, y, lse, 3)
            one = tiles.attention("backward", architecture, tokens, depth, qkv.element_size())
            product = 2 * 2 * 3 * tokens**2 * depth
            assert [x.flops // product for x in launches] == ([2, 5] if one else [2, 3, 4])
            assert launches[0].bytes == sum(x.numel() * x.element_size() for x in (qkv, y, lse))
    assert tiles.attention("backward", 90, 256, 64, 2) and not tiles.attention("backward", 80, 256, 64, 2)
