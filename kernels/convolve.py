"""Launches of the convolution kernel with its epilogues, by the tiles of `kernels.conv_tiles`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels import conv_tiles, library
from kernels.conv_tiles import ConvTile
from kernels.epilogue import epilogue_kernel
from kernels.implicit_gemm import conv_kernel
from kernels.jit import capability, descriptor, launch
from kernels.sums import Sums, sum_parts
from kernels.wgrad import by_rows

LAST_PASS = ConvTile((32, 0), 64, 0, 4, 1, boxes=False)  # over the parts of few pixels: many programs
EPILOGUE_STAGES = 3  # a quarter's loads run two ahead; where they are five, one: else they take more memory than the main loop


class Source(NamedTuple):
    """A tensor `[N, H, W, K]` and its weight `[9 or 1, C, K]`, whose rows may lie apart."""

    x: Tensor
    w: Tensor


class Rest(NamedTuple):
    """The last `channels` of a result are a tensor of their own, with its own aux and act, and without a clip."""

    channels: int
    aux: Tensor | None = None
    act: Tensor | None = None
    scale_act: float = 1.0


def convolve(
    x: Tensor,
    w: Tensor,
    epilogue: str = "sum",
    *,
    transposed: bool = False,
    sources: Sequence[Source] = (),
    scale: float = 1.0,
    aux: Tensor | None = None,
    scale_aux: float = 0.0,
    act: Tensor | None = None,
    scale_act: float = 1.0,
    clip: float | None = None,
    with_extra: bool = False,
    m: Tensor | None = None,
    rest: Rest | None = None,
    tile: ConvTile | None = None,
    training: bool = False,
    split: bool = False,
    later: Sums | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y and extra, y and dm, or y and its `rest`, of an epilogue (see `finish`).

    x `[N, H, W, K]`, w `[9 or 1, C, K]` (for the input gradient `transposed`, `[9 or 1, K, C]`), m `[N, C]`, aux
    and act `[N, H, W, C]`. The convolutions of up to two `sources`, with as many taps, are added before the scale. dm is there at once,
    or when the sums of `later` have run. In fp32, and in training where the table of tiles says so, the library convolves,
    and `epilogue_kernel` does the rest. With `split`, which is for evaluations, the sums of few pixels are divided among
    programs, and it adds the parts.

    With a w of 16 taps (see `reference.up_weight`), y and extra are `[N, 2H, 2W, C]`; if transposed x and aux are, and y is not.
    An aux `[N, H/2, W/2, C]` is up-sampled.
    """
    (n, height, width, depth), channels = x.shape, w.shape[2 if transposed else 1]
    up = None if aux is None or aux.shape[:3] == x.shape[:3] else "residual"
    if w.shape[0] == 16:
        up = "gradient" if transposed else "output"
    if up == "gradient":
        height, width = height // 2, width // 2
    op = "input gradient" if transposed else "forward"
    row = conv_tiles.row(capability(x), op, w.shape[0], height, width, depth, channels, rest.channels if rest else 0)
    depths = [depth, *(source.x.shape[3] for source in sources if source.w.shape[0] == w.shape[0])]
    parts = conv_tiles.parts(row._replace(depth=sum(depths)), n) if split else 1
    in_table = training and not sources and w.shape[0] != 16 and row._replace(rest=0) in conv_tiles.LIBRARY
    by_library = in_table or conv_tiles.library(x.element_size())
    u = _library(x, w, transposed, sources) if by_library else None
    if by_library and up == "output":  # of what follows, nothing up-samples
        height, width, up = 2 * height, 2 * width, None
    double = 2 if up == "output" else 1

    def result(channels: int, aux: Tensor | None, act: Tensor | None, with_extra: bool = False) -> _Result:
        y = x.new_empty(n, height * double, width * double, channels)
        return _Result(y, torch.empty_like(y) if with_extra else None, aux, act)

    first = result(channels - (rest.channels if rest else 0), aux, act, with_extra)
    second = result(*rest[:3]) if rest else None
    with_dm = epilogue == "silu_grad"
    if 0 in (n, height, width):
        return first.y, torch.zeros_like(m) if with_dm else second.y if rest else first.extra
    if parts > 1 and not by_library:
        u, tile = _sum_parts(x, w, sources, parts, tile or conv_tiles.conv(row, n, parts)), LAST_PASS
    tile = tile or conv_tiles.conv(row, n)
    bi, bh, bw = tile.box(height, width, whole=up == "output")
    tiles_image = triton.cdiv(height, bh) * triton.cdiv(width, bw)
    tiles = triton.cdiv(n, bi) * tiles_image
    sums = m.new_empty(n, max(4 // bi, 1) * tiles_image, channels, dtype=torch.float32) if with_dm else None
    form = dict(EPILOGUE=epilogue, UP=up, BI=bi, BH=bh, BW=bw)
    sizes = (n, height, width, 0 if m is None else m.stride(0))
    scales = (scale, scale_aux, scale_act, rest.scale_act if rest else 1.0)
    if by_library and epilogue == "sum" and aux is None and clip is None and not with_extra:
        u = u if scale == 1 else u.mul_(scale)
        return torch.split_with_sizes_copy(u, [first.y.shape[3], rest.channels], dim=3) if rest else (u, None)
    if u is not None:
        _launch_epilogue(u, first, second, m, sums, sizes, scales, clip, form, tile, tiles)
    else:
        _launch_kernel(x, w, transposed, sources, first, second, m, sums, sizes, scales, clip, form, tile, tiles * double**2)
    if not with_dm:
        return first.y, second.y if rest else first.extra
    dm = m.new_empty(m.shape)
    (sum_parts if later is None else later.add)(sums, dm)
    return first.y, dm


class _Result(NamedTuple):
    """What an epilogue reads and writes pixel by pixel. y has a first axis of parts, or none."""

    y: Tensor
    extra: Tensor | None = None
    aux: Tensor | None = None
    act: Tensor | None = None


def _library(x: Tensor, w: Tensor, transposed: bool, sources: Sequence[Source]) -> Tensor:
    assert not (transposed and sources)
    u = library.convolution(x, w, transposed)
    for source in sources:
        u += library.convolution(source.x, source.w)
    return u


def _sum_parts(x: Tensor, w: Tensor, sources: Sequence[Source], parts: int, tile: ConvTile) -> Tensor:
    """The convolution in fp32, not yet added: `[parts, N, H, W, C]`. Sources of a single tap are a part of their own."""
    n, height, width, _ = x.shape
    parts += any(source.w.shape[0] == 1 for source in sources)
    u = x.new_empty(parts, n, height, width, w.shape[1], dtype=torch.float32)
    bi, bh, bw = tile.box(height, width)
    tiles = parts * triton.cdiv(n, bi) * triton.cdiv(height, bh) * triton.cdiv(width, bw)
    form = dict(EPILOGUE="sum", UP="part", BI=bi, BH=bh, BW=bw)
    _launch_kernel(x, w, False, sources, _Result(u), None, None, None, (n, height, width, 0), (1.0,) * 4, None, form, tile, tiles)
    return u


def _launch_epilogue(
    u: Tensor, first: _Result, second: _Result | None, m: Tensor | None, sums: Tensor | None,
    sizes: tuple[int, ...], scales: tuple[float, ...], clip: float | None, form: dict[str, Any], tile: ConvTile, tiles: int,
) -> None:  # fmt: skip
    """What follows u, a convolution by the library `[N, H, W, C]` or in parts `[parts, N, H, W, C]`, on `tiles` of pixels."""
    scale, scale_aux, *scales_act = scales
    block, start = tile.channels[0], 0
    for part, scale_act, clip_part in zip((first, second), scales_act, (clip, None)):
        if part is None:
            continue
        channels = part.y.shape[3]
        own = u.narrow(-1, start, channels).contiguous()
        launch(
            epilogue_kernel, (tiles * triton.cdiv(channels, block),), own, *part, m, sums, *sizes, scale, scale_aux, scale_act,
            C=channels, CLIP=clip_part, BN=block, PARTS=len(u) if u.ndim == 5 else 1, **form, num_warps=tile.warps,
        )  # fmt: skip
        start += channels


def _launch_kernel(
    x: Tensor, w: Tensor, transposed: bool, sources: Sequence[Source], first: _Result, second: _Result | None,
    m: Tensor | None, sums: Tensor | None, sizes: tuple[int, ...], scales: tuple[float, ...], clip: float | None,
    form: dict[str, Any], tile: ConvTile, tiles: int,
) -> None:  # fmt: skip
    """The implicit GEMM, on `tiles` of pixels."""
    (n, height, width, *_), channels, up = sizes, w.shape[2 if transposed else 1], form["UP"]
    rest = second.y.shape[3] if second else 0
    a, b = (*sources, None, None)[:2]
    views = _Views(tile, (form["BI"], form["BH"], form["BW"]))
    block = sum(tile.channels)
    y, extra, aux, act = views.result(first, up)
    rest_y, _, rest_aux, rest_act = views.result(second, up) if second else ((None, None),) * 4
    launch(
        conv_kernel, (tiles * (triton.cdiv(channels - rest, block) + triton.cdiv(rest, block)),),
        views.input(x, up == "gradient"), *views.weight(w, transposed),
        *(views.input(a.x), *views.weight(a.w)) if a else (None,) * 3,
        *(views.input(b.x), *views.weight(b.w)) if b else (None,) * 3,
        *y, *extra, *aux, *act, m, sums,
        *rest_y, *rest_aux, *rest_act,
        *sizes, *scales, **form, CLIP=clip, C=channels, REST=rest,
        K=x.shape[3], KA=a.x.shape[3] if a else 0, KB=b.x.shape[3] if b else 0, TAPS={"output": 4, "part": 3}.get(up, w.shape[0]),
        TAPS_A=(3 if up == "part" and a.w.shape[0] == 9 else a.w.shape[0]) if a else 0,
        TRANSPOSED=transposed, STRIDE_W=views.stride(w), STRIDE_WA=views.stride(a.w) if a else 0,
        BN0=tile.channels[0], BN1=tile.channels[1], BLOCK_K=tile.block_k,
        BOXES=tile.boxes, STAGES=EPILOGUE_STAGES - (up == "gradient"), num_warps=tile.warps, num_stages=tile.stages,
        flops=2 * n * height * width * channels * sum(w.shape[0] * x.shape[3] for x, w in ((x, w), *sources)),
    )  # fmt: skip


class _Views(NamedTuple):
    """How the kernel reaches tensors: descriptors with the boxes of a tile, or the tensors themselves."""

    tile: ConvTile
    box: tuple[int, int, int]

    def input(self, x: Tensor, doubled: bool = False) -> Any:
        if not self.tile.boxes:
            return x
        bi, bh, bw = self.box
        return descriptor(by_rows(x), bi, bh, 1, bw, self.tile.block_k) if doubled else descriptor(x, bi, bh, bw, self.tile.block_k)

    def weight(self, w: Tensor, transposed: bool = False) -> list:
        """For each accumulator, like `output`."""
        depth = self.tile.block_k
        return self._each(w, *((1, depth, c) if transposed else (1, c, depth) for c in self.tile.channels))

    def stride(self, w: Tensor) -> int:
        """Of a weight's rows, where the kernel must know it."""
        return 0 if self.tile.boxes else w.stride(1)

    def output(self, y: Tensor | None, doubled: bool = False) -> list:
        """In quarters; y has an axis of parts before it, or none."""
        if doubled and y is not None and self.tile.boxes:
            n, height, width, channels = y.shape
            y = y.view(n, height // 2, width, 2, channels)  # (row phase, column), column phase
        part = [1] * (y is not None and y.ndim == 5 and not doubled)
        return self._each(y, *((*part, *self._quarter, *[1] * doubled, c) for c in self.tile.channels))

    def result(self, x: _Result, up: str | None) -> tuple[list, ...]:
        """Of y, extra, aux and act."""
        return self.output(x.y, up == "output"), self.output(x.extra, up == "output"), self.aux(x.aux, up), self.output(x.act)

    def aux(self, x: Tensor | None, up: str | None) -> list:
        qi, qh, bw = self._quarter
        if up == "residual":
            return self._each(x, *((qi, max(qh // 2, 1), bw // 2, c) for c in self.tile.channels))
        if up == "gradient" and x is not None and self.tile.boxes:
            return self._each(by_rows(x), *((qi, qh, 1, bw, c) for c in self.tile.channels))
        return self.output(x)

    @property
    def _quarter(self) -> tuple[int, int, int]:
        bi, bh, bw = self.box
        return max(bi // 4, 1), bh // max(4 // bi, 1), bw

    def _each(self, x: Tensor | None, *sizes: tuple[int, ...]) -> list:
        if x is None or not self.tile.boxes:
            return [x, x]
        return [descriptor(x, *size) if 0 not in size else None for size in sizes]
