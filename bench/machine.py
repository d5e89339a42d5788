"""On what a measurement was made."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Device, driver, clocks, power limit, versions and commit, for the head of every result."""
    facts = {"torch": torch.__version__, "triton": _triton_version(), "python": platform.python_version(), "commit": _commit()}
    if not torch.cuda.is_available():
        return {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), **facts}
    name = torch.cuda.get_device_name()
    query = ["driver_version", "clocks.max.sm", "clocks.sm", "clocks.mem", "power.limit", "temperature.gpu"]
    major, minor = torch.cuda.get_device_capability()
    facts["capability"] = 10 * major + minor
    return {"device": "cuda", "name": name, "cuda": torch.version.cuda, **dict(zip(query, _nvidia_smi(query))), **facts}


def slug() -> str:
    """The folder of this machine's results: `nvidia-h200`, `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    return "-".join(torch.cuda.get_device_name().lower().split()[:2])


def _nvidia_smi(query: list[str]) -> list[str]:
    index = torch.cuda.current_device()
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError):
        return ["unknown"] * len(query)


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        root = Path(__file__).parent.parent
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
