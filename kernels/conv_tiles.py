"""Tiles of the convolutions, as data with the reasons beside them: no timings yet, but what compiles without spills."""

from dataclasses import dataclass

import triton

MULTIPROCESSORS = 132  # that work is divided for; a constant, so that sums have one order on every device


@dataclass(frozen=True)
class ConvTile:
    """Output channels (of one or two accumulators) × pixels per program, input channels per step, warps, stages."""

    channels: tuple[int, int]
    pixels: int
    block_k: int
    warps: int
    stages: int
    boxes: bool  # through tensor descriptors

    def box(self, height: int, width: int) -> tuple[int, int, int]:
        """Images, rows and columns of a program's pixels. Divides into quarters of whole rows."""
        bw = min(16, triton.next_power_of_2(width))
        bh = min(self.pixels // bw, triton.next_power_of_2(height))
        return self.pixels // (bw * bh), bh, bw


@dataclass(frozen=True)
class WgradTile:
    """Output × input channels (each in one or two parts) per program, pixels per step, warps, stages."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    pixels: int
    warps: int
    stages: int
    boxes: bool

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


# Kind of matrix product → channels that a tile fits, in the order of preference.
CONV: dict[str, dict[int, ConvTile]] = {
    # The least traffic of L2 (37 bytes per cycle and multiprocessor at full rate) and shared memory.
    "wgmma": {
        192: ConvTile((128, 64), 256, 64, 8, 3, True),
        128: ConvTile((128, 0), 256, 64, 8, 3, True),
        64: ConvTile((64, 0), 256, 64, 4, 2, True),
    },
    # Two programs per multiprocessor; fits the 99 KB of consumer cards.
    "mma": {
        128: ConvTile((128, 0), 128, 32, 8, 3, False),
        64: ConvTile((64, 0), 128, 32, 4, 3, False),
    },
    "fp32": {64: ConvTile((64, 0), 64, 16, 8, 1, False)},
}
WGRAD: dict[str, dict[int, WgradTile]] = {
    "wgmma": {
        192: WgradTile((128, 64), (128, 64), 64, 8, 3, True),
        128: WgradTile((128, 0), (128, 0), 64, 8, 3, True),
        64: WgradTile((64, 0), (64, 0), 64, 4, 3, True),
    },
    "mma": {
        128: WgradTile((128, 0), (128, 0), 32, 8, 3, False),
        64: WgradTile((64, 0), (64, 0), 32, 4, 3, False),
    },
    "fp32": {64: WgradTile((64, 0), (64, 0), 16, 8, 1, False)},
}


def kind(capability: int, itemsize: int) -> str:
    """sm_90 to sm_110 have wgmma or tcgen05 and 227 KB; others mma, down to 99 KB."""
    return "fp32" if itemsize == 4 else "wgmma" if 90 <= capability < 120 else "mma"


def conv(capability: int, itemsize: int, pixels: int, channels: int, depth: int) -> ConvTile:
    """For `channels` sums over `depth` channels at `pixels`."""
    rows = CONV[kind(capability, itemsize)]
    return rows[_fitting(channels, rows)]


def wgrad(capability: int, itemsize: int, channels: int, depth: int) -> WgradTile:
    """For a gradient of `channels` × `depth`."""
    rows = WGRAD[kind(capability, itemsize)]
    return rows[min(_fitting(channels, rows), _fitting(depth, rows))]


def splits(tiles: int, steps: int) -> int:
    """Among how many programs a tile's steps are divided: three waves of programs, if there are steps for them."""
    return max(1, min(3 * MULTIPROCESSORS // tiles, steps // 4))


def _fitting(channels: int, widths) -> int:
    """The widest whose padding wastes no more than a tenth, else the one that wastes least."""
    waste = {width: -(-channels // width) * width / channels for width in widths}
    return next((width for width in widths if waste[width] <= 1.1), min(waste, key=waste.get))
