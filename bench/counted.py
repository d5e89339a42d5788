"""The ledger of EDM2-S as the documents show it and tests hold it: `python -m bench count-ledger` counts it anew."""

import json
from pathlib import Path
from typing import Any

from bench.ledger import count
from edm2.errors import UserError
from edm2.files import make_folder, replacing

BEGIN, END = "<!-- ledger: begin -->", "<!-- ledger: end -->"
PRESET, BATCH = "edm2-img512-s", 256
CANDIDATES, PHASES = ("eager", "this project"), {"eval": "evaluation", "train": "training step"}
Counts = list[dict[str, Any]]


def path_of(root: Path) -> Path:
    return root / "bench" / "results" / "ledger.json"


def save(root: Path) -> None:
    entries = [count(candidate, PRESET, BATCH, phase).to_json() for phase in PHASES for candidate in CANDIDATES]
    make_folder(path_of(root).parent)
    with replacing(path_of(root)) as temporary:
        temporary.write_text(json.dumps(entries, indent=1) + "\n")


def load(root: Path) -> Counts:
    """Empty where nothing was counted."""
    path = path_of(root)
    try:
        return json.loads(path.read_text()) if path.exists() else []
    except ValueError as e:
        raise UserError(f"{path} is not a ledger; count again: python -m bench count-ledger") from e


def documents(root: Path) -> dict[Path, str]:
    """The README of the benchmarks with the table between its marks."""
    entries, readme = load(root), root / "bench" / "README.md"
    if not entries:
        return {}
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme} has no place for the ledger: {BEGIN} … {END}")
    return {readme: f"{text.split(BEGIN)[0]}{BEGIN}\n{table(entries)}\n{END}{text.split(END)[1]}"}


def table(entries: Counts) -> str:
    lines = [f"| EDM2-S, batch {BATCH}, fp16 | launches | GB moved | TFLOP | MB saved per image |", "|---|---|---|---|---|"]
    for entry in entries:
        total = entry["total"]
        saved = f"{total['saved'] / entry['batch'] / 1e6:.1f}" if total["saved"] else ""
        amounts = f"{total['launches']:,} | {total['bytes'] / 1e9:.1f} | {total['flops'] / 1e12:.1f} | {saved}"
        lines.append(f"| {PHASES[entry['phase']]}, {entry['candidate']} | {amounts} |")
    return "\n".join(lines)


def sentence(entries: Counts) -> str:
    """For the main README: what a training step takes."""
    eager, own = (next(e["total"] for e in entries if (e["candidate"], e["phase"]) == (name, "train")) for name in CANDIDATES)
    parts = [f"{x['launches']:,} launches and {x['bytes'] / 1e9:.0f} GB of memory traffic" for x in (own, eager)]
    return f"Counted without a GPU, a training step of EDM2-S at batch {BATCH} is {parts[0]}; `eager` has {parts[1]}."
