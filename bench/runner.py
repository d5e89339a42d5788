"""Runs cases within a budget and writes a JSON file after each: a run cut short loses nothing."""

import gc
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import kernels
from bench.case import OURS, REFERENCE, Case
from bench.machine import describe
from bench.measure import measure_in_turn
from edm2.backends import full_precision, peak_flops
from edm2.files import make_folder, replacing

CEILINGS = {"kernels/gemm/square": "TFLOP/s", "kernels/copy": "GB/s"}
UNFINISHED = "did not finish"


Save = Callable[[dict[str, Any]], None]


def run_cases(
    cases: Iterable[Case],
    outdir: Path,
    budget: float,
    runs: int = 20,
    run: Callable[..., dict[str, Any]] | None = None,
    tell: Callable[[dict[str, Any]], str] | None = None,
) -> list[dict[str, Any]]:
    """Measure the cases in order until `budget` seconds are over; returns the results, each also a file in `outdir`.

    A candidate that fails, or whose output is off, is reported so and without a speed. A file is written anew with
    every candidate. `run` takes the place of `run_case`, `tell` of `line`.
    """
    full_precision()
    device = this_device()
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
        path = outdir / f"{case.name.replace('/', '_')}.json"
        save = partial(_save, path, {"machine": machine, "ceilings": dict(ceilings)})
        result = (run or run_case)(case, device, ceilings, runs, save)
        if case.name in CEILINGS:
            unit = CEILINGS[case.name]
            ceilings[unit] = max((c[unit] for c in result["candidates"].values() if unit in c), default=0.0)
        result |= {"machine": machine, "ceilings": dict(ceilings)}
        write(path, result)
        click.echo((tell or line)(result))
        results.append(result)
        if broken(device):
            click.echo("the device is unusable after an error: stopping here", err=True)
            break
    return results


def this_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_case(case: Case, device: torch.device, ceilings: dict[str, float], runs: int, save: Save) -> dict[str, Any]:
    """Check every candidate of a case against the reference, or else the first, and time those that are right.

    On a CPU, whose speed drifts, in turn; on a GPU one after the other, so that each has the memory for itself, unless the
    case asks for turns.
    `save` is given the result so far before each candidate, which stands in it as UNFINISHED.
    """
    result, alone = blank(case), device.type == "cuda" and not case.in_turn
    _free(device)
    try:
        candidates = dict(case.build(device))
        reference = _copied(candidates.pop(REFERENCE)()) if REFERENCE in candidates else None
    except Exception as e:  # whatever it is, the other cases go on
        result["candidates"]["all"] = {"failure": reason(e)}
        return result
    checked = {}
    for name in list(candidates):
        result["candidates"][name] = {"failure": UNFINISHED}
        save(result)
        checked[name], output = _attempt(case, name, candidates[name], device, reference, runs)
        reference = output if reference is None else reference
        if alone or "failure" in checked[name]:
            result["candidates"][name] = checked[name] | _shares(case, checked[name], ceilings)
            del candidates[name]
            if broken(device):
                result["candidates"] |= {rest: {"failure": f"not run: {name} left the device unusable"} for rest in candidates}
                return result
            _free(device)
    _time(case, candidates, checked, device, runs)
    result["candidates"] = {name: facts | _shares(case, facts, ceilings) for name, facts in checked.items()}
    return result


def blank(case: Case) -> dict[str, Any]:
    """The result of a case before any candidate."""
    dtype = case.dtype or ("float16" if this_device().type == "cuda" else "float32")
    facts = {"case": case.name, "group": case.group, "dtype": dtype, **case.facts}
    return {**facts, "flops": case.flops, "bytes": case.bytes, "candidates": {}}


def _attempt(
    case: Case, name: str, run: Callable[[], Any], device: torch.device, reference: list[Tensor] | None, runs: int
) -> tuple[dict[str, Any], list[Tensor] | None]:
    """What a candidate comes to, whatever it raises, and its first output; on a GPU with its timing, unless it takes turns."""
    try:
        facts, output = _check(case, name, run, device, reference)
        if device.type == "cuda" and not case.in_turn:
            _time(case, {name: run}, {name: facts}, device, runs)
    except Exception as e:  # a compiler's errors have no common base
        return {"failure": reason(e)}, None
    return facts, output


def reason(e: Exception) -> str:
    """The first line of an error."""
    return (str(e).splitlines() or [type(e).__name__])[0][:300]


