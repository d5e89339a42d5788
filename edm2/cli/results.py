"""Results of metrics: told as they come, and kept in a file with all that they depend on."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from edm2.distributed import Processes, is_first
from edm2.errors import UserError
from edm2.files import check_writable, locked, replacing
from edm2.measuring import Values
from edm2.metrics import FrechetDistance
from edm2.references import Reference
from edm2.version import __version__

OF_METRICS = "features", "ref_features", "metrics"  # what a run tells by metric
OF_RUNS = "seed", "seeds"  # in which the runs of a summary differ


class Results:
    """Of these measures. The first process tells and writes them, the others nothing. What the file holds stays, and what other commands
    add to it meanwhile; it is written again after each, so that none is lost and a command that was interrupted goes on where it was.

    UserError if it cannot be written, or is a file of other things: at once.
    """

    def __init__(self, out: Path | None, reference: Reference, measures: Sequence[FrechetDistance], procs: Processes):
        self.out, self.measures, self.procs = out, list(measures), procs
        known = {"ref": Path(reference.name).name, "ref_sha256": reference.sha256}
        self.common = {**known, "device": procs.device.type, "version": __version__}
        self.checksums = {each.name: [each.facts.get("features", ""), reference.checksum(each.name)] for each in measures}
        self._values: dict[str, list[Values]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self.runs, self.summaries = procs.first(lambda: _read(out)) or ([], [])

    def measure(self, name: str, facts: dict[str, Any], run: str, measure: Callable[..., Values | None]) -> None:
        """One measurement of what is called `name`, by `measure(measures=…)`; of values that the file has with equal facts none is made
        again. UserError for a value that is no number."""
        facts = json.loads(json.dumps({**facts, **self.common}))
        known = self.procs.share(self.procs.first(lambda: self._known(facts)))
        todo = [each for each in self.measures if each.name not in known]
        made = measure(measures=todo) if todo else {}
        self.procs.first(lambda: self._add(name, facts, run, known, made))

    def _known(self, facts: dict[str, Any]) -> Values:
        found: Values = {}
        for run in self.runs:
            if _without(run, OF_METRICS) == facts:
                found |= {metric: value for metric, value in run["metrics"].items() if self._of_metrics([metric]) == _of(run, metric)}
        return found

    def _of_metrics(self, metrics: Sequence[str]) -> dict[str, Any] | None:
        """Checksums of what made the features, here and those of the reference."""
        if not set(metrics) <= self.checksums.keys():
            return None
        return {name: {metric: self.checksums[metric][i] for metric in metrics} for i, name in enumerate(OF_METRICS[:2])}

    def _add(self, name: str, facts: dict[str, Any], run: str, known: Values, made: Values) -> None:
        for metric, value in made.items():
            if not math.isfinite(value):
                raise UserError(f"{metric} of {name} is {value}")
        both = known | made
        self._values.setdefault(name, []).append({each.name: both[each.name] for each in self.measures})
        self._facts[name] = _without(facts, OF_RUNS)
        if known:
            tqdm.write(f"{name}  {run}:  {tell(known)}  (in {self.out} already)")
        if made:
            with self._changed():
                self.runs.append({**facts, **self._of_metrics(list(made)), "metrics": made})
            tqdm.write(f"{name}  {run}:  {tell(made)}")

    def summarise(self, name: str) -> None:
        """Minimum, mean and standard deviation of several measurements of what is called `name`."""
        self.procs.first(lambda: self._summarise(name, self._values.get(name, [])))

    def _summarise(self, name: str, found: list[Values]) -> None:
        if len(found) < 2:
            return
        of_metric = {metric: [values[metric] for values in found] for metric in found[0]}
        summary = {metric: {"min": min(x), "mean": statistics.mean(x), "std": statistics.stdev(x)} for metric, x in of_metric.items()}
        facts = {"name": name, **self._facts[name], **self._of_metrics(list(summary))}
        with self._changed():
            self.summaries = [each for each in self.summaries if _without(each, ("runs", "metrics")) != facts]
            self.summaries.append({**facts, "runs": len(found), "metrics": summary})
        for metric, x in summary.items():
            tqdm.write(f"{name}  {len(found)} runs:  {metric} min {x['min']:.4f}  mean {x['mean']:.4f}  std {x['std']:.4f}")

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Runs and summaries, on disk as well, from what is there by now."""
        if self.out is None:
            yield
            return
        with locked(self.out.parent):
            self.runs, self.summaries = _read(self.out) or ([], [])
            yield
            with replacing(self.out) as temporary:
                temporary.write_text(json.dumps({"runs": self.runs, "summaries": self.summaries}, indent=1) + "\n")


def _without(facts: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}


def _of(run: dict[str, Any], metric: str) -> dict[str, Any]:
    """What it tells of a metric's features; runs of before told nothing."""
    return {name: {metric: run[name].get(metric)} for name in OF_METRICS[:2] if isinstance(run.get(name), dict)}


def _read(out: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """Runs and summaries of before."""
    if out is None:
        return None
    check_writable(out)
    if not out.exists():
        return None
    try:
        found = json.loads(out.read_text())
        runs, summaries = found["runs"], found["summaries"]
        if not all(isinstance(each, dict) for each in runs + summaries):
            raise TypeError("neither runs nor summaries")
        if not all(math.isfinite(value) for run in runs for value in run["metrics"].values()):
            raise ValueError("a value that is no number")
        return runs, summaries
    except OSError as e:
        raise UserError(f"cannot read {out}: {e.strerror or e}") from e
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
        raise UserError(f"{out} is there, and holds no results of metrics: give --json another name") from e


def note_programs(reference: Reference | None, measures: Sequence[FrechetDistance]) -> None:
    """Of features of the user's own, where their file is another than that which made the reference; the first process tells."""
    for each in measures if reference is not None and is_first() else ():
        made, here = reference.checksum(each.name), each.facts.get("features", "")
        if ":" in each.name and made and here and made != here:
            click.echo(f"Note: the program of {each.name} has changed since {reference.name} was made: {made} then, {here} now")


def tell(values: Values) -> str:
    return "  ".join(f"{metric} {value:.4f}" for metric, value in values.items())
