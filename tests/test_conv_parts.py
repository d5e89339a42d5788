"""Evaluations of few pixels, whose convolutions are summed in parts: when they are, what comes out, and that no batch changes a bit."""

from contextlib import nullcontext

import pytest
import torch

from kernels import batch_invariance, conv_tiles, convolve
from kernels.convolve import Source
from tests.conftest import relative_error, skip_boxes_unless_hopper
from tests.conv_cases import EPILOGUES, by_autograd, each, exactly, image, input_and_weight, operands, results

FORWARD = ["sum", "sum, clip, silu", "sum of two, clip, silu", "source", "two sources, clip, silu", "silu"]
every_epilogue = pytest.mark.parametrize(("kernel", "plainly"), [EPILOGUES[name] for name in FORWARD], ids=FORWARD)
TILES = [tiles[i] for kind in conv_tiles.CONV.values() for tiles in kind for i in (0, -1)]


@pytest.fixture
def parts(monkeypatch):
    """What is split is, however small."""
    monkeypatch.setattr(conv_tiles, "LEAST_STEPS", 1)


@pytest.fixture
def started(monkeypatch):
    """The grids and parts of launches, in order."""
    launch, found = convolve.launch, []

    def recorded(kernel, grid, *args, **options):
        found.append((kernel.__name__, options["UP"], options.get("PARTS")))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(convolve, "launch", recorded)
    return found


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size", [(3, 3, 5), (1, 9, 17)], ids=str)
def test_values(size, tile, memory, parts, started):
    """Boxes that hold more images than there are, and less than one: no part spills into the next."""
    if tile.boxes:
        skip_boxes_unless_hopper(memory)
    x, w, g = input_and_weight(memory, *size, 8, sum(tile.channels) + 8, 9)
    assert exactly(convolve.convolve(x, w, tile=tile, split=True)[0], by_autograd(x, w, g)[0])
    assert started == [("conv_kernel", "part", None), ("epilogue_kernel", None, 3)]


@pytest.mark.parametrize("count", [1, 2])
def test_sources_of_nine_taps_are_in_each_part(count, memory, arch, parts, started):
    x, w, g = input_and_weight(memory, 2, 3, 5, 40 + 8 * count, 24, 9)
    first, *rest = ([part for part in tensor.split([40, *[8] * count], dim=dim)] for tensor, dim in ((x, 3), (w, 2)))
    (a, *more), (w_a, *w_more) = first, rest[0]
    given = [Source(memory.put(b.contiguous()), w_b) for b, w_b in zip(more, w_more, strict=True)]
    y, _ = convolve.convolve(memory.put(a.contiguous()), w_a, sources=given, split=True)
    assert exactly(y, by_autograd(x, w, g)[0])
    assert started[-1][2] == 3


@pytest.mark.parametrize(("least", "parts"), [(6, True), (7, False)])
def test_steps_are_those_of_all_sources(least, parts, memory, started, monkeypatch):
    """A part of 40 + 40 channels takes 3 × 2 steps of 64."""
    monkeypatch.setattr(conv_tiles, "LEAST_STEPS", least)
    x, w, _ = input_and_weight(memory, 1, 2, 2, 40, 8, 9)
    convolve.convolve(x, w, sources=[Source(x, w)], split=True)
    assert (started[0][1] == "part") == parts


def test_sources_of_one_tap_are_a_part_of_their_own(memory, arch, parts, started):
    x, w, g = input_and_weight(memory, 2, 3, 5, 24, 40, 9)
    a, w_a, _ = input_and_weight(memory, 2, 3, 5, 8, 40, 1)
    y, _ = convolve.convolve(x, w, sources=[Source(a, w_a), Source(a, w_a)], split=True)
    assert exactly(y, by_autograd(x, w, g)[0] + 2 * by_autograd(a, w_a, g)[0])
    assert started[-1][2] == 4


@every_epilogue
def test_epilogues_are_no_worse_than_pytorch(kernel, plainly, memory, arch, parts):
    t = operands(memory, 3, 3, 5, 40, taps=9)
    exact, half = plainly(each(t, lambda x: x.cpu().double())), plainly(t)
    for a, b, truth in zip(results(kernel(t, split=True)), half, exact, strict=True):
        rounding = torch.finfo(torch.float16).eps / 4  # of one rounding, about
        assert relative_error(a.double(), truth) < 2 * max(relative_error(b.double(), truth), rounding)


def test_residual_of_half_the_size(memory, arch, parts):
    t = operands(memory, 2, 6, 4, 40, taps=9)
    low = memory.normal(2, 3, 2, 40)
    given = dict(scale=0.5, scale_aux=2.0, clip=3.0)
    y, whole = (convolve.convolve(t.x, t.w, aux=low, **given, split=split)[0] for split in (True, False))
    torch.testing.assert_close(y, whole, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("invariant", [True, False])
@every_epilogue
def test_an_image_has_the_same_bits_in_any_batch(kernel, plainly, invariant, memory, arch, parts, started, monkeypatch):
    """With as many multiprocessors as one image keeps busy; two images are summed whole unless that would change bits."""
    monkeypatch.setattr(conv_tiles, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(conv_tiles, "FEW_IMAGES", 1)
    t = operands(memory, 2, 8, 8, 8, k=8, taps=9)
    with batch_invariance() if invariant else nullcontext():
        alone, together = results(kernel(image(t, 1), split=True)), results(kernel(t, split=True))
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, together, strict=True)) or not invariant
    assert [name for name, *_ in started] == ["conv_kernel", "epilogue_kernel", "conv_kernel", *["epilogue_kernel"] * invariant]


def row(size: int, depth: int, channels: int, op: str = "forward", taps: int = 9) -> conv_tiles.Row:
    return conv_tiles.row(90, op, taps, size, size, depth, channels)


def test_when_it_pays():
    """In EDM2-S: 8 × 8 and 16 × 16 pixels, as long as the smallest tiles would leave half of the multiprocessors idle."""
    small, middle, large = row(8, 768, 768), row(16, 576, 576), row(32, 384, 384)
    assert [[conv_tiles.parts(x, n) for n in (1, 4, 8, 16, 32)] for x in (small, middle, large)] == [
        [3, 3, 3, 3, 1],
        [3, 3, 1, 1, 1],
        [3, 1, 1, 1, 1],
    ]
    with batch_invariance():
        assert [conv_tiles.parts(x, n) for x in (small, middle, large) for n in (1, 64)] == [3, 3, 3, 3, 1, 1]
    others = row(8, 768, 768, taps=1), row(8, 768, 768, "input gradient"), row(8, 192, 768), row(8, 768, 768, taps=16)
    assert [conv_tiles.parts(x, 1) for x in others] == [1] * 4


@pytest.mark.parametrize("kind", conv_tiles.CONV)
def test_tiles_of_parts_keep_the_order_of_sums(kind):
    """The images decide about pixels alone."""
    at = {"wgmma": 90, "mma": 80}[kind]
    for channels in (192, 320, 576, 768):
        tiles = {conv_tiles.conv(conv_tiles.row(at, "forward", 9, 2, 2, 768, channels), 2**i, 3) for i in range(20)}
        assert len(tiles) > 1 and len({(tile.channels, tile.block_k, tile.boxes) for tile in tiles}) == 1
