"""Convolutions around an up-sampling in every form of tile: by descriptors and by pointers, with one accumulator and two."""

import pytest
import torch

from kernels import conv_tiles, reference
from kernels.convolve import convolve
from kernels.jit import INTERPRET
from kernels.wgrad import weight_gradient
from tests.conftest import relative_error
from tests.op_cases import Guarded
from tests.tolerances import PRODUCT

pytestmark = pytest.mark.skipif(not INTERPRET, reason="about kernels")
EPS = torch.finfo(torch.float16).eps
CONV = [tiles[i] for kind in conv_tiles.CONV.values() for tiles in kind for i in (0, -1)]
WGRAD = [tile for kind in conv_tiles.WGRAD.values() for tile in kind]
SIZES = [(1, 3, 5, 24, 40), (3, 4, 4, 8, 72)]  # images, height, width, channels: boxes of one column, of whole images and more
every_size = pytest.mark.parametrize("size", SIZES, ids=str)


class Tensors:
    """x before the up-sampling and w behind it; g of the result, and r like the one a residual has; of half precision, in `wide`."""

    def __init__(self, n: int, h: int, w: int, cin: int, cout: int):
        generator = torch.Generator().manual_seed(0)
        shapes = {"x": (n, h, w, cin), "w": (16, cout, cin), "m": (n, cout), "g": (n, 2 * h, 2 * w, cout), "r": (n, 2 * h, 2 * w, cin)}
        scales = {"w": (4 * cin) ** -0.5}
        for name, shape in shapes.items():
            setattr(self, name, (torch.randn(shape, generator=generator) * scales.get(name, 1)).half())

    def wide(self, names: str) -> list[torch.Tensor]:
        return [getattr(self, name).float().requires_grad_() for name in names]


@pytest.fixture
def guarded(monkeypatch):
    """What kernels write to lies between NaNs and holds NaNs."""
    memory = Guarded()
    memory.patch(monkeypatch)
    yield memory
    assert memory.memory and memory.intact()


@every_size
@pytest.mark.parametrize("tile", CONV, ids=str)
def test_forward(size, tile, guarded):
    """The residual of the second convolution is read where it is, at half the height and width."""
    t = Tensors(*size)
    x, w, m, g, _ = t.wide("xwmgr")
    v, u = convolve(t.x, t.w, "silu", m=t.m, with_extra=True, tile=tile)
    assert relative_error(u, reference.conv_up(x, w)) < EPS and relative_error(v, reference.conv_silu_up(x, w, m)) < EPS
    w1 = t.w[:9].mT
    y, _ = convolve(t.g, w1.contiguous(), aux=t.x, scale=0.5, scale_aux=2.0, clip=3.0, tile=tile)
    expected = (reference.conv(g, w1.float()) * 0.5 + reference.resample(x, (1, 1), "up") * 2).clamp(-3, 3)
    assert relative_error(y, expected) < EPS


@every_size
@pytest.mark.parametrize("tile", CONV, ids=str)
def test_input_gradient(size, tile, guarded):
    """With that of the main path, which is summed over 2 × 2."""
    t = Tensors(*size)
    x, w, g, r = t.wide("xwgr")
    y = reference.conv_up(reference.mp_silu(x), w), reference.resample(x, (1, 1), "up") * 0.7
    expected = torch.autograd.grad(y, x, (g, r))[0]
    dx, _ = convolve(t.g, t.w, "residual_silu_grad", transposed=True, aux=t.r, scale_aux=0.7, act=t.x, tile=tile)
    assert relative_error(dx, expected) < EPS


@every_size
@pytest.mark.parametrize("tile", WGRAD, ids=str)
def test_weight_gradient(size, tile, guarded):
    t = Tensors(*size)
    x, w, g = t.wide("xwg")
    expected = torch.autograd.grad(reference.conv_up(x, w), w, g)[0]
    assert relative_error(weight_gradient(t.g, t.x, 16, tile=tile), expected) < PRODUCT
