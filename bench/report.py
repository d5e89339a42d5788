"""Tables and plots made from the results: no figure in the README that no file in bench/results holds."""

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import counted, goals, plots, training_goals
from bench.case import OURS
from edm2.errors import UserError
from edm2.files import make_folder
from edm2.presets import PRESETS

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TITLES = {
    "train": "Training steps",
    "sample": "Evaluations of the network",
    "data": "Reading training data, by two worker processes",
    "difference": "Ends of trajectories in fp16, their relative difference from fp32",
    "equivalence": "Loss of training against that of the plain network in fp32",
    "optimizer": "The optimizer's step alone",
    "block": "One block, forward and backward",
    "kernels": "Kernels",
}
TRAINING = "The training step of EDM2-S at batch 256; the goals are for an H200"
CONVOLUTIONS = "Convolutions of EDM2-S at batch 256; the goals are for an H200"
OWN_TABLES = "equivalence", "kernels"  # groups that are no table of times by case and candidate
FACTS = {  # of a machine's description, and how they read
    "name": "{}", "threads": "{} threads", "driver_version": "driver {}", "power.limit": "power limit {}",
    "torch": "PyTorch {}", "triton": "Triton {}", "commit": "commit {}",
}  # fmt: skip
SIZES = [preset for preset in PRESETS if preset != "digits"]
Result = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The results of one machine: of every case, and with the modes of `torch.compile` in the case they belong to."""

    name: str
    cases: list[Result]
    merged: list[Result]

    @property
    def is_gpu(self) -> bool:
        return self.cases[0]["machine"]["device"] == "cuda"

    def of(self, group: str) -> list[Result]:
        return [case for case in self.merged if case["group"] == group]


def update(root: Path) -> None:
    """Write the README's tables, and tables and plots in docs/bench. Without matplotlib UserError, the tables written."""
    machines = load(root / "bench" / "results")
    for path in _leftovers(root, machines):
        path.unlink()
    try:
        for machine in machines:
            plots.draw(plots.plan(machine.merged), _docs(root) / machine.name)
    finally:
        for path, text in documents(root, machines).items():
            make_folder(path.parent)
            path.write_text(text)


def differences(root: Path) -> str:
    """What `update` would change: a diff of the texts, and a line for each plot. Empty if nothing."""
    machines = load(root / "bench" / "results")
    lines = [f"{path.relative_to(root)}: outdated" for path in _leftovers(root, machines)]
    for machine in machines:
        paths = [_docs(root) / machine.name / f"{name}.png" for name in plots.plan(machine.merged)]
        lines += [f"{path.relative_to(root)}: missing" for path in paths if not path.exists()]
    for path, text in documents(root, machines).items():
        old = path.read_text().splitlines() if path.exists() else []
        name = str(path.relative_to(root))
        lines += difflib.unified_diff(old, text.splitlines(), name, f"{name}, from bench/results", lineterm="")
    return "\n".join(lines)


def load(results: Path) -> list[Machine]:
    """GPUs first. What was traced but not compiled is no baseline and left out."""
    machines = []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        cases = sorted(map(_read, folder.glob("*.json")), key=_place)
        if cases:
            machines.append(Machine(folder.name, cases, _merged(cases)))
    return sorted(machines, key=lambda machine: not machine.is_gpu)


def documents(root: Path, machines: list[Machine]) -> dict[Path, str]:
    """Path → text of the READMEs and of each machine's full tables."""
    before, after = _parts_of(root / "README.md")
    counts = counted.load(root)
    sections = [_answer(machines), *([counted.sentence(counts)] if counts else []), *(_section(root, machine) for machine in machines)]
    readme = f"{before}{BEGIN}\n" + "\n\n".join(sections) + f"\n{END}{after}"
    pages = {_docs(root) / f"{machine.name}.md": _full(root, machine) for machine in machines}
    return {root / "README.md": readme} | counted.documents(root) | pages


def _docs(root: Path) -> Path:
    return root / "docs" / "bench"


