"""Command lines called in the test's own process, and a network for them; code in a process of its own."""

import subprocess
import sys
from pathlib import Path

import torch
from click.testing import CliRunner

import edm2

ROOT = Path(__file__).parent.parent


def call(command, *args):
    return CliRunner().invoke(command, [str(a) for a in args])


def refused(command, *args) -> str:
    """The one line with which a command line refuses; no traceback, exit code ≠ 0."""
    result = call(command, *args)
    assert result.exit_code != 0 and not isinstance(result.exception, Exception), result.output
    errors = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert len(errors) == 1 and result.output.rstrip().endswith(errors[0]), result.output
    return errors[0]


def small_net(label_dim: int) -> edm2.Precond:
    torch.manual_seed(label_dim)
    net = edm2.Precond(8, 3, label_dim, model_channels=8, channel_mult=(1,), num_blocks=1, channels_per_head=8)
    for name, p in net.named_parameters():
        if name.endswith("gain"):  # zeros: no label would count, and nothing come out
            torch.nn.init.ones_(p)
    return net


def python(code: str) -> str:
    """What a process of its own prints."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def without(*names: str) -> str:
    """Code that hides modules from what follows it."""
    return f"import sys\nsys.modules |= dict.fromkeys({names})\n"
