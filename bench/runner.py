"""Runs cases within a budget and writes a JSON file after each: a run cut short loses nothing."""

import gc
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bench.case import Case
from bench.machine import describe, peak_flops
from bench.measure import measure_in_turn
from edm2.backends import full_precision
from edm2.files import make_folder, replacing

CEILINGS = {"kernels/gemm/square": "TFLOP/s", "kernels/copy": "GB/s"}


def run_cases(cases: Iterable[Case], outdir: Path, budget: float, runs: int = 20) -> list[dict[str, Any]]:
    """Measure the cases in order until `budget` seconds are over; returns the results, each also a file in `outdir`.

    A candidate that fails, or whose output is off, is reported so and without a speed.
    """
    full_precision()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine, start = describe(), time.monotonic()
    ceilings: dict[str, float] = {}
    results = []
    for case in cases:
        if time.monotonic() - start > budget:
            click.echo(f"{case.name}: left out, the budget of {budget:.0f} s is spent", err=True)
            continue
        if case.needs_gpu and device.type != "cuda":
            click.echo(f"{case.name}: left out, needs a GPU", err=True)
            continue
        result = run_case(case, device, ceilings, runs)
        if case.name in CEILINGS:
            unit = CEILINGS[case.name]
            ceilings[unit] = max((c[unit] for c in result["candidates"].values() if unit in c), default=0.0)
        result |= {"machine": machine, "ceilings": dict(ceilings)}
        write(outdir / f"{case.name.replace('/', '_')}.json", result)
        click.echo(line(result))
        results.append(result)
    return results


def run_case(case: Case, device: torch.device, ceilings: dict[str, float], runs: int) -> dict[str, Any]:
    """Check every candidate of a case against the first, and time those that are right.

    On a CPU, whose speed drifts, in turn; on a GPU one after the other, so that each has the memory for itself.
    """
    candidates, reference = case.build(device), None
    results: dict[str, dict[str, Any]] = {}
    for name in list(candidates):
        try:
            results[name], output = _check(case, candidates[name], device, reference)
            reference = output if reference is None else reference
            if device.type == "cuda":
                _time(case, {name: candidates[name]}, results, device, runs)
        except (RuntimeError, torch.OutOfMemoryError) as e:
            results[name] = {"failure": (str(e).splitlines() or [type(e).__name__])[0][:300]}
        if device.type == "cuda" or "failure" in results[name]:
            del candidates[name]
            _free(device)
    if candidates:
        _time(case, candidates, results, device, runs)
    for facts in results.values():
        facts |= _shares(case, facts, ceilings)
    return {"case": case.name, "group": case.group, **case.facts, "flops": case.flops, "bytes": case.bytes, "candidates": results}


def _check(case: Case, run, device: torch.device, reference: Tensor | None) -> tuple[dict[str, Any], Tensor | None]:
    """The error of a candidate's first output, and that output in fp32 on the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    output = run()
    output = output.float().cpu() if isinstance(output, Tensor) else None
    error = 0.0 if reference is None or output is None else _relative_error(output, reference)
    facts: dict[str, Any] = {"error": error, "tolerance": case.tolerance}
    if not error <= case.tolerance:
        facts["failure"] = f"error {error:.2e} above {case.tolerance}"
    return facts, output


def _time(case: Case, candidates: dict[str, Any], results: dict[str, dict[str, Any]], device: torch.device, runs: int) -> None:
    """Add timings to the results of the candidates that are right."""
    right = {name: run for name, run in candidates.items() if "failure" not in results[name]}
    timings = measure_in_turn(list(right.values()), device, runs, flush=case.flush) if right else []
    for (name, run), timing in zip(right.items(), timings):
        parts = {"parts": run.parts()} if hasattr(run, "parts") else {}
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        results[name] |= asdict(timing) | parts | {"peak_memory": peak}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def _shares(case: Case, facts: dict[str, Any], ceilings: dict[str, float]) -> dict[str, float]:
    """Rates, and what share they are of the product and the copy measured in the same run."""
    if "median" not in facts:
        return {}
    rates = {"TFLOP/s": case.flops / facts["median"] / 1e12, "GB/s": case.bytes / facts["median"] / 1e9}
    rates = {unit: rate for unit, rate in rates.items() if rate > 0}
    shares = {f"share of {unit}": rate / ceilings[unit] for unit, rate in rates.items() if ceilings.get(unit)}
    if case.images:
        rates["images/s"] = case.images / facts["median"]
        if case.group == "train" and peak_flops():
            shares["MFU"] = case.flops / facts["median"] / peak_flops()
    return rates | shares


def write(path: Path, result: dict[str, Any]) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


def line(result: dict[str, Any]) -> str:
    """One line per case: each candidate's median and rate."""
    parts = []
    for name, c in result["candidates"].items():
        units = ("TFLOP/s", "GB/s") if result["group"] == "kernels" else ("images/s", "GB/s")
        rate = next((f", {c[u]:.3g} {u}" for u in units if u in c), "")
        parts.append(f"{name}: {c['failure']}" if "failure" in c else f"{name} {c['median'] * 1e3:.3f} ms{rate}")
    return f"{result['case']}  " + " | ".join(parts)
