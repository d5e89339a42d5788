"""Sums over the partial results of programs, in fixed order: no atomics, the same bits from every run."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.jit import launch

SLOTS = 4  # sums in one launch
BLOCK = 1024  # elements per program


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "end0", "end1", "end2"])
def sum_parts_kernel(
    parts0, parts1, parts2, parts3, y0, y1, y2, y3,
    n0, n1, n2, n3, part0, part1, part2, part3, row0, row1, row2, row3, row_y0, row_y1, row_y2, row_y3, L0, L1, L2, L3,
    end0, end1, end2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to four sums: the programs before end0 take the first, those before end1 the second, and so on."""
    program = tl.program_id(0)
    if program < end0:
        sum_block(parts0, y0, program, n0, part0, row0, row_y0, L0, BLOCK)
    elif program < end1:
        sum_block(parts1, y1, program - end0, n1, part1, row1, row_y1, L1, BLOCK)
    elif program < end2:
        sum_block(parts2, y2, program - end1, n2, part2, row2, row_y2, L2, BLOCK)
    else:
        sum_block(parts3, y3, program - end2, n3, part3, row3, row_y3, L3, BLOCK)


@triton.jit
def sum_block(parts_ptr, y_ptr, program, parts, stride_part, stride_row, stride_y, L, BLOCK: tl.constexpr):
    """y[row, l] = Σ over parts, in their order, of fp32 parts[row, part, l]."""
    if parts_ptr is not None:
        blocks = tl.cdiv(L, BLOCK)
        row, offs = (program // blocks).to(tl.int64), program % blocks * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for part in range(parts):
            total += tl.load(parts_ptr + row * stride_row + part * stride_part + offs, offs < L, other=0.0)
        tl.store(y_ptr + row * stride_y + offs, total.to(y_ptr.dtype.element_ty), offs < L)


class Sums:
    """Sums that wait for a common launch."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, parts: Tensor, out: Tensor) -> None:
        """out[r, l] = Σ over p of fp32 parts[r, p, l], in order; rows of both are contiguous."""
        self.waiting.append((parts, out))

    def run(self) -> None:
        while self.waiting:
            _launch(self.waiting[:SLOTS])
            del self.waiting[:SLOTS]


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """`Sums.add`, at once."""
    _launch([(parts, out)])


def _launch(sums: list[tuple[Tensor, Tensor]]) -> None:
    longest = max(parts.shape[2] for parts, _ in sums)
    block = min(BLOCK, triton.next_power_of_2(longest))
    ends, columns = [0], []
    for parts, out in sums:
        rows, count, length = parts.shape
        ends.append(ends[-1] + rows * triton.cdiv(length, block))
        columns.append((parts, out, count, parts.stride(1), parts.stride(0), out.stride(0), length))
    columns += [(None, None, 1, 1, 1, 1, 1)] * (SLOTS - len(sums))
    inner = [*ends[1:], *[ends[-1]] * SLOTS][: SLOTS - 1]
    launch(sum_parts_kernel, (ends[-1],), *(x for column in zip(*columns) for x in column), *inner, BLOCK=block, num_warps=4)
