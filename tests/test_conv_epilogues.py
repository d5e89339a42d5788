"""What follows a convolution in its kernel against autograd in float64: errors are at most twice those of PyTorch in fp16."""

import math
from itertools import product

import pytest
import torch

from kernels import conv_tiles
from tests.conftest import relative_error
from tests.conv_cases import EPILOGUES, each, image, operands, results

# Images, height, width, channels: boxes of 256 pixels hold 1, 2, 4 and 8 images, none of them whole
EPILOGUE_SIZES = [(1, 9, 17, 72), (3, 5, 16, 200), (5, 5, 7, 72), (9, 3, 5, 200)]
every_epilogue = pytest.mark.parametrize(("kernel", "plainly"), EPILOGUES.values(), ids=EPILOGUES.keys())


def wide_tile(arch):
    """The most pixels, and two accumulators where there are any."""
    return conv_tiles.CONV[conv_tiles.kind(arch)][0][0]


@every_epilogue
@pytest.mark.parametrize("size", EPILOGUE_SIZES, ids=str)
def test_epilogues_are_no_worse_than_pytorch(kernel, plainly, size, memory, arch):
    t = operands(memory, *size)
    actual = results(kernel(t, tile=wide_tile(arch)))
    exact, half = plainly(each(t, lambda x: x.cpu().double())), plainly(t)
    assert len(actual) == len(exact)
    for a, b, truth in zip(actual, half, exact, strict=True):
        assert a.dtype == torch.float16
        rounding = torch.finfo(torch.float16).eps / 4  # of one rounding, about
        assert relative_error(a.double(), truth) < 2 * max(relative_error(b.double(), truth), rounding)


@every_epilogue
def test_an_image_does_not_depend_on_its_batch(kernel, plainly, memory, arch):
    """Nor on those in its box."""
    t = operands(memory, 3, 3, 5, 40, taps=9)
    together = results(kernel(t))
    for i in range(3):
        alone = results(kernel(image(t, i)))
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", conv_tiles.CONV)
def test_sums_do_not_depend_on_the_batch(kind):
    """Whatever a batch's tile: it divides neither channels nor the sums over them in another way."""
    arch, uses = {"wgmma": 90, "mma": 80}[kind], [("forward", 9), ("forward", 16), ("input gradient", 16)]
    for channels, (op, taps) in product((4, 8, 40, 192, 320, 448, 576, 768, 1152), uses):
        row = conv_tiles.row(arch, op, taps, 2, 2, 64, channels)
        tiles = {conv_tiles.conv(row, 2**i) for i in range(20)}
        assert len(tiles) == len(conv_tiles.allowed(row, conv_tiles.CONV[kind][0]))
        assert len({(tile.channels, tile.block_k, tile.boxes) for tile in tiles}) == 1


@every_epilogue
def test_two_runs_give_the_same_bits(kernel, plainly, memory, arch):
    t = operands(memory, 2, 5, 7, 40)
    assert all(torch.equal(a, b) for a, b in zip(results(kernel(t)), results(kernel(t)), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_values_in_epilogues(bad, memory, arch):
    """Clips keep NaN and bound the infinite; a residual's value reaches its element, a modulation's one channel of an image."""
    t = operands(memory, 3, 5, 7, 40)
    t.aux[1, 2, 3, 4] = t.m[2, 9] = bad
    y, extra = EPILOGUES["sum of two, clip, silu"][0](t)
    assert (~y.isfinite()).sum() == (~extra.isfinite()).sum() == math.isnan(bad)
    assert torch.equal(y[1, 2, 3, 4].cpu(), torch.tensor(0.5).half()) or y[1, 2, 3, 4].isnan() and math.isnan(bad)
    v, u = EPILOGUES["silu, u"][0](t)
    nonfinite = ~v.isfinite()
    assert u.isfinite().all() and nonfinite[2, :, :, 9].all() and nonfinite.sum() == 5 * 7
    t.aux[1, 2, 3, 4] = bad
    du, dm = EPILOGUES["silu_grad"][0](t)
    assert du[2, :, :, 9].isnan().all() and du[1, 2, 3, 4].isnan() and du.isnan().sum() == 5 * 7 + 1
    assert dm.isnan().sum() == 2 and dm[1, 4].isnan() and dm[2, 9].isnan()
