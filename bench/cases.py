"""The registry of what is measured, under both `python -m bench` and `pytest bench`.

A case is named `group/…`. `build(device)` makes its inputs and returns its candidates, functions without arguments.
Their outputs are compared with the first candidate's, the reference; sizes come from `edm2.PRESETS`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from bench.case import Case
from bench.convs import WAYS, conv_case, conv_cases
from bench.equivalence import equivalence_case
from bench.fused import FUSIONS, Site, fused_case, fused_cases
from bench.library import attention_case, ceiling_cases, copy_case, gemm_case, sdpa_cases
from bench.models import block_case, compiled_case, optimizer_case, train_case
from bench.ops import Call, op_case, op_cases
from bench.reading import reading_case, waiting_case
from bench.sampling import difference_case, sample_case
from bench.weights import weights_case

STEPS = 32  # as published: 63 evaluations
SMALL = (2, 4, 4, 24)
SMALL_CALLS = [
    Call("pixel_norm_silu", (SMALL,)),
    Call("down_pixel_norm_silu", (SMALL,)),
    Call("cat_silu", (SMALL, (2, 4, 4, 16)), (0.5,)),
    Call("mp_silu", (SMALL,)),
    Call("cosine_attention", (SMALL,), (1,)),
    Call("linear", ((2, 24), (1, 16, 24)), dtype=torch.float32),
]
SMALL_SITE = Site(2, 4, 24, 24, (8, 16))
PRESETS = [f"edm2-img512-{size}" for size in ("s", "xs", "m", "l", "xl", "xxl", "xxs")]
PRESETS += [f"edm2-img64-{size}" for size in ("s", "xs", "m", "l", "xl")]  # the same networks with three channels


def group_cases(group: str) -> Iterator[Case]:
    """The cases of one sub-command, for EDM2-S first; the digits where a CPU can do them."""
    if group == "kernels":
        (own, others), (leading, rest) = kernel_cases(), fusions()
        yield from (*ceiling_cases(), *conv_cases("edm2-img512-s", 256, 3), *leading, *rest, *own)
        yield from (*conv_cases("edm2-img512-s", 256, 1), *others, *sdpa_cases(), *evaluated_convolutions())
    elif group == "block":
        yield from (block_case("edm2-img512-s", 256, level, flavor) for flavor in ("enc", "dec") for level in range(4))
    elif group == "train":
        yield train_case("digits", 128, needs_gpu=False)
        yield from (train_case(preset, batch) for preset in PRESETS for batch in (256, 64, 32))
    elif group == "sample":
        yield sample_case("digits", 100, needs_gpu=False)
        yield sample_case("digits", 100, steps=18, decoded=True, needs_gpu=False)
        for preset in PRESETS:
            yield from (sample_case(preset, batch) for batch in (1, 8, 64))
            yield from (sample_case(preset, batch, guided=True) for batch in (1, 8, 64))
            yield from (sample_case(preset, batch, mode="reduce-overhead") for batch in (1, 8))
            for batch in (8, 1, 64):
                yield sample_case(preset, batch, steps=STEPS)
                yield sample_case(preset, batch, steps=STEPS, guided=True)
                yield sample_case(preset, batch, steps=STEPS, decoded=True)
                yield sample_case(preset, batch, steps=STEPS, guided=True, decoded=True)
    elif group == "data":
        yield reading_case(256)
        yield waiting_case("digits", 128, needs_gpu=False)
        yield waiting_case("edm2-img512-s", 256)
    elif group == "difference":
        yield difference_case("digits", 64, STEPS, needs_gpu=False)
        yield from (difference_case(preset, 64, STEPS) for preset in PRESETS)
    elif group == "equivalence":
        yield equivalence_case("digits", 32, needs_gpu=False)
        yield trained_alike()
    elif group == "optimizer":
        yield optimizer_case("digits", needs_gpu=False)
        yield from map(optimizer_case, PRESETS)


def trained_alike() -> Case:
    """The smallest published network, which is minutes in fp32."""
    return equivalence_case("edm2-img512-xxs", 32, limit=240)


def kernel_cases(preset: str = "edm2-img512-s") -> tuple[list[Case], list[Case]]:
    """This project's kernels but the convolutions: weights, attention and each other op at its largest shape; the rest."""
    leading, others = _leading(op_cases(preset, 256))
    attention = [case for case in others if case.facts["op"] == "cosine_attention"]
    weights = [weights_case(preset, backward) for backward in (False, True)]
    return [*weights, *leading, *attention], [*(case for case in others if case not in attention), *op_cases(preset, 8)]


