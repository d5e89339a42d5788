"""The digits run of `make demo`, whole: minutes. `make torture`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.torture
def test_digits_are_recognised(tmp_path, digits_zip):
    """At least 97 % of 500 samples with fixed seeds are taken for the class that was asked for."""

    def run(*args):
        return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    run("train.py", f"--outdir={tmp_path}", f"--data={digits_zip}", "--preset=digits")
    net = tmp_path / "network-snapshot-0000115.200-0.100.safetensors"
    line = run("-m", "edm2", "metrics", "recognise", f"--net={net}", f"--data={digits_zip}")
    assert float(line.split("%")[0].split()[-1]) >= 97
