"""The optimizer pass: one launch updates every parameter, its averages, its normalisation and what the ops take for it.

One program per row of a parameter, L elements long: w, g, m, v and each average are read once and all but g written, 44
bytes per parameter with two averages; the second pass, which needs the norm of the new row, finds it in cache, and so
does a third, which lays the row out for the tensor cores, 2 bytes per parameter in half precision. (Rows in registers
would save these up to 8,192 elements, but most weights of the larger networks are longer.)
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from kernels.jit import EPS, launch
from kernels.prepared import PLACE, TYPES, Member, factors_of_row, place_of_row
from kernels.rows import Addresses, pointer, row_programs
from kernels.weight import lay_out_row

# Elements per iteration: with 8 warps, two 16-byte loads per thread and tensor, 49 kB in flight with two averages. About
# 120 registers leave two programs per multiprocessor: the longest rows then take 34 MB of the L2 cache's 50 on an H100.
BLOCK = 2048


@triton.jit
def adam_kernel(
    programs, shapes, addresses, scalars, bad_ptr,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, AVERAGES: tl.constexpr, TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of 4·n elements are accessed 16 bytes at a time; of others, all short, one launch has some too."""
    tensor, row = tl.load(programs + 2 * tl.program_id(0)), tl.load(programs + 2 * tl.program_id(0) + 1)
    shape, roles, rates = shapes + (2 + PLACE) * tensor, addresses + tensor * (6 + AVERAGES), scalars + AVERAGES + 2 * tensor
    L, normalized = tl.load(shape), tl.load(shape + 1)
    if L % 4 == 0:  # the compiler sees a multiple of 4
        bad, length = update_row(roles, rates, scalars, row, L // 4 * 4, normalized, BETA1, BETA2, EPSILON, AVERAGES, BLOCK)
    else:
        bad, length = update_row(roles, rates, scalars, row, L, normalized, BETA1, BETA2, EPSILON, AVERAGES, BLOCK // 8)
    tl.store(bad_ptr + tl.program_id(0), bad)
    if tl.load(roles + 4 + AVERAGES) != 0:
        prepare_normalized(roles, roles + 4 + AVERAGES, shape + 2, row, L, length, TYPE, BLOCK)


@triton.jit
def prepare_normalized(roles, prepared, place, row, L, length, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """What `prepare_kernel` makes of the row just stored, bit for bit."""
    tl.debug_barrier()  # what one thread has written another may read
    (row_out, Cin, Cout), factors = place_of_row(place, row, True), factors_of_row(place)
    w_ptr, y_ptr = pointer(roles, 0, tl.float32), pointer(prepared, 0, TYPE)
    if Cin == L:
        lay_out_row(w_ptr, y_ptr, length, 1.0, factors, row, row_out, Cin, Cout, 1, True, BLOCK)
    else:
        lay_out_row(w_ptr, y_ptr, length, 1.0, factors, row, row_out, Cin, Cout, 9, True, BLOCK)
    tl.store(tl.load(prepared + 1).to(tl.pointer_type(tl.float32)) + row, length)


@triton.jit
def update_row(
    roles, rates, weights, row, L, normalized,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, AVERAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adam (Kingma and Ba 2015), averages, then w / (ε + rms), Eq. 66.

    Returns the number of non-finite gradients, and ‖w‖ of a normalised row.
    A parameter without a gradient, its address 0, only enters its averages and is normalised.
    """
    start, trained = row.to(tl.int64) * L, tl.where(tl.load(roles + 1) == 0, 0, L)
    w_ptr, g_ptr = pointer(roles, 0, tl.float32) + start, pointer(roles, 1, tl.float32) + start
    m_ptr, v_ptr = pointer(roles, 2, tl.float32) + start, pointer(roles, 3, tl.float32) + start
    average_ptrs = ()
    for i in tl.static_range(AVERAGES):
        average_ptrs += (pointer(roles, 4 + i, tl.float32) + start,)
    rate, root = tl.load(rates), tl.load(rates + 1)  # lr / (1 − β₁ˢ) and 1 / √(1 − β₂ˢ) after s steps

    square, bad = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, L, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + offs, offs < L, other=0.0)
        g = tl.load(g_ptr + offs, offs < trained, other=0.0, eviction_policy="evict_first")
        m = tl.load(m_ptr + offs, offs < trained, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_ptr + offs, offs < trained, other=0.0, eviction_policy="evict_first")
        averages = ()
        for i in tl.static_range(AVERAGES):
            averages += (tl.load(average_ptrs[i] + offs, offs < L, other=0.0, eviction_policy="evict_first"),)

        finite = tl.abs(g) < float("inf")
        bad += tl.where(finite, 0, 1)
        g = tl.where(finite, g, 0.0)
        m = m * BETA1 + g * (1 - BETA1)
        v = v * BETA2 + g * g * (1 - BETA2)
        w = tl.where(offs < trained, w - rate * m / (tl.sqrt(v) * root + EPSILON), w)
        square += w * w
        tl.store(m_ptr + offs, m, offs < trained, eviction_policy="evict_first")
        tl.store(v_ptr + offs, v, offs < trained, eviction_policy="evict_first")
        tl.store(w_ptr + offs, w, offs < L)
        for i in tl.static_range(AVERAGES):
            y = lerp(averages[i], w, tl.load(weights + i))
            tl.store(average_ptrs[i] + offs, y, offs < L, eviction_policy="evict_first")

    length = 0.0
    if normalized != 0:
        scale = 1 / (tl.sqrt(tl.sum(square, axis=0) / L) + EPS)
        square = tl.zeros([BLOCK], tl.float32)
        tl.debug_barrier()  # what one thread has written another may read
        for first in range(0, L, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            w = tl.load(w_ptr + offs, offs < L, other=0.0) * scale
            square += w * w
            tl.store(w_ptr + offs, w, offs < L)
        length = tl.sqrt(tl.sum(square, axis=0))
    return tl.sum(bad, axis=0), length


@triton.jit
def lerp(a, b, weight):
    """a + weight·(b − a), exactly b where weight = 1. fp32 holds a small weight exactly enough, but not 1 − weight."""
    return tl.where(weight < 0.5, a + (b - a) * weight, b - (b - a) * (1 - weight))


def refuses(weights: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot take these parameters, or None."""
    for w in weights:
        if w.dtype != torch.float32:
            return f"a parameter of {w.dtype}, the kernel takes fp32"
        if not _fits(w):
            return f"a parameter of strides {list(w.stride())} for {list(w.shape)} at {w.storage_offset()}, not contiguous and aligned"
    return None


def _fits(x: Tensor) -> bool:
    """Contiguous, on a 16-byte boundary (which a view of a flat gradient may miss)?"""
    return x.is_contiguous() and x.storage_offset() * x.element_size() % 16 == 0


def _type_of(targets: Sequence[Member | None]) -> tl.dtype:
    types = {m.raw.dtype for m in targets if m} or {torch.float16}
    if len(types) > 1:
        raise ValueError(f"targets: expected one type, got {types}")
    return TYPES[types.pop()]


class AdamPass:
    """One optimizer step over fp32 `weights` in one launch, in place.

    `normalized` tells which weights `[rows, …]` have their rows normalised after the step; `averages` are lists of
    tensors like `weights`, one list for each profile. All are contiguous. Normalised weights that are among the
    `targets`, convolutions of one type, are prepared as well: see `kernels.prepared`.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        normalized: Sequence[bool],
        averages: Sequence[Sequence[Tensor]],
        betas: tuple[float, float],
        eps: float,
        targets: Mapping[Tensor, Member] = MappingProxyType({}),
    ):
        self.weights, self.averages, self.betas = list(weights), averages, betas
        device, rows = weights[0].device, [len(w) if w.ndim else 1 for w in weights]
        self.targets = [targets.get(w) if flag else None for w, flag in zip(weights, normalized)]
        self.values, self.lengths = zip(*[(m.prepared.value, m.lengths) if m else (None, None) for m in self.targets])
        self.prepared = [x for m in self.targets if m for x in (m.own_rows(m.prepared.value), m.lengths)]
        sizes = dict(AVERAGES=len(averages), TYPE=_type_of(self.targets), BLOCK=BLOCK)
        self.constants = dict(BETA1=betas[0], BETA2=betas[1], EPSILON=eps, **sizes)
        self.programs = row_programs(rows, device)
        shapes = [[w.numel() // max(n, 1), int(flag)] for w, n, flag in zip(weights, rows, normalized)]
        places = [m.place if m else [0] * PLACE.value for m in self.targets]
        self.shapes = torch.tensor([a + b for a, b in zip(shapes, places)], dtype=torch.int32).to(device)
        self.scalars = torch.zeros(len(averages) + 2 * len(rows), device=device)
        self.addresses = Addresses()

    def set_rates(self, steps: Sequence[int], lr: float, weights: Sequence[float]) -> None:
        """For the next step: `steps` are the number of each parameter's, the next one included, `weights` the shares of the new
        weights in the averages, 1 − β."""
        beta1, beta2 = self.betas
        rates = {s: (lr / (1 - beta1**s), (1 - beta2**s) ** -0.5) if s else (0.0, 0.0) for s in set(steps)}
        values = [*weights, *(x for s in steps for x in rates[s])]
        self.scalars.copy_(torch.tensor(values, pin_memory=self.scalars.is_cuda), non_blocking=True)

    def step(
        self,
        grads: Sequence[Tensor | None],
        exp_avgs: Sequence[Tensor | None],
        exp_avg_sqs: Sequence[Tensor | None],
    ) -> Tensor:
        """With the rates set before. Returns the number of non-finite gradients, which count as 0: int64, 0-d.

        `exp_avgs` and `exp_avg_sqs` are Adam's moments, which a parameter whose gradient is None keeps. The launch can be part
        of a CUDA graph: what changes from step to step lies in memory.
        """
        grads = [None if g is None else g if _fits(g) else g.clone(memory_format=torch.contiguous_format) for g in grads]
        bad = torch.empty(len(self.programs), dtype=torch.int32, device=self.scalars.device)
        given = [x for xs in (grads, exp_avgs, exp_avg_sqs) for x, g in zip(xs, grads) if g is not None]
        changed = [*self.weights, *given[len(given) // 3 :], *(x for xs in self.averages for x in xs)]
        roles = (self.weights, grads, exp_avgs, exp_avg_sqs, *self.averages, self.values, self.lengths)
        launch(
            adam_kernel, (len(self.programs),),
            self.programs, self.shapes, self.addresses.table(*roles), self.scalars, bad,
            **self.constants, num_warps=8, reached=[*changed, *given[: len(given) // 3], *self.prepared], updated=changed,
        )  # fmt: skip
        increment_version([*changed, *self.prepared])
        for m in self.targets:
            if m:
                m.note()
        return bad.sum()
