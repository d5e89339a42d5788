"""Tile choices, as data with the reasons beside them: no timings yet, but what compiles without spills.

Registers per thread and shared memory are those of Triton 3.9 in fp16, at the widest head of the row.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys per step, warps, stages of the loop's loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# Kernel, kind of matrix product, width of a head up to → tile for tokens up to. Without one another form serves.
ATTENTION: dict[tuple[str, str, int], dict[float, AttentionTile | None]] = {
    # sm_80: 80 registers, 24 KB; 140, 48 KB
    ("forward", "mma", 64): {64: AttentionTile(64, 64, 4, 2), inf: AttentionTile(128, 64, 8, 2)},
    # sm_90: 74, 24 KB; 94, 48 KB. sm_100: 54; 74
    ("forward", "wgmma", 64): {64: AttentionTile(64, 64, 4, 2), inf: AttentionTile(128, 64, 8, 2)},
    # sm_80: 191, 96 KB; with 4 warps of the same rows 255
    ("forward", "mma", 128): {inf: AttentionTile(128, 64, 8, 2)},
    # sm_90: 130, 96 KB. sm_100: 116
    ("forward", "wgmma", 128): {inf: AttentionTile(128, 64, 8, 2)},
    # One program per head: five products where the two kernels below need seven. sm_80: 190, 48 KB; with 256 tokens 255
    # registers and 120 KB, more than consumer cards have
    ("backward", "mma", 64): {64: AttentionTile(64, 64, 4, 1)},
    # sm_90: 168, 40 KB; 250, 76 KB; with 32 keys a step 16 bytes spilled, 128 in Triton 3.6. sm_100: 167; 200. Fewer
    # tokens would leave rows empty, and spill (Triton 3.6)
    ("backward", "wgmma", 64): {64: AttentionTile(64, 64, 4, 1), 255: None, 256: AttentionTile(256, 16, 8, 1)},
    # sm_80: 128, 32 KB; with 64 keys 178
    ("dq", "mma", 64): {inf: AttentionTile(64, 32, 4, 2)},
    # sm_90: 137, 48 KB. sm_100: 93
    ("dq", "wgmma", 64): {inf: AttentionTile(64, 64, 4, 2)},
    # sm_80: 254, 96 KB; with 4 warps 48 bytes spilled
    ("dq", "mma", 128): {inf: AttentionTile(64, 64, 8, 2)},
    # sm_90: 158, 96 KB; with 4 warps 254. sm_100: 95
    ("dq", "wgmma", 128): {inf: AttentionTile(64, 64, 8, 2)},
    # sm_80: 154, 37 KB; with 64 keys 252 to spilled
    ("dkv", "mma", 64): {inf: AttentionTile(64, 32, 4, 2)},
    # sm_90: 215, 49 KB, two programs on a multiprocessor; 32 keys would leave wgmma for mma. sm_100: 146
    ("dkv", "wgmma", 64): {inf: AttentionTile(64, 64, 4, 2)},
    # sm_80: 242, 69 KB; with 64 keys 255 to spilled
    ("dkv", "mma", 128): {inf: AttentionTile(64, 32, 4, 2)},
    # sm_90: 184, 64 KB; with 64 queries 242. sm_100: 128
    ("dkv", "wgmma", 128): {inf: AttentionTile(32, 64, 8, 2)},
    # fp32 computes on the ordinary units, with operands in registers: the smaller tile that does not spill
    ("forward", "fp32", 64): {inf: AttentionTile(32, 32, 8, 1)},  # 170, 24 KB
    ("forward", "fp32", 128): {inf: AttentionTile(16, 32, 8, 1)},  # 56, 40 KB
    ("dq", "fp32", 64): {inf: AttentionTile(32, 32, 8, 1)},  # 172, 32 KB
    ("dq", "fp32", 128): {inf: AttentionTile(16, 16, 8, 1)},  # 174, 32 KB
    ("dkv", "fp32", 64): {inf: AttentionTile(32, 32, 8, 1)},  # 88, 36 KB
    ("dkv", "fp32", 128): {inf: AttentionTile(16, 32, 8, 1)},  # 112, 50 KB
}


def attention(kernel: str, capability: int, tokens: int, width: int, itemsize: int) -> AttentionTile | None:
    """`kernel` forward, backward, dq or dkv. sm_90 to sm_110 have wgmma or tcgen05 and 227 KB; others mma, down to 99 KB."""
    kind = "fp32" if itemsize == 4 else "wgmma" if 90 <= capability < 120 else "mma"
    rows = ATTENTION.get((kernel, kind, 64 if width <= 64 else 128), {})
    return next((tile for most, tile in rows.items() if tokens <= most), None)
