"""The reference ops against the official implementation's values, published constants and their own invariants."""

import math

import pytest
import torch
from einops import rearrange

from kernels import reference as ops
from tests.conftest import Golden, relative_error

FORWARD, GRADIENT = 1e-6, 1e-5
GAIN_GRADIENT = 1e-4  # one number, the sum of terms that cancel to a thousandth of their size


def nhwc(x):
    return x.permute(0, 2, 3, 1)


def nchw(x):
    return x.permute(0, 3, 1, 2)


def on_nhwc(op):
    return lambda *xs: nchw(op(*(nhwc(x) for x in xs)))


def attention(x):
    qkv = rearrange(x, "n (h d s) y x -> n y x (h s d)", h=3, s=3)  # checkpoint order → op order
    return nchw(ops.cosine_attention(qkv, heads=3))


def mp_conv(x, w, gain):
    prepared = ops.mp_weight(w, gain, torch.float32)
    return ops.linear(x, prepared) if w.ndim == 2 else nchw(ops.conv(nhwc(x), prepared))


GOLDEN_OPS = {
    "mp_silu": ops.mp_silu,
    "pixel_norm": on_nhwc(lambda x: ops.pixel_norm_silu(x)[0]),
    "normalize_all_but_first": lambda x: ops.normalize(x, dim=(1, 2, 3)),
    "normalize_tiny": lambda x: ops.normalize(x, dim=1),
    "mp_sum_0.3": lambda a, b: ops.mp_sum(a, b, 0.3),
    "mp_sum_0.5": lambda a, b: ops.mp_sum(a, b, 0.5),
    "mp_cat_0.3": on_nhwc(lambda a, b: ops.mp_cat(a, b, 0.3)),
    "mp_cat_0.5": on_nhwc(lambda a, b: ops.mp_cat(a, b, 0.5)),
    "resample_up_11": on_nhwc(lambda x: ops.resample(x, (1, 1), "up")),
    "resample_down_11": on_nhwc(lambda x: ops.resample(x, (1, 1), "down")),
    "resample_up_1331": on_nhwc(lambda x: ops.resample(x, (1, 3, 3, 1), "up")),
    "resample_down_1331": on_nhwc(lambda x: ops.resample(x, (1, 3, 3, 1), "down")),
    "mp_conv_0": mp_conv,
    "mp_conv_1": mp_conv,
    "mp_conv_3": mp_conv,
    "cosine_attention_3heads": attention,
}


def test_phases_are_the_convolution_of_the_doubled_image():
    x, w0, m, w1 = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5, 4), (9, 6, 4), (2, 6), (9, 4, 6)))
    doubled, w_up = ops.resample(x, (1, 1), "up"), ops.up_weight(w0)
    torch.testing.assert_close(ops.conv_up(x, w_up), ops.conv(doubled, w0))
    torch.testing.assert_close(ops.conv_silu_up(x, w_up, m), ops.conv_silu(doubled, w0, m))
    expected = ops.residual_branch_silu(doubled, w0, m, w1, 0.3, 0.6)
    torch.testing.assert_close(ops.residual_branch_up(x, w_up, m, w1, 0.3, 0.6), expected)


@pytest.mark.parametrize("name", GOLDEN_OPS)
def test_golden(name):
    golden = Golden("primitives")
    values = golden.group(f"{name}/")
    inputs = [values[f"in{i}"].requires_grad_() for i in range(sum(key.startswith("in") for key in values))]
    y = GOLDEN_OPS[name](*inputs)
    assert relative_error(y, values["y"]) < FORWARD
    for i, grad in enumerate(torch.autograd.grad(y, inputs, values["gy"])):
        limit = GAIN_GRADIENT if grad.ndim == 0 else GRADIENT
        assert relative_error(grad, values[f"grad{i}"]) < limit, f"gradient of input {i}"


@pytest.mark.parametrize("k", [0, 1, 3])
def test_forced_weight(k):
    values = Golden("primitives").group(f"mp_conv_{k}/")
    w = values["in1"]
    assert relative_error(ops.normalize(w, dim=range(1, w.ndim)), values["forced_weight"]) < FORWARD


def test_published_constants():
    x = torch.tensor([-2.0, -1, 0, 1, 2])
    torch.testing.assert_close(ops.mp_silu(x), torch.tensor([-0.40000978, -0.45124400, 0, 1.22660840, 2.95569468]))
    torch.testing.assert_close(ops.normalize(torch.tensor([3.0, 4]), 0), torch.tensor([0.8485041857, 1.1313388348]))
    torch.testing.assert_close(ops.normalize(torch.tensor([1e-5, 0]), 0), torch.tensor([0.0933959, 0]))
    ramp = nhwc(torch.arange(1.0, 9).reshape(1, 2, 2, 2))
    expected = torch.tensor([0.27734241, 0.44720358, 0.55707568, 0.63244551, 1.38671207, 1.34161067, 1.29984319, 1.26489103])
    torch.testing.assert_close(nchw(ops.pixel_norm_silu(ramp)[0]).flatten(), expected)
    down = ops.resample(torch.arange(16.0).reshape(1, 4, 4, 1), (1, 1), "down")
    assert down.flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert ops.resample(torch.tensor([[1.0, 2]]).reshape(1, 1, 2, 1), mode="up").flatten().tolist() == [1, 1, 2, 2] * 2
    assert ops.cat_scales(768, 576, 0.5) == pytest.approx((0.9354143467, 1.0801234497))
    assert ops.cat_scales(576, 384, 0.5) == pytest.approx((0.9128709292, 1.1180339887))
    assert ops.cat_scales(384, 192, 0.5) == pytest.approx((0.8660254038, 1.2247448714))
    assert ops.cat_scales(40, 40, 0.5) == pytest.approx((1, 1))
    one, zero = torch.ones(1), torch.zeros(1)
    assert ops.mp_sum(one, zero, 0.3).item() == pytest.approx(0.9191450300)
    assert ops.mp_sum(zero, one, 0.3).item() == pytest.approx(0.3939192986)