def _parts_of(readme: Path) -> tuple[str, str]:
    """The text before and after the tables."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme} has no place for the tables: {BEGIN} … {END}")
    return text.split(BEGIN)[0], text.split(END)[1]


def _leftovers(root: Path, machines: list[Machine]) -> list[Path]:
    """Tables and plots that earlier results left behind."""
    plans = {machine.name: plots.plan(machine.merged) for machine in machines}
    tables = [path for path in sorted(_docs(root).glob("*.md")) if path.stem not in plans]
    folders = [folder for folder in sorted(_docs(root).glob("*")) if folder.is_dir()]
    return tables + [path for folder in folders for path in plots.outdated(plans.get(folder.name, {}), folder)]


def _read(path: Path) -> Result:
    try:
        case = json.loads(path.read_text())
        case["candidates"] = {name: facts for name, facts in case["candidates"].items() if "not compiled" not in name}
    except (ValueError, KeyError) as e:
        raise UserError(f"{path} is not a result of this suite; remove it or measure again") from e
    return case


def _place(case: Result) -> tuple[int, int, list[Any]]:
    """Sorts by group, then size of the network, then name with its numbers as numbers."""
    preset = case.get("preset")
    size = SIZES.index(preset) if preset in SIZES else -1
    return list(TITLES).index(case["group"]), size, [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", case["case"])]


def _merged(cases: list[Result]) -> list[Result]:
    merged: dict[str, Result] = {}
    for case in cases:
        name = case["case"].removesuffix(f"/{case.get('mode')}")
        known = merged.get(name, {"candidates": {}})
        merged[name] = case | known | {"case": name, "candidates": case["candidates"] | known["candidates"]}
    return list(merged.values())


def _answer(machines: list[Machine]) -> str:
    """The first line: how fast EDM2-S trains."""
    lines = [_training_speed(machine) for machine in machines if machine.is_gpu]
    return "\n".join(lines) or "**No GPU results exist yet: EDM2-S training, and all else on a GPU, is unmeasured.**"


def _training_speed(machine: Machine) -> str:
    cases = [case for case in machine.of("train") if case["preset"] == "edm2-img512-s"]
    best = plots.fastest(cases)
    own = training_goals.quickest(best) or OURS
    compiled = max((name for name in best if name.startswith("compile")), key=best.get, default="compile")

    def state(name: str) -> str:
        return "failed" if any(name in case["candidates"] for case in cases) else "unmeasured"

    def against(name: str) -> str:
        if name not in best or own not in best:
            return f"{name} {_number(best[name]) if name in best else state(name)}"
        return f"{best[own] / best[name]:.2f}× {name} ({_number(best[name])})"

    ours = f"{own} {_number(best[own])} images/s" if own in best else f"{own} {state(own)}"
    return f"**EDM2-S training on {machine.name}: {ours}; {against('eager')}, {against(compiled)}; each at its best batch.**"


def _section(root: Path, machine: Machine) -> str:
    """A machine in the README."""
    parts = [f"### {machine.name}", _described(machine), *_pictures(root, machine, "docs/bench/")]
    tables = {group: machine.of(group) for group in TITLES}
    parts += [f"{TITLES[group]}:\n\n{_wide(cases)}" for group, cases in tables.items() if cases and group not in OWN_TABLES]
    if tables["equivalence"]:
        parts.append(f"{TITLES['equivalence']}:\n\n{_table(*training_goals.equivalence(tables['equivalence']))}")
    parts += [f"{TRAINING}:\n\n{_table(*table)}" for table in training_goals.training(machine.merged)]
    if averages := [_table(*table) for table in goals.averages(machine.merged)]:
        parts.append(f"{CONVOLUTIONS}:\n\n" + "\n\n".join(averages))
    if tables["kernels"]:
        parts.append(f"{TITLES['kernels']}, with the share of the ceiling that each is nearer to:\n\n{_by_op(tables['kernels'])}")
    return "\n\n".join([*parts, *_unmeasured(machine), f"Everything: [docs/bench/{machine.name}.md](docs/bench/{machine.name}.md)."])


def _described(machine: Machine) -> str:
    """What it ran on; where runs differ, all of their versions."""
    values = {key: sorted({str(case["machine"][key]) for case in machine.cases if case["machine"].get(key)}) for key in FACTS}
    text = ", ".join(FACTS[key].format(" / ".join(own)) for key, own in values.items() if own)
    return f"{text}. Medians (20–80 %); × is the speed against eager in the same case."


def _pictures(root: Path, machine: Machine, prefix: str) -> list[str]:
    files = {name: _docs(root) / machine.name / f"{name}.png" for name in plots.plan(machine.merged)}
    return [f"![{plots.CAPTIONS[name]}]({prefix}{machine.name}/{name}.png)" for name, path in files.items() if path.exists()]


def _unmeasured(machine: Machine) -> list[str]:
    groups = [TITLES[group].lower() for group in TITLES if not machine.of(group)]
    trained = {case["preset"] for case in machine.of("train")}
    presets = [f"training {preset}" for preset in SIZES if machine.is_gpu and trained and preset not in trained]
    return [f"Unmeasured here: {'; '.join(groups + presets)}."] if groups + presets else []


def _wide(cases: list[Result]) -> str:
    """A row for each case, a column for each candidate."""
    names = plots.in_order({name for case in cases for name in case["candidates"]})
    rows = [[case["case"].partition("/")[2], *(_cell(case, name) for name in names)] for case in cases]
    return _table(["case", *names], rows)


def _cell(case: Result, name: str) -> str:
    facts = case["candidates"].get(name)
    if not facts:
        return "unmeasured"
    if "failure" in facts:
        return _failure(facts["failure"], 60)
    eager = {} if name == "eager" else case["candidates"].get("eager", {})
    if case["group"] == "difference":
        return f"{facts['error']:.2e}" + (f", {facts['error'] / eager['error']:.2f}×" if eager.get("error") else "")
    low, middle, high = (_number(facts[key] * 1e3) for key in ("low", "median", "high"))
    parts = [f"{_number(facts[unit])} {unit}" for unit in ("images/s", "GB/s") if unit in facts]
    parts += [f"{middle} ms ({low}–{high})"]
    parts += [f"{facts['MFU']:.1%} MFU"] if "MFU" in facts else []
    return ", ".join(parts + ([f"{eager['median'] / facts['median']:.2f}×"] if "median" in eager else []))


def _by_op(cases: list[Result]) -> str:
    """A row for each op and candidate: at how many shapes, and the shapes nearest to and farthest from a ceiling."""
    ops: dict[tuple[str, str], list[tuple[str, Result]]] = {}
    for case in cases:
        _, op, *shape = case["case"].split("/")
        for name, facts in case["candidates"].items():
            ops.setdefault(("/".join([op, *shape[:-1]]), name), []).append((shape[-1] if shape else "", facts))
    rows = [[*key, *_extremes(own), _against_compile(key, ops)] for key, own in ops.items()]
    return _table(["op", "candidate", "shapes", "nearest to its ceiling", "farthest", "median share", "× compile"], rows)


def _against_compile(key: tuple[str, str], ops: dict[tuple[str, str], list[tuple[str, Result]]]) -> str:
    """How much faster than torch.compile: of all shapes the least and the most."""
    times = {shape: facts["median"] for shape, facts in ops.get((key[0], "compile"), []) if "median" in facts}
    ratios = sorted(times[shape] / facts["median"] for shape, facts in ops[key] if shape in times and "median" in facts)
    return f"{ratios[0]:.2f}–{ratios[-1]:.2f}" if ratios and key[1] != "compile" else ""


def _extremes(shapes: list[tuple[str, Result]]) -> list[str]:
    measured = sorted(((_rate(facts), shape) for shape, facts in shapes if "median" in facts), key=lambda x: x[0][0], reverse=True)
    count = f"{len(measured)} of {len(shapes)}" if len(measured) < len(shapes) else str(len(shapes))
    if not measured:
        return [count, _failure(shapes[0][1]["failure"], 60), "", ""]
    ends = [f"{shape}: {rate}".removeprefix(": ") for (_, rate), shape in (measured[0], measured[-1])]
    return [count, *ends, f"{median(share for (share, _), _ in measured):.0%}"]


def _rate(facts: Result) -> tuple[float, str]:
    """The share of the ceiling that is nearer, and the rate as text: a share of the product, or of the copy."""
    units = [unit for unit in ("TFLOP/s", "GB/s") if unit in facts]
    unit = max(units, key=lambda unit: facts.get(f"share of {unit}", 0.0))
    return facts.get(f"share of {unit}", 0.0), _with_share(facts, unit)


def _with_share(facts: Result, unit: str) -> str:
    share = facts.get(f"share of {unit}")
    return f"{_number(facts[unit])} {unit}" + (f" ({share:.0%})" if share else "")


def _full(root: Path, machine: Machine) -> str:
    """The page of a machine: every case and candidate with all that was measured."""
    roof = [f"{_number(max(own))} {unit}" for unit in ("TFLOP/s", "GB/s") if (own := _ceilings(machine, unit))]
    parts = [f"# {machine.name}", "Written by `python -m bench report`; see [bench/README.md](../../bench/README.md).", _described(machine)]
    parts += [f"Shares are of the product and of the copy of the same run, at best {' and '.join(roof)}."] if roof else []
    parts += _pictures(root, machine, "")
    header = ["case", "candidate", "ms (20–80 %)", "rates", "MFU", "phases, ms", "peak GiB", "error"]
    parts += [f"## {TRAINING}\n\n{_table(*table)}" for table in training_goals.training(machine.merged)]
    averages = [_table(*table) for table in goals.averages(machine.merged)]
    parts += [f"## {CONVOLUTIONS}", *averages, *_convolutions(machine)] if averages else []
    for group, title in TITLES.items():
        cases = [case for case in machine.cases if case["group"] == group]
        if group == "equivalence":
            table = training_goals.equivalence(cases)
        else:
            table = header, [_details(case["case"], *item) for case in cases for item in case["candidates"].items()]
        parts += [f"## {title}", _table(*table) if cases else "Unmeasured."]
    return "\n\n".join(parts) + "\n"


def _convolutions(machine: Machine) -> list[str]:
    """What is not averaged: each epilogue, each row of the table of tiles."""
    tables = goals.additions(machine.merged), goals.library_rows(machine.merged)
    texts = "Beyond the plain convolutions in it, each fused case takes:", "Rows that `kernels.conv_tiles.LIBRARY` may name:"
    return [f"{text}\n\n{_table(*table)}" for text, table in zip(texts, tables) if table[1]]


def _ceilings(machine: Machine, unit: str) -> list[float]:
    return [case["ceilings"][unit] for case in machine.cases if unit in case["ceilings"]]


def _details(case: str, name: str, facts: Result) -> list[str]:
    if "failure" in facts:
        return [case, name, _failure(facts["failure"], 300), "", "", "", "", ""]
    low, middle, high = (_number(facts[key] * 1e3) for key in ("low", "median", "high"))
    rates = ", ".join(_with_share(facts, unit) for unit in ("images/s", "TFLOP/s", "GB/s") if unit in facts)
    mfu = f"{facts['MFU']:.1%}" if "MFU" in facts else ""
    phases = ", ".join(f"{phase} {_number(seconds * 1e3)}" for phase, seconds in facts.get("parts", {}).items())
    peak = f"{facts['peak_memory'] / 2**30:.2f}" if facts.get("peak_memory") else ""
    return [case, name, f"{middle} ({low}–{high})", rates, mfu, phases, peak, f"{facts['error']:.1e}"]


def _failure(reason: str, length: int) -> str:
    """One cell, whatever the message holds."""
    short = "out of memory" if "out of memory" in reason.lower() and length < len(reason) else reason[:length]
    return "failed: " + short.replace("|", r"\|")


def _number(x: float) -> str:
    """Three significant digits, no exponent from 1000 on: 0.0123, 77.2, 1,740."""
    return f"{float(f'{x:.3g}'):,.0f}" if x >= 100 else f"{x:.3g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])
