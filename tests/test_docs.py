"""Code in the documentation runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(text, id=f"{path.stem}-{i}")
    for path in sorted((ROOT / "docs").glob("*.md"))
    for i, text in enumerate(re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("text", BLOCKS)
def test_python(text, tmp_path, one_thread_env):
    """By itself, in a folder of its own; figures in comments after a print are what it prints."""
    env = one_thread_env | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-W", "error", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    told, expected = (
        re.findall(r"\d\.\d+", words) for words in (result.stdout, "".join(re.findall(r"^print\(.*#(.*)$", text, re.MULTILINE)))
    )
    assert [f"{float(x):.3f}" for x in told] == expected


def test_there_are_some():
    assert BLOCKS
