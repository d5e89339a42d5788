"""The convolution kernels against PyTorch's conv2d and autograd in float64, below the ops.

Of small integers every sum is exact, so that bits must be equal.
Every tensor that a kernel sees lies between NaNs, and outputs are NaN beforehand.
"""

import math

import pytest
import torch

from kernels import conv_tiles, convolve, wgrad
from kernels.convolve import Rest, Source
from kernels.sums import Sums
from kernels.wgrad import Product, weight_gradient, weight_gradients
from tests.conftest import skip_boxes_unless_hopper
from tests.conv_cases import by_autograd, conv2d, exactly, input_and_weight

# Images, height, width, input and output channels, taps: the interpreter takes milliseconds for a step of 32 or 64 channels
SIZES = [
    (1, 1, 1, 8, 8, 9),
    (3, 3, 5, 8, 40, 9),
    (1, 5, 7, 40, 24, 1),
    (2, 8, 8, 8, 16, 9),
    (2, 3, 16, 8, 8, 9),
    (1, 9, 17, 8, 8, 9),
    (1, 3, 33, 8, 8, 1),
    (1, 2, 1, 192, 8, 9),
    (1, 1, 2, 8, 320, 1),
    (1, 1, 1, 8, 8, 1),
    (3, 3, 5, 448, 8, 1),
    (1, 1, 3, 24, 576, 1),
    (1, 9, 17, 40, 8, 1),
    (1, 2, 2, 1152, 40, 1),
    (3, 1, 1, 8, 1152, 1),
    (1, 1, 2, 768, 192, 1),
]
ALL_TILES = [tile for rows in conv_tiles.CONV.values() for row in rows for tile in row]
ALL_WGRAD_TILES = [tile for rows in conv_tiles.WGRAD.values() for tile in rows]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients(size, memory, arch):
    x, w, g = input_and_weight(memory, *size)
    y, dx, dw = by_autograd(x, w, g)
    assert exactly(convolve.convolve(x, w)[0], y)
    assert exactly(convolve.convolve(g, w, transposed=True)[0], dx)
    assert exactly(weight_gradient(g, x, size[-1]), dw)


@pytest.mark.parametrize("tile", ALL_TILES, ids=str)
def test_every_tile(tile, memory):
    """At 2 images in the boxes of 256 pixels, of 128 one, of 64 half of one."""
    if tile.boxes:
        skip_boxes_unless_hopper(memory)
    channels = sum(tile.channels) + 8
    x, w, g = input_and_weight(memory, 2, 5, 9, 8, channels, 9)
    assert exactly(convolve.convolve(x, w, tile=tile)[0], by_autograd(x, w, g)[0])
    x, w, g = input_and_weight(memory, 2, 5, 9, channels, 8, 9)
    assert exactly(convolve.convolve(g, w, transposed=True, tile=tile)[0], by_autograd(x, w, g)[1])


@pytest.mark.parametrize("tile", ALL_WGRAD_TILES, ids=str)
def test_every_tile_of_weight_gradients(tile, memory):
    """Consecutive pixels of several images, of one, of a row; ragged rows."""
    if tile.boxes:
        skip_boxes_unless_hopper(memory)
    for box in ((5, 4, 4), (1, 8, 8), (1, 1, 128), (1, 2, 70)):
        x, w, g = input_and_weight(memory, *box, sum(tile.columns) + 8, sum(tile.rows) + 8, 1)
        assert exactly(weight_gradient(g, x, 1, tile=tile), by_autograd(x, w, g)[2])


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9, 27])
def test_splits_of_the_pixels(count, memory, arch, monkeypatch):
    """27 rows (pointers: of 17 pixels in 32) or fewer boxes for each program."""
    monkeypatch.setattr(conv_tiles, "splits", lambda tile, tiles, steps: count)
    x, w, g = input_and_weight(memory, 3, 9, 17, 24, 40, 1)
    assert exactly(weight_gradient(g, x, 1, 0.5), by_autograd(x, w, g)[2] / 2)


@pytest.mark.parametrize("count", [1, 3])
def test_weight_gradients_in_one_launch(count, memory, arch, monkeypatch):
    """One of two sources side by side, whose border no tile minds, and one of another gradient and scale."""
    monkeypatch.setattr(conv_tiles, "splits", lambda tile, tiles, steps: count)
    launch, started = wgrad.launch, []
    monkeypatch.setattr(wgrad, "launch", lambda kernel, *args, **options: started.append(kernel) or launch(kernel, *args, **options))
    x, w, g = input_and_weight(memory, 3, 5, 7, 64, 40, 9)
    v, w1, g1 = input_and_weight(memory, 3, 5, 7, 48, 24, 9)
    a, b = (memory.put(part.contiguous()) for part in x.split([40, 24], dim=3))
    dw, dw1 = weight_gradients([[Product(g, a), Product(g, b)], [Product(g1, v, 0.5)]], 9)
    assert exactly(dw, by_autograd(x, w, g)[2]) and exactly(dw1, by_autograd(v, w1, g1)[2] / 2)
    assert started == [wgrad.wgrad_kernel]


