"""Results of metrics: told as they come, and kept in a file with all that they depend on."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.measuring import Values
from edm2.references import Reference
from edm2.version import __version__


class Results:
    """The first process tells and writes them, the others nothing. The file is written again after each, so that none is lost.

    UserError if it cannot be written, at once if its folder cannot be made.
    """

    def __init__(self, out: Path | None, reference: Reference, procs: Processes):
        self.out, self.procs, self.runs, self.summaries = out, procs, [], []
        known = {"ref": Path(reference.name).name, "ref_sha256": reference.sha256}
        self.common = {**known, "device": procs.device.type, "version": __version__}
        self._values: dict[str, list[Values]] = {}
        if out is not None and procs.rank == 0:
            make_folder(out.parent)

    def add(self, name: str, facts: dict[str, Any], run: str, values: Values | None) -> None:
        """One measurement of what is called `name`. UserError for a value that is no number."""
        if values is None:
            return
        for metric, value in values.items():
            if not math.isfinite(value):
                raise UserError(f"{metric} of {name} is {value}")
        self._values.setdefault(name, []).append(values)
        self.runs.append({**facts, **self.common, "metrics": values})
        tqdm.write(f"{name}  {run}:  {tell(values)}")
        self._write()

    def summarise(self, name: str) -> None:
        """Minimum, mean and standard deviation of several measurements of what is called `name`."""
        found = self._values.get(name, [])
        if len(found) < 2:
            return
        of_metric = {metric: [values[metric] for values in found] for metric in found[0]}
        summary = {metric: {"min": min(x), "mean": statistics.mean(x), "std": statistics.stdev(x)} for metric, x in of_metric.items()}
        self.summaries.append({"name": name, "runs": len(found), "metrics": summary})
        for metric, x in summary.items():
            tqdm.write(f"{name}  {len(found)} runs:  {metric} min {x['min']:.4f}  mean {x['mean']:.4f}  std {x['std']:.4f}")
        self._write()

    def _write(self) -> None:
        if self.out is not None:
            with replacing(self.out) as temporary:
                temporary.write_text(json.dumps({"runs": self.runs, "summaries": self.summaries}, indent=1) + "\n")


def tell(values: Values) -> str:
    return "  ".join(f"{metric} {value:.4f}" for metric, value in values.items())
