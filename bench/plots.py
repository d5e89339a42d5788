"""Pictures of the results: speed-up by preset, roofline, phases of a training step, losses of trainings that should agree.

Each PNG holds a digest of what it shows, so that an outdated one is found without drawing it again.
"""

import hashlib
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.presets import PRESETS

# Okabe and Ito's colours, told apart by colour-blind readers; the first is this project's.
OURS, OTHERS = "#D55E00", ("#999999", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
SMOOTHED = 10  # steps of training that are one point of a curve
PHASES = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#CC79A7"}
CAPTIONS = {
    "speedup": "Training speed relative to eager, by preset",
    "roofline": "Roofline with every kernel that was measured",
    "steps": "Phases of a training step",
    "equivalence": "Loss of training by this project and by the plain network in fp32",
}


def plan(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Name → what to show, of those pictures for which there are figures."""
    return {name: data for name, select in SELECT.items() if (data := select(cases))}


def draw(planned: dict[str, Any], folder: Path) -> None:
    """Write `folder/name.png` for each. UserError without matplotlib."""
    if not planned:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UserError("the tables are written; plots need matplotlib: pip install -e .[plot]") from e
    make_folder(folder)
    for name, data in planned.items():
        figure = Figure(dpi=120, layout="constrained")
        DRAW[name](figure, data)
        with replacing(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png", metadata={"Data": digest(data)})


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def outdated(planned: dict[str, Any], folder: Path) -> list[Path]:
    """Pictures in the folder that show something else than what is planned."""
    return [path for path in sorted(folder.glob("*.png")) if path.stem in CAPTIONS and not _shows(path, planned.get(path.stem))]


def _shows(path: Path, data: Any) -> bool:
    with Image.open(path) as image:
        return data is not None and image.info.get("Data") == digest(data)


def fastest(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Candidate → images per second at its best batch."""
    best: dict[str, float] = {}
    for case in cases:
        for name, facts in case["candidates"].items():
            if "images/s" in facts:
                best[name] = max(best.get(name, 0.0), facts["images/s"])
    return best


def in_order(candidates: set[str]) -> list[str]:
    """Eager first, this project last."""
    return sorted(candidates, key=lambda name: (name == "edm2", not name.startswith("eager"), name))


def _by_preset(cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The training cases of each preset, in the order of `PRESETS`."""
    training = [case for case in cases if case["group"] == "train"]
    presets = {preset: [case for case in training if case["preset"] == preset] for preset in PRESETS}
    return {preset: own for preset, own in presets.items() if own}


def _select_speedup(cases: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Preset → candidate → speed over eager's. Published presets only: the digits are a demonstration."""
    best = {preset.removeprefix("edm2-"): fastest(own) for preset, own in _by_preset(cases).items() if preset != "digits"}
    ratios = {preset: {name: rate / rates["eager"] for name, rate in rates.items()} for preset, rates in best.items() if "eager" in rates}
    return {preset: own for preset, own in ratios.items() if len(own) > 1}


def _select_roofline(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The ceilings, the highest where several runs measured them, and of each kernel (op, candidate, FLOP/byte, TFLOP/s),
    or (op, candidate, GB/s) where there is no matrix product."""
    units = "TFLOP/s", "GB/s"
    roof = {unit: max((case["ceilings"].get(unit, 0.0) for case in cases), default=0.0) for unit in units}
    points = [
        (case["case"].split("/")[1], name, case["flops"] / case["bytes"], facts["TFLOP/s"])
        for case in cases
        if case["group"] == "kernels" and case["bytes"]
        for name, facts in case["candidates"].items()
        if "TFLOP/s" in facts
    ]
    streams = [
        ("/".join(case["case"].split("/")[1:-1]), name, facts["GB/s"])
        for case in cases
        if case["group"] == "kernels" and case["case"] != "kernels/copy" and not case["flops"]
        for name, facts in case["candidates"].items()
        if "GB/s" in facts
    ]
    return {"roof": roof, "points": points, "streams": streams} if points and all(roof.values()) else {}


def _select_steps(cases: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Preset and batch → candidate → milliseconds by phase; of each preset the batch that most candidates managed."""
    panels = {}
    for preset, own in _by_preset(cases).items():
        bars = {case["batch"]: _phases(case) for case in own}
        batch = max(bars, key=lambda batch: (len(bars[batch]), batch))
        if bars[batch]:
            panels[f"{preset}, batch {batch}"] = bars[batch]
    return panels


def _select_equivalence(cases: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """Preset and batch → candidate → loss of each step, the plain network's first."""
    found = {}
    for case in cases:
        losses = {name: facts["losses"] for name, facts in case["candidates"].items() if facts.get("losses")}
        if case["group"] == "equivalence" and losses:
            found[f"{case['preset']}, batch {case['batch']}"] = {name: losses[name] for name in in_order(set(losses))}
    return found


def _phases(case: dict[str, Any]) -> dict[str, dict[str, float]]:
    parts = {name: facts["parts"] for name, facts in case["candidates"].items() if "parts" in facts}
    return {name: {phase: seconds * 1e3 for phase, seconds in parts[name].items()} for name in in_order(set(parts))}


def _colours(candidates: list[str]) -> dict[str, str]:
    return dict(zip((name for name in candidates if name != "edm2"), cycle(OTHERS))) | {"edm2": OURS}


def _draw_speedup(figure, data: dict[str, dict[str, float]]) -> None:
    names = in_order({name for own in data.values() for name in own} - {"eager"})
    figure.set_size_inches(max(6.0, 1 + 0.3 * len(data) * (len(names) + 1)), 4.2)
    axes, width = figure.subplots(), 0.85 / len(names)
    colours = _colours(["eager", *names])
    for i, name in enumerate(names):
        places = {j + (i - (len(names) - 1) / 2) * width: own[name] for j, own in enumerate(data.values()) if name in own}
        bars = axes.bar(places.keys(), places.values(), width * 0.92, color=colours[name], label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, rotation=90)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="eager")
    axes.set_xticks(range(len(data)), data)
    axes.margins(y=0.15)
    axes.tick_params(labelsize=8)
    axes.set(ylabel="training images/s, relative to eager", xlim=(-0.6, len(data) - 0.4))
    axes.set_title("Each candidate at its best batch; no bar: failed or unmeasured", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _draw_roofline(figure, data: dict[str, Any]) -> None:
    from matplotlib.ticker import LogFormatter

    (flops, bandwidth), points, streams = data["roof"].values(), data["points"], data["streams"]
    ops, names = sorted({p[0] for p in points}), in_order({p[1] for p in (*points, *streams)})
    colours, markers = _colours(names), dict(zip(ops, cycle("osD^vP*X")))
    figure.set_size_inches(8, 8.5 if streams else 5)
    axes, *below = figure.subplots(1 + bool(streams), squeeze=False).ravel()
    if streams:
        _draw_streams(below[0], streams, bandwidth, colours)
    for op, name, intensity, rate in points:
        axes.plot(intensity, rate, markers[op], color=colours[name], markersize=5, alpha=0.75, markeredgewidth=0)
    ridge = flops * 1e3 / bandwidth  # FLOP/byte where the two ceilings meet
    left, right = (pick(ridge, *(p[2] for p in points)) for pick in (min, max))
    axes.plot([left / 2, ridge, right * 2], [left / 2 * bandwidth / 1e3, flops, flops], color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP/byte (inputs and outputs once)", ylabel="TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):  # 200, not 2 × 10²
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    axes.tick_params(which="both", labelsize=8)
    axes.set_title(f"Ceilings of the same runs: product {flops:,.0f} TFLOP/s, copy {bandwidth:,.0f} GB/s", fontsize=9)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    for name in names:
        axes.plot([], [], "s", color=colours[name], label=name)
    for op in ops:
        axes.plot([], [], markers[op], color="white", markeredgecolor="black", label=op)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)


def _draw_streams(axes, streams: list[tuple[str, str, float]], bandwidth: float, colours: dict[str, str]) -> None:
    """Kernels without matrix products, against the copy."""
    for op, name, rate in sorted(streams, reverse=True):
        axes.plot(rate, op, "o", color=colours[name], markersize=5, alpha=0.75, markeredgewidth=0)
    axes.axvline(bandwidth, color="black", linewidth=1)
    axes.set(xlabel="GB/s (inputs and outputs once); the line is the copy", xlim=(0, None))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3, linewidth=0.5)


def _draw_steps(figure, data: dict[str, dict[str, dict[str, float]]]) -> None:
    columns = min(2, len(data))
    rows = -(-len(data) // columns)
    figure.set_size_inches(1 + 5 * columns, 0.9 + rows * (0.9 + 0.25 * max(map(len, data.values()))))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    phases = dict.fromkeys(phase for bars in data.values() for parts in bars.values() for phase in parts)
    for axes, (title, bars) in zip(panels, data.items()):
        left = dict.fromkeys(bars, 0.0)
        for phase in phases:
            lengths = [parts.get(phase, 0.0) for parts in bars.values()]
            axes.barh(list(bars), lengths, 0.7, left=list(left.values()), color=PHASES[phase], label=phase)
            left = {name: start + length for (name, start), length in zip(left.items(), lengths)}
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("ms per step, each phase timed by itself", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
    for axes in panels[len(data) :]:
        axes.remove()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _draw_equivalence(figure, data: dict[str, dict[str, list[float | None]]]) -> None:
    figure.set_size_inches(8, 0.6 + 3.4 * len(data))
    for axes, (title, losses) in zip(figure.subplots(len(data), squeeze=False).ravel(), data.items()):
        for name, curve in losses.items():
            ours = name.startswith("edm2")
            steps, means = _means(curve)
            axes.plot(steps, means, color=OURS if ours else OTHERS[0], linewidth=1 if ours else 4, label=name)
        axes.set(xlabel=f"step; means of {SMOOTHED}", ylabel="loss")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.legend(fontsize=8, frameon=False)


def _means(curve: list[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of steps, and the mean of as many as are drawn as one point."""
    size = min(SMOOTHED, len(curve))
    losses = np.array(curve, float)[: len(curve) // size * size].reshape(-1, size)
    return size * (np.arange(len(losses)) + 1), losses.mean(axis=1)


SELECT = {"speedup": _select_speedup, "roofline": _select_roofline, "steps": _select_steps, "equivalence": _select_equivalence}
DRAW = {"speedup": _draw_speedup, "roofline": _draw_roofline, "steps": _draw_steps, "equivalence": _draw_equivalence}
