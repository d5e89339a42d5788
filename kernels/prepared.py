"""All weights of a network prepared together, once per optimizer step: few launches, and gradients in fp32.

Forward and backward see only prepared weights; their gradients add up over any number of rounds, and are projected onto
the raw weights once (the projection is linear). A program serves one row of one weight. Most of them the optimizer has
prepared in the pass that changed them: see `kernels.adam`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import eager
from kernels.flat import flat_views
from kernels.jit import is_recording, launch, serves
from kernels.raw_weight import RawWeight
from kernels.rows import Addresses, pointer, row_programs
from kernels.weight import BLOCK, PreparedWeight, prepare_row, project_row, qkv_row


class PreparedWeights:
    """The prepared weights of `groups`, in `weights`: one for each group, its members one after the other along Cout.

    `prepare` computes their values and forgets their gradients; `project` turns the gradients that have come since into
    `.grad` of the raw weights and gains (views of `gradients`, one flat tensor), replacing what was there.
    """

    def __init__(self, groups: Sequence[Sequence[RawWeight]]):
        self.weights = [_empty(group) for group in groups]
        members = [(i, raw) for i, group in enumerate(groups) for raw in group]
        self.gradients, views = flat_views([x for _, raw in members for x in (raw.weight, raw.gain) if x is not None])
        classes = defaultdict(list)
        firsts = [0] * len(groups)
        for i, raw in members:
            dw = next(views)
            dgain = None if raw.gain is None else next(views)
            member = Member(raw, self.weights[i], firsts[i], dw, dgain)
            classes[raw.dtype, raw.weight[0, 0].numel(), raw.up, member.is_aligned, member.is_target].append(member)
            firsts[i] += len(raw.weight)
        self._classes = [_Class(taps, up, aligned, members) for (_, taps, up, aligned, _), members in classes.items()]

    @torch.no_grad()
    def prepare(self) -> None:
        for weight in self.weights:
            weight.master.grad = None
        for same in self._classes:
            same.prepare()

    def raw(self) -> list[Tensor]:
        """Weights and gains that it gives gradients."""
        return [x for same in self._classes for m in same.members for x in (m.raw.weight, m.raw.gain) if x is not None]

    def targets(self) -> dict[Tensor, "Member"]:
        """What the optimizer can prepare, by raw weight."""
        return {m.raw.weight: m for same in self._classes for m in same.members if m.is_target}

    @torch.no_grad()
    def project(self) -> None:
        """A prepared weight that has had no gradient counts as one of zeros. RuntimeError if none has had any."""
        missing = [weight.master for weight in self.weights if weight.master.grad is None]
        if len(missing) == len(self.weights):
            raise RuntimeError("project() before backward(): no prepared weight has a gradient")
        for master in missing:
            master.grad = torch.zeros_like(master, memory_format=torch.contiguous_format)
        for same in self._classes:
            same.project()
            for member in same.members:
                member.raw.weight.grad = member.dw
                if member.dgain is not None:
                    member.raw.gain.grad = member.dgain


def _empty(group: Sequence[RawWeight]) -> PreparedWeight:
    first = group[0]
    rows = sum(len(raw.weight) for raw in group)
    rows = -(-rows // 8) * 8 if first.padded else rows
    shape = (16 if first.up else first.weight[0, 0].numel(), rows, first.weight.shape[1])
    value = first.weight.new_zeros(shape, dtype=first.dtype, requires_grad=False)
    master = first.weight.new_zeros([1], requires_grad=False).expand(shape)
    return PreparedWeight(value, master.detach().requires_grad_())


@dataclass(eq=False)
class Member:
    """A raw weight, the rows from `first` of the prepared one that it becomes, its gradients, ‖w‖ of its rows."""

    raw: RawWeight
    prepared: PreparedWeight
    first: int
    dw: Tensor
    dgain: Tensor | None
    lengths: Tensor | None = None
    _seen: tuple[int, int] | None = None

    @property
    def is_aligned(self) -> bool:
        return self.raw.weight.shape[1] % 8 == 0

    @property
    def is_target(self) -> bool:
        """Can the optimizer prepare it? A gain would change in the same launch; few are behind an up-sampling."""
        return self.raw.weight.ndim == 4 and self.is_aligned and self.raw.gain is None and not self.raw.up

    @property
    def place(self) -> list[int]:
        """For `place_of_row` and `factors_of_row`."""
        w, (split, *factors) = self.raw.weight, self.raw.factors
        bits = np.array(factors, np.float32).view(np.int32).tolist()
        return [w.shape[1], len(w), self.prepared.value.shape[1], self.first, self.raw.heads, split, *bits]

    def own_rows(self, x: Tensor) -> Tensor:
        """Of the prepared weight or its gradient `[taps, Cout, Cin]`."""
        return x[:, self.first : self.first + len(self.raw.weight)]

    def note(self) -> None:
        """It is prepared from what the raw weight now holds."""
        self._seen = self._state()

    def is_current(self) -> bool:
        """Does the raw weight hold what it was prepared from? As for autograd, a change through `.data` goes unseen."""
        return self._seen == self._state()

    def _state(self) -> tuple[int, int]:
        w = self.raw.weight
        return 0 if is_recording() else w.data_ptr(), w._version


class _Class:
    """Weights that one launch can serve: of one type, layout and alignment; targets of the optimizer apart."""

    def __init__(self, taps: int, up: bool, aligned: bool, members: list[Member]):
        self.members = members
        weights = [m.raw.weight for m in members]
        device, rows = weights[0].device, [len(w) for w in weights]
        self.constants = dict(TAPS=taps, ALIGNED=aligned, BLOCK=BLOCK, UP=up)
        self.programs = row_programs(rows, device)
        self.lengths = torch.zeros(sum(rows), device=device)
        for m, part in zip(members, self.lengths.split(rows)):
            m.lengths = part
        self.shapes = torch.tensor([m.place for m in members], dtype=torch.int32).to(device)
        starts = [sum(rows[:i]) for i, m in enumerate(members) if m.dgain is not None]
        gained = [n for n, m in zip(rows, members) if m.dgain is not None]
        self.gain_rows = torch.tensor([starts, gained], dtype=torch.int32).T.contiguous().to(device)
        self.to_prepare, self.to_project, self.to_gains = Addresses(), Addresses(), Addresses()

    def prepare(self) -> None:
        """With the tile and the warps of the optimizer's pass: the same order of sums, hence the same bits."""
        if not serves(self.lengths):
            return self._prepare_eager()
        if all(m.is_target and m.is_current() for m in self.members):
            return
        weights, values, gains = zip(*[(m.raw.weight, m.prepared.value, m.raw.gain) for m in self.members])
        launch(
            prepare_kernel, (len(self.programs),),
            self.programs, self.shapes, self.to_prepare.table(weights, values, gains), self.lengths,
            TYPE=TYPES[values[0].dtype], **self.constants, num_warps=8, reached=(*weights, *self._own_rows(values)),
        )  # fmt: skip
        for m in self.members:
            m.note()

    def _prepare_eager(self) -> None:
        for m in self.members:
            value, m.lengths[:] = eager.mp_weight(m.raw.weight, m.raw.gain, m.raw.dtype, m.raw.heads, m.raw.up, *m.raw.factors)
            m.own_rows(m.prepared.value)[:] = value

    def project(self) -> None:
        if not serves(self.lengths):
            return self._project_eager()
        masters = [m.prepared.master.grad.contiguous() for m in self.members]
        weights, dws, gains = zip(*[(m.raw.weight, m.dw, m.raw.gain) for m in self.members])
        shares = torch.empty_like(self.lengths)
        launch(
            project_kernel, (len(self.programs),),
            self.programs, self.shapes, self.to_project.table(masters, weights, dws, gains), self.lengths, shares,
            **self.constants, num_warps=4, reached=(*self._own_rows(masters), *weights, *dws),
        )  # fmt: skip
        dgains = [m.dgain for m in self.members if m.dgain is not None]
        if dgains:
            table = self.to_gains.table(dgains)
            launch(sum_rows_kernel, (len(dgains),), self.gain_rows, table, shares, BLOCK=BLOCK, num_warps=4, reached=dgains)

    def _project_eager(self) -> None:
        for m in self.members:
            g = m.own_rows(m.prepared.master.grad)
            dw, dgain = eager.mp_weight_backward(g, m.raw.weight, m.lengths, m.raw.gain, m.raw.heads, *m.raw.factors)
            m.dw.copy_(dw)
            if m.dgain is not None:
                m.dgain.copy_(dgain)

    def _own_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [m.own_rows(x) for x, m in zip(tensors, self.members)]


TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
PLACE = tl.constexpr(8)  # numbers in `Member.place`


@triton.jit
def prepare_kernel(
    programs, shapes, addresses, length_ptr,
    TYPE: tl.constexpr, TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    tensor, row, row_out, Cin, Cout = row_of_program(programs, shapes, ALIGNED)
    w_ptr, y_ptr = pointer(addresses, tensor * 3, tl.float32), pointer(addresses, tensor * 3 + 1, TYPE)
    gain, factors = gain_of(addresses, tensor * 3 + 2), factors_of_row(shapes + PLACE * tensor)
    length = prepare_row(w_ptr, y_ptr, gain, factors, row, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK, UP)
    tl.store(length_ptr + tl.program_id(0), length)


@triton.jit
def project_kernel(
    programs, shapes, addresses, length_ptr, share_ptr,
    TAPS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    tensor, row, row_out, Cin, Cout = row_of_program(programs, shapes, ALIGNED)
    g_ptr, w_ptr = pointer(addresses, tensor * 4, tl.float32), pointer(addresses, tensor * 4 + 1, tl.float32)
    dw_ptr, gain = pointer(addresses, tensor * 4 + 2, tl.float32), gain_of(addresses, tensor * 4 + 3)
    length, factors = tl.load(length_ptr + tl.program_id(0)), factors_of_row(shapes + PLACE * tensor)
    share = project_row(g_ptr, w_ptr, dw_ptr, length, gain, factors, row, row_out, Cin, Cout, TAPS, ALIGNED, BLOCK, UP)
    tl.store(share_ptr + tl.program_id(0), share)


@triton.jit
def row_of_program(programs, shapes, ALIGNED: tl.constexpr):
    """Tensor and raw row of this program, the row of the prepared weight that it becomes, and that one's Cin and Cout."""
    tensor, row = tl.load(programs + 2 * tl.program_id(0)), tl.load(programs + 2 * tl.program_id(0) + 1)
    row_out, Cin, Cout = place_of_row(shapes + PLACE * tensor, row, ALIGNED)
    return tensor, row, row_out, Cin, Cout


@triton.jit
def place_of_row(place, row, ALIGNED: tl.constexpr):
    """The row of the prepared weight that a raw row becomes, and that weight's Cin and Cout; `place` is `Member.place`."""
    Cin, rows, Cout, first, heads = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3), tl.load(place + 4)
    if ALIGNED:
        Cin = Cin // 8 * 8  # the compiler sees a multiple of 8, without which it masks element by element
    return first + tl.where(heads > 0, qkv_row(row, rows, tl.maximum(heads, 1)), row), Cin, Cout


@triton.jit
def factors_of_row(place):
    """`reference.Factors`, of which the place holds the bits."""
    left, right = tl.load(place + 6).to(tl.float32, bitcast=True), tl.load(place + 7).to(tl.float32, bitcast=True)
    return tl.load(place + 5), left, right


@triton.jit
def gain_of(addresses, index):
    """The gain at an address, 1 where there is none."""
    return tl.load(pointer(addresses, index, tl.float32), tl.load(addresses + index) != 0, other=1.0)


@triton.jit
def sum_rows_kernel(ranges, addresses, share_ptr, BLOCK: tl.constexpr):
    """The sum of one range of rows' shares: the gradient of a gain."""
    start, rows = tl.load(ranges + 2 * tl.program_id(0)), tl.load(ranges + 2 * tl.program_id(0) + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        total += tl.load(share_ptr + start + offs, offs < rows, other=0.0)
    tl.store(pointer(addresses, tl.program_id(0), tl.float32), tl.sum(total, axis=0))
