"""The matrix product's kernel beyond what `test_ops` asks: any size, sums that do not depend on the batch, its account."""

import pytest
import torch

import kernels
from kernels.jit import INTERPRET, recording
from kernels.linear import linear_backward_triton, linear_triton
from tests.conftest import relative_error
from tests.tolerances import PRODUCT, limit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 128, 1), (3, 1000, 24), (64, 8, 200), (300, 40, 65), (33, 192, 129)]  # M, Cin, Cout
computed = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRET, reason="needs TRITON_INTERPRET=1 or a CUDA device")


def tensors(m: int, cin: int, cout: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, w and the gradient of y."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in [(m, cin), (1, cout, cin), (m, cout)])
    return [t.to(DEVICE, dtype) for t in (x, w / cin**0.5, g)]


@computed
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_size(size, dtype):
    x, w, g = tensors(*size, dtype)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        y, dx, dw = linear_triton(x, w, None), *linear_backward_triton(g, x, w)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, torch.float32)
    x, w, g = x.double(), w.double(), g.double()
    for name, actual, exact in (("y", y, x @ w[0].T), ("dx", dx, g @ w[0]), ("dw", dw, (g.T @ x)[None])):
        assert relative_error(actual, exact) < (PRODUCT if actual.dtype == torch.float32 else limit(dtype)), name


@computed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_do_not_depend_on_the_batch(dtype):
    x, w, g = tensors(300, 200, 72, dtype)
    y, dx = linear_triton(x, w, None), linear_backward_triton(g, x, w)[0]
    for m in (1, 3, 64):
        assert torch.equal(linear_triton(x[:m], w, None), y[:m])
        assert torch.equal(linear_backward_triton(g[:m], x[:m], w)[0], dx[:m])


@computed
def test_two_runs_give_the_same_bits():
    x, w, g = tensors(300, 40, 65, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(linear_backward_triton(g, x, w), linear_backward_triton(g, x, w)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_launch_for_each_product(dtype):
    """Which moves each tensor once."""
    x, w, g = tensors(33, 192, 129, dtype)
    launches = []
    with recording(launches.append):
        linear_triton(x, w, None)
        linear_backward_triton(g, x, w)
    assert [launch.flops for launch in launches] == [2 * 33 * 192 * 129] * 3
    sizes = [t.numel() * t.element_size() for t in (x, w, g)]
    assert [launch.bytes for launch in launches] == [sum(sizes), sum(sizes), sizes[0] + sizes[2] + 4 * w.numel()]


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(shape):
    x, w = torch.zeros(shape, requires_grad=True), torch.ones(1, 5, 8, requires_grad=True)
    y = kernels.linear(x, w)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 5) and x.grad.shape == shape
    assert torch.equal(w.grad, torch.zeros(1, 5, 8))


@computed
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_output_and_its_gradient_of_another_type(dtype):
    """As the modulations are: an fp32 product, shifted and rounded once."""
    x, w, _ = tensors(33, 40, 65, torch.float32)
    y = linear_triton(x, w, None, 0.5, 1.0, dtype)
    exact = 0.5 * (x.double() @ w[0].double().T) + 1
    assert y.dtype == dtype and relative_error(y, exact) < (PRODUCT if dtype == torch.float32 else limit(dtype))
    g = y.float()  # some numbers that half precision holds
    for a, b in zip(linear_backward_triton(y, x, w, 0.5), linear_backward_triton(g, x, w, 0.5)):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_gradient_of_the_input_only_where_it_is_wanted():
    x, w, g = tensors(3, 8, 24, torch.float32)
    launches = []
    with recording(launches.append):
        dx, dw = linear_backward_triton(g, x, w, with_dx=False)
    assert dx.numel() == 0 and dw.shape == w.shape and len(launches) == 1
