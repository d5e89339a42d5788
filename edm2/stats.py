"""What a run reports: a progress bar, status lines, and `stats.jsonl` with the official release's keys."""

import json
import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from edm2.backends import peak_flops
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.files import replacing

GiB = 2**30


class StatusLog:
    """Collects the loss between two status lines without synchronising the device; the first process writes.

    `elapsed` is the time in seconds that the run had taken before this process started, `flops` those of an image's forward
    and backward.
    """

    def __init__(self, outdir: Path, procs: Processes, nimg: int, duration: int, elapsed: float, flops: float):
        self.path, self.procs = outdir / "stats.jsonl", procs
        self.start = time.time() - elapsed
        peak = peak_flops(procs.device)
        self.share_of_peak = None if peak is None else flops / peak / procs.world_size
        self.tick_nimg, self.tick_time, self.maintenance = nimg, time.time(), 0.0
        self._sums = self._zeros()
        quiet = procs.rank > 0
        self.bar = tqdm(total=duration, initial=nimg, unit="img", unit_scale=True, disable=quiet or None)
        if not quiet:
            _drop_after(self.path, nimg / 1000)

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, earlier processes included."""
        return time.time() - self.start

    def step(self, loss: Tensor, nonfinite: Tensor, images: int) -> None:
        """Add a step: `loss` = sum over images of this process's mean per element, of a batch of `images`."""
        self._sums += torch.stack([loss.double(), nonfinite.double()])
        self.bar.update(images)

    def tick(self, nimg: int, lr: float, more: dict[str, Any]) -> dict[str, Any]:
        """Write a status line for the steps since the last one, with `more`, and return it. UserError if the loss is no longer
        finite."""
        loss, nonfinite = self.procs.sum(self._sums).tolist()
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} after {nimg} images: look for damaged data, or lower --lr")
        now, images = time.time(), nimg - self.tick_nimg
        rate = images / (now - self.tick_time - self.maintenance)
        stats = {
            "Progress/kimg": nimg / 1000,
            "Timing/total_sec": now - self.start,
            "Timing/sec_per_tick": now - self.tick_time,
            "Timing/sec_per_kimg": 1000 / rate,
            "Timing/maintenance_sec": self.maintenance,
            "Resources/cpu_mem_gb": psutil.Process().memory_info().rss / GiB,
            **_gpu_memory(self.procs.device),
            "Loss/loss": loss / images,
            "Loss/learning_rate": lr,
            "Loss/nonfinite_gradients": int(nonfinite) // self.procs.world_size,
            "Throughput/images_per_sec": rate,
            "Throughput/MFU": None if self.share_of_peak is None else rate * self.share_of_peak,
            **more,
            "timestamp": now,
        }
        self._sums, self.tick_nimg, self.tick_time, self.maintenance = self._zeros(), nimg, now, 0.0
        if self.procs.rank == 0:
            self._write(stats)
        return stats

    def pause(self, since: float) -> None:
        """Count the time since `since` (saving files) as maintenance."""
        self.maintenance += time.time() - since

    def close(self) -> None:
        self.bar.close()

    def _write(self, stats: dict[str, Any]) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(stats) + "\n")
        except OSError as e:
            raise UserError(f"cannot write {self.path}: {e.strerror or e}") from e
        nonfinite = stats["Loss/nonfinite_gradients"]
        self.bar.set_postfix_str(f"loss {stats['Loss/loss']:.4f}")
        tqdm.write(
            f"kimg {stats['Progress/kimg']:<10.1f} loss {stats['Loss/loss']:<8.4f} "
            f"lr {stats['Loss/learning_rate']:<9.6f} img/s {1000 / stats['Timing/sec_per_kimg']:<8.1f} "
            f"time {_clock(stats['Timing/total_sec'])} mem {stats['Resources/cpu_mem_gb']:.1f} GiB"
            + (f" gpu {stats['Resources/peak_gpu_mem_gb']:.1f} GiB" if self.procs.device.type == "cuda" else "")
            + (f" NON-FINITE GRADIENTS {nonfinite}" if nonfinite else "")
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.procs.device)


class NonfiniteGuard:
    """Stops a run after `limit` steps in a row with non-finite gradients; 0: never.

    It counts on the device, and makes the host wait for a look only every `limit` steps.
    """

    def __init__(self, limit: int, device: torch.device):
        self.limit, self.steps = limit, 0
        self._streak = torch.zeros([], dtype=torch.int64, device=device)

    def step(self, nonfinite: Tensor, nimg: int) -> None:
        """Add a step that ended after `nimg` images. UserError when a look finds that there were `limit` in a row."""
        if self.limit == 0:
            return
        self._streak = (self._streak + 1) * ((nonfinite > 0) | (self._streak >= self.limit))  # that many: kept
        self.steps += 1
        if self.steps % self.limit == 0 and self._streak >= self.limit:
            reason = f"of the steps up to image {nimg}, {self.limit} in a row had non-finite gradients"
            raise UserError(f"{reason}: look for damaged data, lower --lr or --ls, or raise --max-nonfinite")


def read_stats(run: str | Path) -> list[dict[str, Any]]:
    """The status lines of a run's folder, oldest first, without one that is cut off. UserError if there are none to read."""
    path = Path(run) / "stats.jsonl"
    try:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a process that was killed may have written half of a line
        stats = [json.loads(line) for line in whole.splitlines()]
        return [{key: value if isinstance(value, dict | None) else float(value) for key, value in line.items()} for line in stats]
    except (OSError, AttributeError, OverflowError, RecursionError, TypeError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e}); give the --outdir of a training run") from e


def _drop_after(path: Path, kimg: float) -> None:
    """Drop what an interrupted run reported after the state it resumes from: those steps are done again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(errors="replace").splitlines() if _kimg(line) <= kimg]
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines))


def _kimg(line: str) -> float:
    try:
        return float(json.loads(line)["Progress/kimg"])
    except (KeyError, TypeError, ValueError):  # cut off in the middle of a line, or damaged
        return float("inf")


def _gpu_memory(device: torch.device) -> dict[str, float]:
    peak = reserved = 0
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    return {"Resources/peak_gpu_mem_gb": peak / GiB, "Resources/peak_gpu_mem_reserved_gb": reserved / GiB}


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
