"""Training against its goals: speed, memory and what is not forward and backward; the loss against the plain network's."""

from collections.abc import Iterable
from typing import Any

from bench.case import OURS
from bench.goals import BATCH, PRESET

Result = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
RATE, MFU = 950, 0.58  # images/s of EDM2-S on an H200, and the same as a share of its peak
TIMES_EAGER, TIMES_COMPILED = 2.2, 1.4  # as fast as eager, and as the best that torch.compile makes of the plain network
MEMORY, OUTSIDE = 0.6, 0.025  # at most: peak memory of eager's, the optimizer's share of a step


def quickest(rates: dict[str, float]) -> str | None:
    """Of the candidates with these rates the best that is this project's."""
    return max((name for name in rates if name.startswith(OURS)), key=rates.__getitem__, default=None)


def training(cases: Iterable[Result]) -> list[Table]:
    """A table of EDM2-S, if there is the case: every goal judged by the quickest of this project's candidates, which heads it."""
    own = [case for case in cases if case["group"] == "train" and (case["preset"], case["batch"]) == (PRESET, BATCH)]
    measured = {name: facts for case in own for name, facts in case["candidates"].items() if "images/s" in facts}
    rates = {name: facts["images/s"] for name, facts in measured.items()}
    best = quickest(rates)
    compiled = max((name for name in rates if name.startswith("compile")), key=rates.__getitem__, default="compile")
    ours, eager = measured.get(best, {}), measured.get("eager", {})
    outside, with_data = _outside(ours.get("parts") or measured.get(OURS, {}).get("parts"))  # a graph has none
    rows = [
        _row("images/s", rates.get(best), "{:,.0f}", RATE),
        _row("MFU", ours.get("MFU"), "{:.3g}%", MFU, factor=100),
        _row("speed against eager", _ratio(rates.get(best), rates.get("eager")), "{:.3g}×", TIMES_EAGER),
        _row(f"speed against {compiled}", _ratio(rates.get(best), rates.get(compiled)), "{:.3g}×", TIMES_COMPILED),
        _row("peak memory against eager", _ratio(ours.get("peak_memory"), eager.get("peak_memory")), "{:.3g}×", MEMORY, at_most=True),
        _row("outside forward and backward", outside, "{:.3g}%", OUTSIDE, at_most=True, factor=100),
    ]
    if with_data is not None:
        rows[-1][1] += f" ({with_data:.1%} with data)"
    return [(["training step", best or OURS, "goal"], rows)] if own else []


def equivalence(cases: Iterable[Result]) -> Table:
    """A row for each case: the losses over its last steps, their relative difference, the goal."""
    return ["mean loss", "eager, float32", "this project", "off by", "goal"], [_alike(case) for case in cases]


def _alike(case: Result) -> list[str]:
    plain = case["candidates"].get("eager", {})
    name, ours = next((item for item in case["candidates"].items() if item[0].startswith(OURS)), (OURS, {}))
    error, goal = ours.get("error"), ours.get("tolerance", 0)
    error = None if plain.get("loss") is None else error  # without the other it was compared with itself
    failure = plain.get("failure") or ours.get("failure")
    if error is not None and error > goal:
        state = "missed"
    elif failure or error is None:
        state = f"failed: {failure[:60]}".replace("|", r"\|") if failure else "unmeasured"
    else:
        state = "reached"
    steps = f"{case['preset']}, batch {case['batch']}, last {case['last']} of {case['steps']:,} steps"
    off = "unmeasured" if error is None else f"{100 * error:.2g}%"
    return [steps, _loss(plain), f"{_loss(ours)} ({name}, {case['dtype']})", off, f"≤ {100 * goal:.3g}%: {state}"]


def _loss(facts: Result) -> str:
    return "unmeasured" if facts.get("loss") is None else f"{facts['loss']:.5f}"


def _row(name: str, value: float | None, form: str, goal: float, at_most: bool = False, factor: float = 1) -> list[str]:
    """What was found, and whether the goal is reached."""
    found, state = "unmeasured", "unmeasured"
    if value is not None:
        found = form.format(factor * value)
        state = "reached" if (value <= goal if at_most else value >= goal) else "missed"
    return [name, found, f"{'≤' if at_most else '≥'} {form.format(factor * goal)}: {state}"]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def _outside(phases: dict[str, float] | None) -> tuple[float | None, float | None]:
    """The share of a step that is neither forward nor backward; the same with reading data, as if nothing hid it."""
    if not phases:
        return None, None
    networks, whole = phases["forward"] + phases["backward"], sum(phases.values())
    return 1 - networks / (whole - phases["data"]), 1 - networks / whole
