"""Code in the documentation runs as it stands, and commands have the options that they show."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import sample
import train
from edm2.cli.main import main

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


def documents() -> Iterator[str]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield path.read_text()


NAMED = re.compile(r"(?<![\w.])(train\.py|sample\.py|-m edm2) ")


def commands() -> list[str]:
    """Lines of shell blocks, but those for a cluster."""
    blocks = "\n".join(block for text in documents() for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return [line for line in blocks.replace("\\\n", " ").splitlines() if NAMED.search(line) and "…" not in line.split("#")[0]]


def mentions() -> list[str]:
    """In the text, which need not be whole."""
    return [words for text in documents() for words in re.findall(r"`([^`\n]+)`", text) if NAMED.search(words + " ") and "…" not in words]


def parsed(line: str) -> tuple[click.Command, list[str]]:
    words = shlex.split(line, comments=True)
    at = next(i for i, word in enumerate(words) if word in ("train.py", "sample.py", "edm2"))
    command: click.Command = {"train.py": train.main, "sample.py": sample.main, "edm2": main}[words[at]]
    words = words[at + 1 :]
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", commands())
def test_commands(line):
    """The command line takes them; they are not run."""
    command, words = parsed(line)
    command.make_context("command", words)


@pytest.mark.parametrize("line", mentions())
def test_options(line):
    command, words = parsed(line)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known
    assert command is not main and not (isinstance(command, click.Group) and words and not words[0].startswith("-"))


def test_there_are_some_commands():
    assert len(commands()) > 20 and len(mentions()) > 10