@pytest.mark.parametrize("channels", [(40, 24), (8, 200), (200, 8)], ids=str)
def test_result_of_two_tensors(channels, memory, arch):
    """Tiles of the second start at its first channel."""
    x, w, g = input_and_weight(memory, 2, 5, 9, sum(channels), 40, 9)
    both = convolve.convolve(g, w, transposed=True, rest=Rest(channels[1]))
    assert [y.shape[3] for y in both] == list(channels)
    assert exactly(torch.cat(both, dim=3), by_autograd(x, w, g)[1])


@pytest.mark.parametrize("taps", [9, 1])
def test_two_sources(taps, memory, arch):
    """Parts of one weight, whose rows lie apart."""
    x, w, g = input_and_weight(memory, 2, 5, 9, 64, 40, taps)
    (a, b), (w_a, w_b) = ([part for part in tensor.split([40, 24], dim=dim)] for tensor, dim in ((x, 3), (w, 2)))
    a, b = memory.put(a.contiguous()), memory.put(b.contiguous())
    assert exactly(convolve.convolve(a, w_a, sources=[Source(b, w_b)])[0], by_autograd(x, w, g)[0])


def corners(h, w):
    return sorted({(0, 0), (0, w - 1), (h - 1, 0), (h - 1, w - 1), (h // 2, w // 2)})


def neighbours(taps, row, column, h, w):
    """Tap, row and column of the pixels of h × w that see this one at the center of their 3 × 3, and of those it sees."""
    for tap in range(taps):
        dh, dw = (tap // 3 - 1, tap % 3 - 1) if taps == 9 else (0, 0)
        if 0 <= row + dh < h and 0 <= column + dw < w:
            yield tap, row + dh, column + dw


@pytest.mark.parametrize(("h", "w", "taps"), [(1, 1, 9), (5, 7, 9), (5, 7, 1), (4, 17, 9)])
def test_impulses(h, w, taps, memory, arch):
    """Pixels that are 1, at the corners and in the middle: their neighbours get the taps themselves, others nothing."""
    k, c = 16, 40
    weight, x = memory.normal(taps, c, k), memory.normal(2, h, w, k)
    impulse, dy = memory.put(torch.zeros(2, h, w, k)), memory.put(torch.zeros(2, h, w, c))
    y, dx, dw = (torch.zeros(shape, device=x.device) for shape in ((2, h, w, c), (2, h, w, k), (taps, c, k)))
    for i, (row, column) in enumerate(corners(h, w)):
        impulse[1, row, column, 3 * i] = dy[1, row, column, 7 * i] = 1
        for tap, there, across in neighbours(taps, row, column, h, w):
            y[1, there, across] = weight[taps - 1 - tap, :, 3 * i]
            dx[1, there, across] = weight[tap, 7 * i]
            dw[tap, 7 * i] = x[1, there, across]
    assert torch.equal(convolve.convolve(impulse, weight)[0].float(), y)
    assert torch.equal(convolve.convolve(dy, weight, transposed=True)[0].float(), dx)
    assert torch.equal(weight_gradient(dy, x, taps), dw)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("taps", [9, 1])
@pytest.mark.parametrize(("h", "w"), [(5, 7), (2, 17)])
def test_nonfinite_pixels_reach_their_neighbours_only(h, w, taps, bad, memory, arch):
    x, weight, g = memory.normal(2, h, w, 24), memory.normal(taps, 40, 24), memory.normal(2, h, w, 40)
    reached = torch.zeros(2, h, w, dtype=torch.bool)
    for row, column in corners(h, w)[::2]:
        x[1, row, column, 5] = g[1, row, column, 7] = bad
        for _, there, across in neighbours(taps, row, column, h, w):
            reached[1, there, across] = True
    wide = weight.cpu().double()
    for actual, expected in (
        (convolve.convolve(x, weight)[0], conv2d(x.cpu().double(), wide)),
        (convolve.convolve(g, weight, transposed=True)[0], conv2d(g.cpu().double(), wide.mT.flip(0))),
    ):
        actual = actual.cpu()
        assert torch.equal(actual.isfinite(), ~reached[..., None].expand_as(actual))
        assert torch.equal(actual[reached].isnan(), expected[reached].isnan())
        assert torch.equal(actual == math.inf, expected == math.inf)


def test_two_runs_give_the_same_weight_gradient(memory, arch):
    """27 boxes, 6 sums of them."""
    x, g = memory.normal(3, 9, 17, 40), memory.normal(3, 9, 17, 72)
    assert torch.equal(weight_gradient(g, x, 1), weight_gradient(g, x, 1))


@pytest.mark.parametrize("count", range(6))
def test_sums_that_share_launches(count, memory):
    """Of any sizes and types, some of rows that lie apart, each in the order of its parts: more than one launch takes."""
    sums, expected, outs = Sums(), [], []
    for i, (rows, parts, length) in enumerate([(2, 3, 40), (1, 5, 2880), (7, 1, 8), (3, 4, 1500), (1, 2, 64)][:count]):
        values = memory.normal(rows, parts, length).float()
        out = memory.place((rows, length + 8 * (i % 2)), (torch.float32, torch.float16)[i // 2 % 2])[:, :length]
        sums.add(values, out)
        total = torch.zeros_like(values[:, 0])
        for part in values.unbind(1):
            total = total + part
        expected.append(total.to(out.dtype))
        outs.append(out)
    sums.run()
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