def _check(
    case: Case, name: str, run: Callable[[], Any], device: torch.device, reference: list[Tensor] | None
) -> tuple[dict[str, Any], list[Tensor]]:
    """The largest error of a candidate's first outputs, with what it records of itself, and copies of them where they are
    the reference."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kernels.clear_fallbacks()
    outputs = run()
    if reference is None:
        error, outputs = 0.0, _copied(outputs)
    else:
        error, outputs = _largest_error(_tensors(outputs), reference), reference
    facts: dict[str, Any] = {"error": error if math.isfinite(error) else None, "tolerance": case.tolerance}
    facts |= run.record() if hasattr(run, "record") else {}
    if not error <= case.tolerance:
        facts["failure"] = f"error {error:.2e} above {case.tolerance}"
    return facts | (_kernels_used(device) if name.startswith(OURS) else {}), outputs


def _tensors(outputs: Any) -> list[Tensor]:
    return [x.detach() for x in tree_leaves(outputs) if isinstance(x, Tensor)]


def _copied(outputs: Any) -> list[Tensor]:
    """What a candidate returned, safe from its next run."""
    return [x.clone() for x in _tensors(outputs)]


def _kernels_used(device: torch.device) -> dict[str, Any]:
    """Which implementation served each op; a failure if any was another than `kernels.coverage` says."""
    fallen = "; ".join(f"op {op} fell back: {why}" for op, why in kernels.fallbacks().items())
    return {"coverage": kernels.coverage(device.type)} | ({"failure": fallen} if fallen else {})


def _time(case: Case, candidates: dict[str, Any], results: dict[str, dict[str, Any]], device: torch.device, runs: int) -> None:
    """Add timings to the results of the candidates that are right, where the case is timed."""
    right = {name: run for name, run in candidates.items() if case.timed and "failure" not in results[name]}
    how = dict(flush=case.flush, warmup=case.warmup, launches=case.launches)
    timings = measure_in_turn(list(right.values()), device, runs, **how) if right else []
    for (name, run), timing in zip(right.items(), timings):
        parts = {"parts": run.parts()} if hasattr(run, "parts") else {}
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        results[name] |= asdict(timing) | parts | {"peak_memory": peak}


def broken(device: torch.device) -> bool:
    """Has an error left the device unusable for this process? After an illegal access every later call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _free(device: torch.device) -> None:
    torch.compiler.reset()  # what was compiled keeps its network
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative 2-norm of a difference; NaN counts as infinitely wrong."""
    if [x.shape for x in actual] != [x.shape for x in expected]:
        raise ValueError(f"{[list(x.shape) for x in actual]} came out, not {[list(x.shape) for x in expected]}")
    errors = [_relative_error(*pair) for pair in zip(actual, expected)]
    return max((math.inf if math.isnan(e) else e for e in errors), default=0.0)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    return (torch.dist(actual, expected) / expected.norm().clamp_min(1e-30)).item()


def _shares(case: Case, facts: dict[str, Any], ceilings: dict[str, float]) -> dict[str, float]:
    """Rates, and what share they are of the product and the copy measured in the same run."""
    if "median" not in facts:
        return {}
    rates = {"TFLOP/s": case.flops / facts["median"] / 1e12, "GB/s": case.bytes / facts["median"] / 1e9}
    rates = {unit: rate for unit, rate in rates.items() if rate > 0}
    shares = {f"share of {unit}": rate / ceilings[unit] for unit, rate in rates.items() if ceilings.get(unit)}
    if case.images:
        rates["images/s"] = case.images / facts["median"]
        if case.group == "train" and (peak := peak_flops(this_device())):
            shares["MFU"] = case.flops / facts["median"] / peak
    return rates | shares


def _save(path: Path, head: dict[str, Any], result: dict[str, Any]) -> None:
    write(path, result | head)


def write(path: Path, result: dict[str, Any]) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")


def line(result: dict[str, Any]) -> str:
    """One line per case: each candidate's median and rate, or its error where nothing was timed."""
    parts = []
    for name, c in result["candidates"].items():
        units = ("TFLOP/s", "GB/s") if result["group"] == "kernels" else ("images/s", "GB/s")
        rate = next((f", {c[u]:.3g} {u}" for u in units if u in c), "")
        if "failure" in c:
            parts.append(f"{name}: {c['failure']}")
        else:
            parts.append(f"{name} {c['median'] * 1e3:.3f} ms{rate}" if "median" in c else f"{name} error {c['error']:.2e}")
    return f"{result['case']}  " + " | ".join(parts)
