"""Convolutions against their goals: averages over shapes, what is added to a plain one, where the library would win."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import mean
from typing import Any

from bench.convs import LIBRARY, conv_shapes, row
from bench.fused import FUSIONS, fused_name, sites
from kernels import conv_tiles

Result = dict[str, Any]
PRESET, BATCH = "edm2-img512-s", 256
TFLOPS = {"forward": 650, "dgrad": 620, "wgrad": 580}  # of 3×3 convolutions, on average over the shapes of EDM2-S, on an H200
FUSED, BLOCK = 1.25, 1.5  # times as fast as cuDNN in channels-last with its pointwise work under torch.compile
BLOCK_CASE, BLOCK_NAME = f"block/{PRESET}/64x64/n{BATCH}", "encoder block 64×64×192, forward and backward"
WAYS = {"forward": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}


@lru_cache
def shapes_of(kind: str) -> int:
    """How many shapes of EDM2-S there are of a kind of case: `conv3x3`, `conv_silu`."""
    if kind.startswith("conv") and kind[4:] in ("3x3", "1x1"):
        return sum(f"{k}x{k}" == kind[4:] and min(cin, cout) >= 8 for _, cin, cout, k in conv_shapes(PRESET))
    return sum(op == kind for op, _ in sites(PRESET))


def averages(cases: Sequence[Result]) -> list[tuple[list[str], list[list[str]]]]:
    """Tables, header and rows: plain convolutions; what is fused with them, and a block. Only those with rows."""
    plain = [cells for k in (3, 1) for way in WAYS if (cells := _plain(cases, k, way))]
    fused = [_fused(cases, kind, own) for kind, own in _fused_by_kind(cases).items()]
    block = [_against_goal(BLOCK_NAME, [case], BLOCK, 1) for case in cases if case["case"] == BLOCK_CASE]
    tables = [
        (["TFLOP/s, average over shapes", "shapes", "edm2", "cuDNN", "cuBLAS, same size", "× cuDNN", "× cuBLAS", "goal"], plain),
        (["average (least–most)", "shapes", "× cuDNN with torch.compile", "goal", "adds to plain convolutions"], fused + block),
    ]
    return [(header, rows) for header, rows in tables if rows]


def additions(cases: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """A table of every fused case: its time, what it adds to the plain convolutions in it, its speed."""
    rows = []
    for case in cases:
        if "parts" in case:
            added, times, seconds = _added(cases, case), _times(case, "compile"), _seconds(case, "edm2")
            cells = [f"{seconds * 1e3:.3g}" if seconds else "failed", *_added_cells(added), f"{times:.2f}" if times else ""]
            rows.append([case["case"].removeprefix("kernels/"), *cells])
    return ["case", "ms", "adds, ms", "adds", "× compile"], rows


def library_rows(cases: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """A table of those rows of the table of tiles that were measured: milliseconds of all that a step has of each, by
    this project's kernels and by the library; ready for `kernels.conv_tiles.LIBRARY`."""
    rows = []
    for key, own in _by_row(cases).items():
        kernels, library = (sum(weight * _seconds(case, name) for case, weight in own) * 1e3 for name in ("edm2", LIBRARY))
        rows.append([f"`{key}`", f"{kernels:.3g}", f"{library:.3g}", "library" if library < kernels else "kernels"])
    return ["row", "kernels, ms", "library, ms", "quicker"], sorted(rows, key=lambda cells: cells[3] != "library")


def _plain(cases: Sequence[Result], k: int, way: str) -> list[str]:
    prefix = f"kernels/conv{k}x{k}/{way}/n{BATCH}-"
    own = [case for case in cases if case["case"].startswith(prefix)]
    if not own:
        return []
    gemms = {case["case"].removeprefix(f"kernels/gemm/as-conv{k}x{k}/n{BATCH}-"): case for case in cases}
    shapes = [(case, gemms.get(case["case"].removeprefix(prefix), {"candidates": {}})) for case in own]
    rates = {name: [_rate(case, name) for case in own] for name in ("edm2", "cuDNN")}
    rates["cuBLAS"] = [_rate(gemm, "cuBLAS") for _, gemm in shapes]
    averages = [_mean(values) for values in rates.values()]
    ratios = [_mean([a / b if a and b else None for a, b in zip(rates["edm2"], rates[name])]) for name in ("cuDNN", "cuBLAS")]
    goal = TFLOPS[way] if k == 3 else None
    cells = [f"{x:.0f}" if x else "unmeasured" for x in averages] + [f"{x:.2f}" if x else "" for x in ratios]
    known, expected = _known(rates["edm2"]), shapes_of(f"conv{k}x{k}")
    return [f"{k}×{k}, {WAYS[way]}", _of(known, expected), *cells, _verdict(averages[0], goal, " TFLOP/s", known == expected)]


