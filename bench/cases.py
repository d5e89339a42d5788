"""The registry of what is measured, under both `python -m bench` and `pytest bench`.

A case is named `group/…`. `build(device)` makes its inputs and returns its candidates, functions without arguments.
Their outputs are compared with the first candidate's, the reference; sizes come from `edm2.PRESETS`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.case import Case
from bench.library import attention_case, conv_cases, copy_case, gemm_case, library_cases
from bench.models import block_case, compiled_case, optimizer_case, train_case
from bench.ops import Call, op_case, op_cases
from bench.sampling import sample_case
from bench.weights import weights_case

STEPS = 32  # as published: 63 evaluations
SMALL = (2, 4, 4, 24)
SMALL_CALLS = [
    Call("pixel_norm_silu", (SMALL,)),
    Call("down_pixel_norm_silu", (SMALL,)),
    Call("cat_silu", (SMALL, (2, 4, 4, 16)), (0.5,)),
    Call("mp_sum", (SMALL, SMALL), (0.3, 256.0)),
    Call("mp_silu", (SMALL,)),
    Call("cosine_attention", (SMALL,), (1,)),
    Call("linear", ((2, 24), (1, 16, 24)), dtype=torch.float32),
]
PRESETS = [f"edm2-img512-{size}" for size in ("s", "xs", "m", "l", "xl", "xxl", "xxs")]
PRESETS += [f"edm2-img64-{size}" for size in ("s", "xs", "m", "l", "xl")]  # the same networks with three channels


def group_cases(group: str) -> Iterator[Case]:
    """The cases of one sub-command, for EDM2-S first; the digits where a CPU can do them."""
    if group == "kernels":
        own, others = kernel_cases()
        yield from (*own, *library_cases(), *others)
    elif group == "block":
        yield from (block_case("edm2-img512-s", 256, level) for level in range(4))
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
    elif group == "optimizer":
        yield optimizer_case("digits", needs_gpu=False)
        yield from map(optimizer_case, PRESETS)


def kernel_cases(preset: str = "edm2-img512-s") -> tuple[list[Case], list[Case]]:
    """This project's kernels: weights, attention and each other op at its largest shape; then the other shapes."""
    leading, others, known = [weights_case(preset, backward) for backward in (False, True)], [], set()
    for case in op_cases(preset, 256):
        kind = case.name.rpartition("/")[0]
        (leading if case.facts["op"] == "cosine_attention" or kind not in known else others).append(case)
        known.add(kind)
    return leading, [*others, *op_cases(preset, 8)]


def rehearsal_cases() -> Iterator[Case]:
    """A small case of every kind that runs anywhere: to try the harness, not to learn a speed."""
    yield copy_case(2**16, needs_gpu=False)
    yield gemm_case(64, 64, 64, "square", needs_gpu=False)
    for case in conv_cases(2, 8, 16, 8, 3, 1):
        yield replace(case, needs_gpu=False)
    yield replace(attention_case(2, 16, 2), needs_gpu=False)
    for call in SMALL_CALLS:
        yield from (op_case(call, backward, needs_gpu=False) for backward in (False, True))
    yield from (weights_case("digits", backward, needs_gpu=False) for backward in (False, True))
    yield block_case("digits", 2, needs_gpu=False)
    yield train_case("digits", 8, needs_gpu=False)
    yield sample_case("digits", 8, needs_gpu=False)
    yield sample_case("digits", 8, guided=True, needs_gpu=False)
    yield sample_case("digits", 1, mode="reduce-overhead", needs_gpu=False)
    yield sample_case("digits", 8, steps=2, guided=True, needs_gpu=False)
    yield sample_case("digits", 8, steps=2, decoded=True, needs_gpu=False)
    yield optimizer_case("digits", needs_gpu=False)


def gpu_cases() -> Iterator[Case]:
    """What a GPU that is there for minutes should measure, the most important first."""
    yield copy_case()
    yield gemm_case(8192, 8192, 8192, "square")
    yield train_case("edm2-img512-s", 256)
    for batch in (1, 8, 64):
        yield sample_case("edm2-img512-s", batch)
    yield sample_case("edm2-img512-s", 8, steps=STEPS)
    yield block_case("edm2-img512-s", 256)
    yield optimizer_case("edm2-img512-s")
    leading, others = kernel_cases()
    yield from leading
    yield sample_case("edm2-img512-s", 1, mode="reduce-overhead")
    yield sample_case("edm2-img512-s", 8, guided=True)
    yield sample_case("edm2-img512-s", 8, steps=STEPS, guided=True)
    yield sample_case("edm2-img512-s", 8, steps=STEPS, decoded=True)
    yield compiled_case("edm2-img512-s", 256, "reduce-overhead")
    yield from (case for case in library_cases() if case.name not in ("kernels/copy", "kernels/gemm/square"))
    yield from others
    for preset in ("edm2-img512-xs", "edm2-img512-m", "edm2-img512-l", "edm2-img512-xl", "edm2-img512-xxl"):
        for batch in (64, 32, 16):
            yield train_case(preset, batch)
    yield compiled_case("edm2-img512-s", 256, "max-autotune")  # minutes of compilation, for one figure
