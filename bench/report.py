"""The README's tables, made from the results: no figure there that no file holds."""

import json
from pathlib import Path
from typing import Any

from edm2.errors import UserError

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def update_readme(readme: Path, results: Path) -> None:
    """Replace what stands between the two marks. UserError if they are not there."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        raise UserError(f"{readme} has no place for the tables: {BEGIN} … {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")


def tables(results: Path) -> str:
    """Markdown for all machines, training first."""
    sections = [_machine(folder) for folder in sorted(results.iterdir()) if any(folder.glob("*.json"))]
    return "\n\n".join(sections) if sections else "Nothing has been measured."


def _machine(folder: Path) -> str:
    cases = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    cases.sort(key=lambda case: ["train", "sample", "optimizer", "block", "kernels"].index(case["group"]))
    machine = cases[0]["machine"]
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    lines = [f"{folder.name}{threads}, PyTorch {machine['torch']}:", "", "| case | candidate | median ms (20–80 %) | rate |"]
    lines += ["|---|---|---|---|"]
    rows = [(case, name, facts) for case in cases for name, facts in case["candidates"].items()]
    lines += [_row(*row) for row in rows if "not compiled" not in row[1]]
    return "\n".join(lines)


def _row(case: dict[str, Any], name: str, facts: dict[str, Any]) -> str:
    if "failure" in facts:
        return f"| {case['case']} | {name} | {facts['failure']} | |"
    low, median, high = (facts[key] * 1e3 for key in ("low", "median", "high"))
    rate = next((f"{facts[unit]:.3g} {unit}" for unit in ("images/s", "TFLOP/s", "GB/s") if unit in facts), "")
    mfu = f", {facts['MFU']:.1%} MFU" if "MFU" in facts else ""
    return f"| {case['case']} | {name} | {median:.1f} ({low:.1f}–{high:.1f}) | {rate}{mfu} |"
