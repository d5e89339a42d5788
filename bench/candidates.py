"""Tiles that may be quicker than those that `kernels.conv_tiles` chooses, and the rows that would make it choose them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, replace
from itertools import chain
from typing import Any

from kernels import conv_tiles
from kernels.conv_tiles import CONV, WGRAD, ConvTile, Row, WgradTile
from kernels.convolve import EPILOGUE_STAGES
from kernels.wgrad import PRODUCTS

Tile = ConvTile | WgradTile
SHARED = {"wgmma": 227 * 1024, "mma": 99 * 1024}  # bytes: mma serves consumer cards too
BARRIERS = 1024  # bytes, more than any of the kernels has
ACCUMULATORS = 192  # registers per thread, of 255
PIXELS = {ConvTile: (64, 256), WgradTile: (32, 128)}  # quarters must be whole rows; more would not fit
WAVES = (1, 2, 4, 6)


def candidates(row: Row, images: int) -> list[Tile]:
    """The present tile first, then those of its kind that waste little on padding, and what differs from these in one number."""
    if row.op == "weight gradient":
        present = conv_tiles.wgrad(row)
        lists = _unpadded(WGRAD[row.kind], lambda x: _padded(row.channels, x.rows) * _padded(row.depth, x.columns))
        bases = [present, *lists]
        found = [*bases, *chain.from_iterable(map(_neighbours, bases)), *(replace(present, waves=n) for n in WAVES)]
    else:
        present = conv_tiles.conv(row, images)
        lists = _unpadded(CONV[row.kind], lambda tiles: row.blocks(sum(tiles[0].channels)) * sum(tiles[0].channels))
        bases = [present, *(tile for tiles in lists for tile in tiles if tile.pixels == present.pixels)]
        found = conv_tiles.allowed(row, [present, *chain.from_iterable(lists), *chain.from_iterable(map(_neighbours, bases))])
    return list(dict.fromkeys(tile for tile in found if tile == present or fits(tile, row.kind)))


def _neighbours(tile: Tile) -> Iterator[Tile]:
    least, most = PIXELS[type(tile)]
    yield from (replace(tile, stages=stages) for stages in (tile.stages - 1, tile.stages + 1) if stages >= 2)
    yield replace(tile, warps=4 if tile.warps == 8 else 8)
    yield from (replace(tile, pixels=pixels) for pixels in (tile.pixels // 2, 2 * tile.pixels) if least <= pixels <= most)


def _unpadded(tiles: Iterable[Any], cost: Callable[[Any], int]) -> list[Any]:
    """Those that compute at most a third more than the least of them."""
    tiles = list(tiles)
    return [x for x in tiles if 3 * cost(x) <= 4 * min(map(cost, tiles))]


def _padded(size: int, parts: tuple[int, int]) -> int:
    return -(-size // sum(parts)) * sum(parts)


def fits(tile: Tile, kind: str) -> bool:
    """Into shared memory with any epilogue, and its accumulators into registers."""
    elements = sum(tile.rows) * sum(tile.columns) if isinstance(tile, WgradTile) else sum(tile.channels) * tile.pixels
    return shared(tile, kind) <= SHARED[kind] and elements <= ACCUMULATORS * 32 * tile.warps


def shared(tile: Tile, kind: str) -> int:
    """Bytes of shared memory in half precision, at most: operands of all steps under way, or what passes through at the end.

    What a kernel has several times has memory of its own each time: the epilogues of a result's two tensors, and by pointers,
    where a stage less is under way, the loops over the products of weight gradients.
    """
    by_pointers = kind == "mma"
    if isinstance(tile, WgradTile):
        step = (sum(tile.rows) + sum(tile.columns)) * tile.pixels * (PRODUCTS if by_pointers else 1)
        end = 2 * tile.rows[0] * tile.columns[0]  # fp32, to be transposed
    else:
        step = (sum(tile.channels) + tile.pixels) * tile.block_k
        loads = 2 * 2 * (EPILOGUE_STAGES - by_pointers)  # two of each tensor: more than the five of one behind an up-sampling
        end = (loads + (not by_pointers)) * tile.channels[0] * tile.pixels // 4  # quarters of them and of what is stored
    return 2 * max(step * (tile.stages - by_pointers), end) + BARRIERS


def text(tile: Tile) -> str:
    """As it stands in the table."""
    given = [(field, getattr(tile, field.name)) for field in fields(tile)]
    values = [repr(x) if field.default is MISSING else f"{field.name}={x!r}" for field, x in given if x != field.default]
    return f"{type(tile).__name__}({', '.join(values)})"


def table_row(row: Row, tile: Tile, images: int) -> str:
    """A row of `kernels.conv_tiles.TUNED` that makes `tile` the choice for `images`, as Python.

    For other batches it has the other pixels of the tile's list, never other channels or steps.
    """
    value = text(tile)
    if isinstance(tile, ConvTile):
        lists = [*([conv_tiles.TUNED[row]] if row in conv_tiles.TUNED else []), *CONV[row.kind]]
        own = next(tiles for tiles in lists if (tiles[0].channels, tiles[0].block_k) == (tile.channels, tile.block_k))
        own = conv_tiles.allowed(row, own)
        more = [x for x in own if x.pixels > tile.pixels and not conv_tiles.fills(x, row, images)]
        fewer = [x for x in own if x.pixels < tile.pixels and conv_tiles.fills(tile, row, images)]
        value = f"[{', '.join(map(text, (*more, tile, *fewer)))}]"
    return f'("{row.kind}", "{row.op}", {", ".join(map(str, row[2:]))}): {value},'