def fusions(preset: str = "edm2-img512-s") -> tuple[list[Case], list[Case]]:
    """What is fused with a convolution, in training: each where it computes most; the other shapes, single convolutions first."""
    leading, others = _leading(fused_cases(preset, 256, saves=True))
    return leading, sorted(others, key=lambda case: "branch" in case.name)


def evaluated_convolutions(preset: str = "edm2-img512-s") -> Iterator[Case]:
    """At batch 8."""
    for k in (3, 1):
        yield from conv_cases(preset, 8, k)
    yield from fused_cases(preset, 8, saves=False)


def _leading(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """The first case of each kind, and the others."""
    first, others = {}, []
    for case in cases:
        if first.setdefault(case.name.rpartition("/")[0], case) is not case:
            others.append(case)
    return list(first.values()), others


def rehearsal_cases() -> Iterator[Case]:
    """A small case of every kind that runs anywhere: to try the harness, not to learn a speed."""
    yield copy_case(2**16, needs_gpu=False)
    yield gemm_case(64, 64, 64, "square", needs_gpu=False)
    yield from (conv_case(way, 2, 8, 16, 8, k, 1, needs_gpu=False) for way in WAYS for k in (3, 1))
    for op, fusion in FUSIONS.items():
        site = SMALL_SITE._replace(k=1 if "1x1" in op else 3, up=op.endswith("_up"))
        yield from (fused_case(op, way, site, needs_gpu=False) for way in fusion.ways)
        if "forward" in fusion.ways:
            yield fused_case(op, "forward", site._replace(n=3, saves=False), needs_gpu=False)
    yield replace(attention_case(2, 16, 2), needs_gpu=False)
    for call in SMALL_CALLS:
        yield from (op_case(call, backward, needs_gpu=False) for backward in (False, True))
    yield from (weights_case("digits", backward, needs_gpu=False) for backward in (False, True))
    yield from (block_case("digits", 2, flavor=flavor, needs_gpu=False) for flavor in ("enc", "dec"))
    yield train_case("digits", 8, needs_gpu=False)
    yield sample_case("digits", 8, needs_gpu=False)
    yield sample_case("digits", 8, guided=True, needs_gpu=False)
    yield sample_case("digits", 1, mode="reduce-overhead", needs_gpu=False)
    yield sample_case("digits", 8, steps=2, guided=True, needs_gpu=False)
    yield sample_case("digits", 8, steps=2, decoded=True, needs_gpu=False)
    yield difference_case("digits", 8, 2, needs_gpu=False)
    yield equivalence_case("digits", 4, steps=3, compiled=False, needs_gpu=False)
    yield reading_case(8, files=32)
    yield waiting_case("digits", 8, files=32, needs_gpu=False)
    yield optimizer_case("digits", needs_gpu=False)


def gpu_cases() -> Iterator[Case]:
    """What a GPU that is there for minutes should measure, the most important first."""
    preset = "edm2-img512-s"
    yield from ceiling_cases()
    yield train_case(preset, 256)
    yield from (sample_case(preset, batch) for batch in (1, 8, 64))
    yield block_case(preset, 256)
    yield from conv_cases(preset, 256, 3)
    leading, rest = fusions(preset)
    yield from leading
    yield sample_case(preset, 8, steps=STEPS)
    yield optimizer_case(preset)
    own, others = kernel_cases(preset)
    yield from own
    yield block_case(preset, 256, flavor="dec")
    yield from rest
    yield sample_case(preset, 1, mode="reduce-overhead")
    yield sample_case(preset, 8, guided=True)
    yield sample_case(preset, 8, steps=STEPS, guided=True)
    yield sample_case(preset, 8, steps=STEPS, decoded=True)
    yield difference_case(preset, 64, STEPS)
    yield waiting_case(preset, 256)
    yield compiled_case(preset, 256, "reduce-overhead")
    yield from conv_cases(preset, 256, 1)
    yield from (*sdpa_cases(), *others, *evaluated_convolutions(preset))
    yield trained_alike()
    for preset in ("edm2-img512-xs", "edm2-img512-m", "edm2-img512-l", "edm2-img512-xl", "edm2-img512-xxl"):
        for batch in (64, 32, 16):
            yield train_case(preset, batch)
    yield compiled_case("edm2-img512-s", 256, "max-autotune")  # minutes of compilation, for one figure