def _fused_by_kind(cases: Iterable[Result]) -> dict[str, list[Result]]:
    kinds: dict[str, list[Result]] = defaultdict(list)
    for case in cases:
        if "parts" in case and case["n"] == BATCH:
            kinds[case["case"].removeprefix("kernels/").rpartition("/")[0]].append(case)
    return kinds


def _fused(cases: Sequence[Result], kind: str, own: list[Result]) -> list[str]:
    added = [x for case in own if (x := _added(cases, case))]
    shares = [share for _, share in added]
    text = f"{mean(seconds for seconds, _ in added) * 1e3:.3g} ms, {_spread(shares, '.0%')}" if added else ""
    return [*_against_goal(kind, own, FUSED, shapes_of(kind.partition("/")[0]))[:-1], text]


def _against_goal(name: str, own: list[Result], goal: float, expected: int) -> list[str]:
    known = [x for case in own if (x := _times(case, "compile"))]
    spread = _spread(known, ".2f") if known else "unmeasured"
    return [name, _of(len(known), expected), spread, _verdict(_mean(known), goal, "×", len(known) == expected), ""]


def _added(cases: Sequence[Result], case: Result) -> tuple[float, float] | None:
    """Seconds beyond its plain convolutions, and their share of these."""
    named = {other["case"]: other for other in cases if other["case"] in case["parts"]}
    parts = [_seconds(named[name], "edm2") if name in named else None for name in case["parts"]]
    whole = _seconds(case, "edm2")
    if whole is None or None in parts:
        return None
    return whole - sum(parts), whole / sum(parts) - 1


def _added_cells(added: tuple[float, float] | None) -> list[str]:
    return [f"{added[0] * 1e3:.3g}", f"{added[1]:.0%}"] if added else ["", ""]


def _by_row(cases: Iterable[Result]) -> dict[tuple, list[tuple[Result, int]]]:
    """Row → cases, and how often a step has each; rows of which all was measured both ways. Plain input gradients are those
    left by the fused."""
    rows: dict[tuple, list[Result]] = defaultdict(list)
    for case in cases:
        if "row" in case and case["n"] == BATCH and all(_seconds(case, name) for name in ("edm2", LIBRARY)):
            rows[conv_tiles.kind(case["machine"].get("capability", 90)), *case["row"]].append(case)
    weighted = {}
    for key, own in rows.items():
        fused = fused_of_rows().get(key[1:], {})
        if fused.keys() <= {case["case"] for case in own}:
            uses = [(case, fused.get(case["case"], case["count"] - sum(fused.values()))) for case in own]
            weighted[key] = [(case, weight) for case, weight in uses if weight > 0]
    return {key: own for key, own in weighted.items() if own}


@lru_cache
def fused_of_rows() -> dict[tuple, dict[str, int]]:
    """Row → names of the fused cases that belong to it, and how often a step has each."""
    rows: dict[tuple, dict[str, int]] = defaultdict(dict)
    for op, site in sites(PRESET):
        if FUSIONS[op].in_table:
            (way,), site = FUSIONS[op].ways, site._replace(n=BATCH)
            rows[tuple(row(way, site.k, site.res, site.cin, site.cout))][fused_name(op, way, site)] = site.count
    return rows


def _seconds(case: Result, name: str) -> float | None:
    return case["candidates"].get(name, {}).get("median")


def _rate(case: Result, name: str) -> float | None:
    return case["candidates"].get(name, {}).get("TFLOP/s")


def _times(case: Result, other: str) -> float | None:
    """How many times as fast this project is."""
    ours, theirs = _seconds(case, "edm2"), _seconds(case, other)
    return theirs / ours if ours and theirs else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [x for x in values if x]
    return mean(known) if known else None


def _known(values: Iterable[float | None]) -> int:
    return sum(x is not None for x in values)


def _of(known: int, expected: int) -> str:
    return str(known) if known == expected else f"{known} of {expected}"


def _spread(values: Sequence[float], form: str) -> str:
    middle, least, most = (format(x, form) for x in (mean(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least}–{most})"


def _verdict(value: float | None, goal: float | None, unit: str, complete: bool) -> str:
    if goal is None:
        return ""
    if value is None or not complete:
        return f"{goal}{unit}: {'unmeasured' if value is None else 'incomplete'}"
    return f"{goal}{unit}: {'reached' if value >= goal else 'missed'}"