@pytest.mark.parametrize(
    "op",
    [
        ops.mp_silu,
        lambda x: ops.mp_sum(x, torch.randn_like(x), 0.3),
        lambda x: ops.mp_cat(x, torch.randn(*x.shape[:-1], 24), 0.5),
        lambda x: ops.linear(x, ops.mp_weight(torch.randn(80, 64))),
        lambda x: ops.conv(x, ops.mp_weight(torch.randn(80, 64, 3, 3)))[:, 1:-1, 1:-1],
        lambda x: ops.conv_silu(x, ops.mp_weight(torch.randn(80, 64, 1, 1)), torch.ones(x.shape[0], 80)),
    ],
)
def test_unit_variance_is_preserved(op):
    torch.manual_seed(0)
    assert op(torch.randn(16, 16, 16, 64)).square().mean().sqrt().item() == pytest.approx(1, abs=0.01)


def test_normalize_at_zero():
    x = torch.zeros(3, 5, requires_grad=True)
    y = ops.normalize(x, dim=1)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.abs().max() == 0
    torch.testing.assert_close(grad, torch.full_like(x, 1 / ops.EPS))


def test_composites_are_their_parts():
    torch.manual_seed(0)
    x, a, b = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 16)
    w, m = ops.mp_weight(torch.randn(8, 8, 3, 3)), torch.randn(2, 8)
    kernel = w.reshape(3, 3, 8, 8).permute(2, 3, 0, 1)
    y = nhwc(torch.nn.functional.conv2d(nchw(x), kernel, padding=1))
    torch.testing.assert_close(ops.conv(x, w), y)
    torch.testing.assert_close(ops.conv_silu(x, w, m), ops.mp_silu(y * m[:, None, None]))
    torch.testing.assert_close(ops.conv_sum(x, w, a, 0.3, 0.5), ops.mp_sum(a, y, 0.3).clamp(-0.5, 0.5))
    torch.testing.assert_close(ops.cat_silu(a, b, 0.4), ops.mp_silu(ops.mp_cat(a, b, 0.4)))
    down = ops.resample(x[:, :4, :2], (1, 1), "down")
    torch.testing.assert_close(ops.down_pixel_norm_silu(x[:, :4, :2]), ops.pixel_norm_silu(down))


def test_joined_factors_are_those_of_mp_cat_and_mp_sum():
    torch.manual_seed(0)
    x, a, b = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 16)
    raw = torch.randn(8, 8, 3, 3), torch.randn(8, 24, 1, 1)
    w, w_skip = (ops.mp_weight(weight) for weight in raw)
    expected = ops.mp_sum(ops.conv(ops.mp_cat(a, b, 0.4), w_skip), ops.conv(x, w), 0.3)
    w, w_skip = (ops.mp_weight(weight, factors=factors) for weight, factors in zip(raw, ops.joined_factors(8, 16, 0.4, 0.3)))
    torch.testing.assert_close(ops.conv_cat_sum(x, w, a, b, w_skip), expected)
    torch.testing.assert_close(ops.conv_cat_sum(x, w, a, b, w_skip, 0.5), expected.clamp(-0.5, 0.5))


def test_attention_is_softmax_attention():
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, 5, 2 * 3 * 8)
    q, k, v = (ops.normalize(t, -1) for t in rearrange(qkv, "n h w (g s d) -> s n g (h w) d", g=2, s=3))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(ops.cosine_attention(qkv, 2), rearrange(y, "n g (h w) d -> n h w (g d)", h=3))
    assert (q @ k.mT / math.sqrt(8)).abs().max() <= math.sqrt(8)


def test_qkv_rows_are_permuted():
    w = torch.randn(2 * 4 * 3, 8, 1, 1)
    plain, permuted = ops.mp_weight(w)[0], ops.mp_weight(w, heads=2)[0]
    torch.testing.assert_close(permuted, rearrange(plain, "(h d s) c -> (h s d) c", h=2, s=3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.conv(torch.zeros(1, 2, 2, 3), torch.zeros(9, 8, 4)), "x: 3 channels"),
        (lambda: ops.linear(torch.zeros(1, 3), torch.zeros(1, 8, 4)), "x: 3 channels"),
        (lambda: ops.mp_weight(torch.zeros(4)), r"w: expected .* got \[4\]"),
        (lambda: ops.cosine_attention(torch.zeros(1, 2, 2, 10), 2), "qkv: 10 channels"),
        (lambda: ops.resample(torch.zeros(1, 2, 2, 1), (1, 2, 1), "up"), "even-length filter"),
        (lambda: ops.resample(torch.zeros(1, 2, 2, 1), (1, 1), "sideways"), "sideways"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
