"""The convolution kernels and their epilogues against PyTorch's conv2d and autograd in float64, below the ops.

Of small integers every sum is exact, so that bits must be equal; else errors are at most twice those of PyTorch in fp16.
Every tensor that a kernel sees lies between NaNs, and outputs are NaN beforehand.
"""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import conv_tiles, convolve, wgrad
from kernels.convolve import Rest, Source
from kernels.jit import INTERPRET
from kernels.sums import Sums
from kernels.wgrad import Product, weight_gradient, weight_gradients
from tests.conftest import relative_error

aten = torch.ops.aten
MARGIN = 64  # elements before and after each tensor: whole 16 bytes
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1 or a CUDA device")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRET, reason="compiled kernels")]),
]
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
# Images, height, width, channels: boxes of 256 pixels hold 1, 2, 4 and 8 images, none of them whole
EPILOGUE_SIZES = [(1, 9, 17, 72), (3, 5, 16, 200), (5, 5, 7, 72), (9, 3, 5, 200)]


class Memory(TorchDispatchMode):
    """While entered, all that is allocated lies between NaNs and is NaN."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.generator = torch.Generator().manual_seed(0)
        self.blocks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.new_empty.default:
            return self.place(args[1], kwargs.get("dtype", args[0].dtype))
        if func is aten.empty_like.default:
            return self.place(args[0].shape, args[0].dtype)
        return func(*args, **kwargs)

    def place(self, shape, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        size = math.prod(shape)
        self.blocks.append(torch.full((size + 2 * MARGIN,), math.nan, dtype=dtype, device=self.device))
        return self.blocks[-1][MARGIN : MARGIN + size].view(*shape)

    def intact(self) -> bool:
        return all(x.isnan().all() for block in self.blocks for x in (block[:MARGIN], block[-MARGIN:]))

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return self.place(values.shape).copy_(values)

    def normal(self, *shape: int) -> torch.Tensor:
        return self.put(torch.randn(shape, generator=self.generator))

    def weight(self, *shape: int, fan_in: int) -> torch.Tensor:
        return self.put(torch.randn(shape, generator=self.generator) / fan_in**0.5)

    def integers(self, *shape: int, most: int = 2) -> torch.Tensor:
        return self.put(torch.randint(-most, most + 1, shape, generator=self.generator))


@pytest.fixture(params=DEVICES)
def memory(request):
    """And nothing but the outputs was written."""
    with Memory(request.param) as memory:
        yield memory
    assert memory.intact()


@pytest.fixture(params=[90, 80], ids=["boxes", "pointers"])
def arch(request, memory, monkeypatch):
    """The architecture that tiles are chosen for."""
    if memory.device == "cuda" and request.param == 90:
        skip_boxes_unless_hopper()
    for module in (convolve, wgrad):
        monkeypatch.setattr(module, "capability", lambda x: request.param)
    return request.param


def skip_boxes_unless_hopper() -> None:
    major, minor = torch.cuda.get_device_capability()
    if conv_tiles.kind(10 * major + minor) != "wgmma":
        pytest.skip("these tiles need the shared memory of Hopper")


def conv2d(x, w):
    """x `[N, H, W, K]`, w `[9 or 1, C, K]`."""
    side = math.isqrt(len(w))
    kernel = w.permute(1, 2, 0).unflatten(2, (side, side))
    return F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=side // 2).permute(0, 2, 3, 1)


def by_autograd(x, w, g):
    """y, dx and dw in float64."""
    x, w, g = (t.cpu().double().requires_grad_() for t in (x, w, g))
    y = conv2d(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


def exactly(actual, expected) -> bool:
    assert expected.abs().max() <= (2048 if actual.dtype == torch.float16 else 2**24), "not exact"
    return torch.equal(actual.cpu(), expected.to(actual.dtype))


def input_and_weight(memory, n, h, w, k, c, taps):
    """And the gradient of the output, of small integers."""
    return memory.integers(n, h, w, k), memory.integers(taps, c, k, most=1), memory.integers(n, h, w, c)


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
    if memory.device == "cuda" and tile.boxes:
        skip_boxes_unless_hopper()
    channels = sum(tile.channels) + 8
    x, w, g = input_and_weight(memory, 2, 5, 9, 8, channels, 9)
    assert exactly(convolve.convolve(x, w, tile=tile)[0], by_autograd(x, w, g)[0])
    x, w, g = input_and_weight(memory, 2, 5, 9, channels, 8, 9)
    assert exactly(convolve.convolve(g, w, transposed=True, tile=tile)[0], by_autograd(x, w, g)[1])


@pytest.mark.parametrize("tile", ALL_WGRAD_TILES, ids=str)
def test_every_tile_of_weight_gradients(tile, memory):
    """Consecutive pixels of several images, of one, of a row; ragged rows."""
    if memory.device == "cuda" and tile.boxes:
        skip_boxes_unless_hopper()
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


def mp_silu(x):
    return F.silu(x) / 0.596


def grads(y, x, g):
    return torch.autograd.grad(y, x, g)


SUM = dict(scale=0.8, scale_aux=0.6)
INNER = dict(transposed=True, scale=0.8)


def operands(memory, n, h, w, c, k=24, taps=1):
    """Of all epilogues. Rows of the skip weights and of m lie apart."""
    skip, modulation = memory.weight(1, c, 56, fan_in=56), memory.normal(n, c + 16)
    return SimpleNamespace(
        x=memory.normal(n, h, w, k), w=memory.weight(taps, c, k, fan_in=taps * k),
        a=memory.normal(n, h, w, 16), wa=skip[..., :16], b=memory.normal(n, h, w, 40), wb=skip[..., 16:],
        m=modulation[:, 8:-8], aux=memory.normal(n, h, w, c), act=memory.normal(n, h, w, c),
        g=memory.normal(n, h, w, k), wt=memory.weight(taps, k, c, fan_in=taps * k),
    )  # fmt: skip


def sources(t):
    return [Source(t.a, t.wa), Source(t.b, t.wb)]


def of_residual(t):
    """The derivative of 0.8·conv(MP-SiLU(0.7·act)) + 0.6·act, the gradients being g and aux."""
    s = t.act.detach().requires_grad_()
    return grads((0.8 * conv2d(mp_silu(0.7 * s), t.wt), 0.6 * s), s, (t.g, t.aux))


def of_silu(t):
    """The derivatives of 0.8·conv(MP-SiLU(aux·m))."""
    u, m = t.aux.detach().requires_grad_(), t.m.detach().requires_grad_()
    return grads(0.8 * conv2d(mp_silu(u * m[:, None, None]), t.wt), (u, m), t.g)


def modulated(t):
    u = 0.8 * conv2d(t.x, t.w)
    return mp_silu(u * t.m[:, None, None]), u


def with_silu(y):
    return y, mp_silu(y)


# How a kernel computes it, and how PyTorch does
EPILOGUES = {
    "sum": (
        lambda t, **o: convolve.convolve(t.x, t.w, scale=0.8, **o),
        lambda t: (0.8 * conv2d(t.x, t.w),),
    ),
    "sum, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, scale=0.8, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * conv2d(t.x, t.w)).clamp(-0.5, 0.5)),
    ),
    "sum of two": (
        lambda t, **o: convolve.convolve(t.x, t.w, **SUM, aux=t.aux, **o),
        lambda t: (0.8 * conv2d(t.x, t.w) + 0.6 * t.aux,),
    ),
    "sum of two, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, **SUM, aux=t.aux, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * conv2d(t.x, t.w) + 0.6 * t.aux).clamp(-0.5, 0.5)),
    ),
    "source": (
        lambda t, **o: convolve.convolve(t.x, t.w, sources=sources(t)[:1], scale=0.8, **o),
        lambda t: (0.8 * (conv2d(t.x, t.w) + conv2d(t.a, t.wa)),),
    ),
    "two sources, clip, silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, sources=sources(t), scale=0.8, clip=0.5, with_extra=True, **o),
        lambda t: with_silu((0.8 * (conv2d(t.x, t.w) + conv2d(t.a, t.wa) + conv2d(t.b, t.wb))).clamp(-0.5, 0.5)),
    ),
    "silu": (
        lambda t, **o: convolve.convolve(t.x, t.w, "silu", scale=0.8, m=t.m, **o),
        lambda t: modulated(t)[:1],
    ),
    "silu, u": (
        lambda t, **o: convolve.convolve(t.x, t.w, "silu", scale=0.8, m=t.m, with_extra=True, **o),
        modulated,
    ),
    "silu_grad": (
        lambda t, **o: convolve.convolve(t.g, t.wt, "silu_grad", **INNER, aux=t.aux, m=t.m, **o),
        of_silu,
    ),
    "residual_silu_grad": (
        lambda t, **o: convolve.convolve(
            t.g, t.wt, "residual_silu_grad", **INNER, aux=t.aux, scale_aux=0.6, act=t.act, scale_act=0.7, **o
        ),
        of_residual,
    ),
}  # fmt: skip
every_epilogue = pytest.mark.parametrize(("kernel", "plainly"), EPILOGUES.values(), ids=EPILOGUES.keys())


def results(outputs) -> list[torch.Tensor]:
    return [y for y in outputs if y is not None]


def each(t, f) -> SimpleNamespace:
    return SimpleNamespace(**{name: f(x) for name, x in vars(t).items()})


def image(t, i) -> SimpleNamespace:
    return SimpleNamespace(**{name: x if name.startswith("w") else x[i : i + 1] for name, x in vars(t).items()})


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
