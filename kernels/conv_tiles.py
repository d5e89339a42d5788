"""Tiles of the convolutions, as data with the reasons beside them: no timings yet, but what compiles without spills.

What decides in large convolutions is by all counts the traffic between L2 and the multiprocessors: a tile of M × N needs
4,096·(M + N)/(M·N) bytes per clock at the full rate of Hopper's tensor cores. `RATE` of them is what to expect, so that
wide tiles are worth some padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import triton

from kernels.invariance import is_batch_invariant

RATE = 35  # bytes per clock and multiprocessor, an assumption: about 6 TB/s on an H100
MULTIPROCESSORS = 132  # that work is divided for; a constant, so that sums have one order on every device
FEW_IMAGES, LEAST_STEPS = 4, 12  # where sums are divided for evaluations: the middle of 1 to 8 images, steps of a part


@dataclass(frozen=True)
class ConvTile:
    """Output channels (of one or two accumulators) × pixels per program, input channels per step, warps, stages."""

    channels: tuple[int, int]
    pixels: int
    block_k: int
    warps: int
    stages: int
    boxes: bool = True  # through tensor descriptors

    def box(self, height: int, width: int, whole: bool = False) -> tuple[int, int, int]:
        """Images, rows and columns of a program's pixels. They divide into quarters of whole rows; if `whole`, columns divide the width."""
        bw = min(16, max(1, width & -width) if whole else triton.next_power_of_2(width))
        bh = min(self.pixels // bw, triton.next_power_of_2(height))
        return self.pixels // (bw * bh), bh, bw


@dataclass(frozen=True)
class WgradTile:
    """Output × input channels (each in one or two parts) per program, pixels per step, warps, stages.

    The steps are divided among as many programs as make `waves` on all multiprocessors.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    pixels: int
    warps: int
    stages: int
    boxes: bool = True
    waves: int = 3

    def box(self, height: int, width: int) -> tuple[tuple[int, int, int], bool]:
        """Images, rows and columns of a step's pixels, and whether these are consecutive in memory.

        If not they are of one row: descriptors of other boxes would send the gradient through registers.
        """
        if width & (width - 1) == 0 and width < self.pixels:
            bh = min(self.pixels // width, triton.next_power_of_2(height))
            bi = self.pixels // (width * bh)
            if height % bh == 0 and (bi == 1 or bh == height):
                return (bi, bh, width), True
        return (1, 1, min(self.pixels, max(16, triton.next_power_of_2(width)))), False


class Row(NamedTuple):
    """What the tables below know a convolution by: kind of matrix product, "forward", "input gradient" or "weight gradient",
    taps, height, width, input and output channels of what is computed, and of the latter those that are a tensor of their own."""

    kind: str
    op: str
    taps: int
    height: int
    width: int
    depth: int
    channels: int
    rest: int = 0

    def blocks(self, size: int) -> int:
        """Of `size` output channels; each tensor starts with a block of its own."""
        return -(-(self.channels - self.rest) // size) + -(-self.rest // size)


# Kind of matrix product → tiles of each number of channels, the most pixels first. Fewer pixels are for small batches,
# which would leave multiprocessors idle; channels and steps never follow the batch, so that it cannot change a sum.
# Registers and shared memory of sm_90 (Triton 3.9), over all epilogues. What a step of each takes in instructions:
# tests/gate/loops-triton-3.9.0.csv.
CONV: dict[str, list[list[ConvTile]]] = {
    "wgmma": [
        # 37 bytes per clock, the least of all that fit. 234 to 255 registers, 168 KB
        [ConvTile((128, 64), 256, 64, 8, 3), ConvTile((128, 64), 128, 64, 8, 4), ConvTile((128, 64), 64, 64, 4, 4)],
        # 48. 155 to 255, 144 KB
        [ConvTile((128, 0), 256, 64, 8, 3), ConvTile((128, 0), 128, 64, 8, 4), ConvTile((128, 0), 64, 64, 4, 4)],
        # 80. Two programs per multiprocessor, 80 KB: for narrow networks and the last convolution
        [ConvTile((64, 0), 256, 64, 4, 2), ConvTile((64, 0), 128, 64, 4, 4), ConvTile((64, 0), 64, 64, 4, 6)],
    ],
    # Two programs per multiprocessor, 24 to 32 KB: fits consumer cards. sm_80: 128 to 178 registers
    "mma": [
        [ConvTile((128, 0), 128, 32, 8, 3, False), ConvTile((128, 0), 64, 32, 4, 3, False)],
        [ConvTile((64, 0), 128, 32, 4, 3, False), ConvTile((64, 0), 64, 32, 4, 3, False)],
    ],
}
WGRAD: dict[str, list[WgradTile]] = {
    "wgmma": [
        WgradTile((128, 64), (128, 64), 64, 8, 3),  # 43 bytes per clock. 172 registers, 144 KB
        WgradTile((128, 0), (256, 0), 64, 8, 3),  # 48
        WgradTile((128, 0), (128, 0), 64, 8, 3),  # 64
        WgradTile((64, 0), (128, 64), 64, 4, 3),  # 85
        WgradTile((128, 64), (64, 0), 64, 4, 3),
        WgradTile((64, 0), (64, 0), 64, 4, 3),  # 128
    ],
    "mma": [WgradTile((128, 0), (128, 0), 32, 8, 3, False), WgradTile((64, 0), (64, 0), 32, 4, 3, False)],
}


# What was measured to be quicker than the choice from the lists above: for convolutions a list like those, all of the same
# channels and steps, for weight gradients a tile: that of the first one for all in its launch. `python -m bench tune` prints
# the rows to add, each with its GPU and gain in a comment. Nothing measured yet.
TUNED: dict[Row, list[ConvTile] | WgradTile] = {}


# Where cuDNN or cuBLAS and a pass for the epilogue win in training, with the figure that shows it; as the library knows no
# second tensor, without that one's channels. Not measured yet.
LIBRARY: set[Row] = set()


def row(capability: int, op: str, taps: int, height: int, width: int, depth: int, channels: int, rest: int = 0) -> Row:
    return Row(kind(capability), op, taps, height, width, depth, channels, rest)


def kind(capability: int) -> str:
    """sm_90 to sm_110 have wgmma or tcgen05 and 227 KB; others mma, down to 99 KB."""
    return "wgmma" if 90 <= capability < 120 else "mma"


def library(itemsize: int) -> bool:
    """Does the library convolve, whatever the table? In fp32: at full precision tensor cores compute nothing."""
    return itemsize == 4


def parts(row: Row, images: int) -> int:
    """Into how many the sum of a convolution, over all its sources, is divided for an evaluation of `images`, a row of taps each.

    3 where in one piece the smallest tiles would leave more than half of the multiprocessors idle, and each part has steps
    enough to be worth a second pass; whatever the number of images if that must not change a bit.
    """
    images = FEW_IMAGES if is_batch_invariant() else images
    tile = _listed(row)[-1]
    programs = row.blocks(sum(tile.channels)) * -(-images * row.height * row.width // tile.pixels)
    steps = row.taps // 3 * -(-row.depth // tile.block_k)
    return 3 if row.op == "forward" and row.taps == 9 and 2 * programs <= MULTIPROCESSORS and steps >= LEAST_STEPS else 1


def conv(row: Row, images: int, parts: int = 1) -> ConvTile:
    """For a convolution or an input gradient of `images`, in so many parts."""
    tiles = TUNED.get(row) or _listed(row)
    return next((tile for tile in tiles if fills(tile, row, images, parts)), tiles[-1])


def _listed(row: Row) -> list[ConvTile]:

    def cost(tiles: Sequence[ConvTile]) -> float:
        size = sum(tiles[0].channels)
        return _cost(row.blocks(size) * size, size, tiles[0].pixels)

    return allowed(row, min(CONV[row.kind], key=cost))


def allowed(row: Row, tiles: Iterable[ConvTile]) -> list[ConvTile]:
    """The epilogue of the input gradient behind an up-sampling loads five tensors: 256 pixels spill, 200 bytes on Blackwell,
    few on Hopper."""
    most = 128 if row.taps == 16 and row.op == "input gradient" else 256
    return [tile for tile in tiles if tile.pixels <= most]


def fills(tile: ConvTile, row: Row, images: int, parts: int = 1) -> bool:
    """Are there programs for nine tenths of the multiprocessors?"""
    phases = 4 if row.taps == 16 and row.op == "forward" else parts
    pixels = phases * images * row.height * row.width
    return row.blocks(sum(tile.channels)) * (pixels // tile.pixels) > 0.9 * MULTIPROCESSORS


def wgrad(row: Row) -> WgradTile:
    """For a weight gradient of `channels` × `depth`."""
    return TUNED.get(row) or listed_wgrad(row)


def listed_wgrad(row: Row) -> WgradTile:
    """Without rows that were measured."""
    return min(
        WGRAD[row.kind],
        key=lambda x: _cost(row.channels, sum(x.rows), sum(x.columns)) * _padded(row.depth, sum(x.columns)) / row.depth,
    )


def splits(tile: WgradTile, tiles: int, steps: int) -> int:
    """Among how many programs the steps of each of `tiles` are divided, if there are steps for them."""
    return max(1, min(tile.waves * MULTIPROCESSORS // tiles, steps // 4))


def _cost(channels: int, m: int, n: int) -> float:
    """Of computing `channels` by tiles of m × n."""
    return _padded(channels, m) * max(1.0, 4096 * (m + n) / (m * n) / RATE)


def _padded(size: int, block: int) -> int:
    return -(-size // block) * block
