"""The documentation: its commands and its Python run, in order; what it mentions has the options that it shows."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import click
import pytest

import bench.__main__ as benchmarks
import sample
import train
from edm2 import download
from edm2.cli.main import main
from tests.command_lines import ROOT, call
from tests.documented import NOT_RUN, PAGES, Page, Step, changed, not_run, page_of, pages, shortened, steps

SECONDS = 60  # of CPU time, for a command
COMMANDS = {"train.py": train.main, "sample.py": sample.main, "edm2": main, "bench": benchmarks.main}
ADVICE = (
    "If it takes long, needs a network, a GPU or other data, or files that the page does not make, say in tests/documented.py how it "
    "is run: PAGES has what is changed in a page's commands, which of them get --dry-run, and files for it; NOT_RUN what is not run."
)


@pytest.fixture(scope="session")
def run(tmp_path_factory, digits_zip):
    """The folder of a training run on the digits, of a small network that can guide itself, as short as `edm2 calibrate` lets it be."""
    out = tmp_path_factory.mktemp("documented") / "run"
    options = ["--preset=digits", "--channels=16", "--label-dropout=0.1", "--P_std=2", "--duration=7680", "--status=1280"]
    options += ["--snapshot=2560", "--samples=0", "--checkpoint=0"]
    result = call(train.main, f"--outdir={out}", f"--data={digits_zip}", *options)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize("name", pages())
def test_page(name, tmp_path, run, monkeypatch, one_thread_env):
    """All of its steps, in one folder, one after the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(download, "TRIES", 1)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    page = page_of(name)
    page.files(tmp_path, run)
    for step in steps(pages()[name]):
        if step.kind == "python":
            run_python(changed(step.text, page.python), tmp_path, one_thread_env)
        elif not_run(step.text):
            print(f"not run: {step.text}: {NOT_RUN[not_run(step.text)]}")
        else:
            run_command(name, shortened(page, step.text), one_thread_env)


def no_network(*_):
    raise OSError("tests have no network")


def run_python(text: str, folder: Path, env: dict[str, str]) -> None:
    """By itself; figures in comments after a print are what it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=folder, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    told, expected = (
        re.findall(r"\d\.\d+", words) for words in (result.stdout, "".join(re.findall(r"^print\(.*#(.*)$", text, re.MULTILINE)))
    )
    assert "print(" not in text or [f"{float(x):.3f}" for x in told] == expected


def run_command(name: str, words: list[str], env: dict[str, str]) -> None:
    """In this process, with PyTorch in it already; what torchrun starts in two others."""
    launched, words = split_launcher(words)
    if launched and "--dry-run" not in words:
        program = ["-m", "--", "edm2"] if words[0] == "edm2" else [str(ROOT / words[0])]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *program, *words[1:]]
        result = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=10 * SECONDS)
        code, said = result.returncode, result.stdout + result.stderr
    else:
        assert words[0] in COMMANDS, f"{name}: nobody knows how to run `{shlex.join(words)}`. {ADVICE}"
        with limited():
            result = call(COMMANDS[words[0]], *words[1:])
        code, said = result.exit_code, f"{result.output}{result.exception or ''}"
    assert code == 0, f"{name}: `{shlex.join(words)}` failed:\n{said}\n{ADVICE}"


def split_launcher(words: list[str]) -> tuple[bool, list[str]]:
    """Is it started by torchrun, and the words from the script's or the module's name on."""
    words = words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]  # of the environment
    at = next((i for i, word in enumerate(words) if word in COMMANDS), 0)
    return words[0] == "torchrun", words[at:]


@contextmanager
def limited() -> Iterator[None]:
    """TimeoutError within, after so many seconds of CPU time; and again, should what runs then not end by it."""

    def late(*_):
        raise TimeoutError(f"it takes longer than {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_tables_are_exhaustive():
    """Whatever is said there of pages and commands is of some that there are."""
    commands = {name: [step.text for step in steps(path) if step.kind == "sh"] for name, path in pages().items()}
    everything = [command for found in commands.values() for command in found]
    assert PAGES.keys() <= commands.keys()
    for pattern in NOT_RUN:
        assert any(not_run(command) == pattern for command in everything), f"NOT_RUN: no command is `{pattern}`"
    for name, page in PAGES.items():
        found = [command for command in commands[name] if not not_run(command)]
        for old, _ in page.changes:
            assert any(old in command for command in found), f"PAGES: {name} has no command with `{old}`"
        for part in page.dry:
            assert any(part in command for command in found), f"PAGES: {name} has no command with `{part}`"
        blocks = [step.text for step in steps(pages()[name]) if step.kind == "python"]
        for old, _ in page.python:
            assert any(old in block for block in blocks), f"PAGES: {name} has no Python with `{old}`"


def test_what_fails_says_what_to_add(tmp_path, monkeypatch, one_thread_env):
    """A page that is new, and has a command that cannot run here."""
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(download, "TRIES", 1)
    address = "https://example.com/a.pkl"
    for command, words in (
        ("python -m edm2 info none", "none does not exist"),
        ("nvidia-smi", "nobody knows how to run `nvidia-smi`"),
        (f"python sample.py --net={address} --outdir={tmp_path} --networks={tmp_path}", "tests have no network"),
        ("python train.py --outdir=x", "Missing option '--data'"),
        (f"OMP_NUM_THREADS=2 python sample.py --net=none --outdir={tmp_path}", "none does not exist"),
    ):
        with pytest.raises(AssertionError, match="(?s)new: .*say in tests/documented.py how it") as caught:
            run_command("new", shortened(Page(), command), one_thread_env)
        assert words in str(caught.value), command


def test_a_command_has_its_time(monkeypatch, one_thread_env):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.2)

    start = time.process_time()

    @click.command()
    @click.option("--deaf", is_flag=True)
    def long(deaf):
        with suppress(TimeoutError) if deaf else nullcontext():
            busy(start + 10)
        busy(start + 10)

    monkeypatch.setitem(COMMANDS, "sample.py", long)
    for options in [], ["--deaf"]:
        with pytest.raises(AssertionError, match="(?s)it takes longer than 0.2 s of CPU time.*PAGES"):
            run_command("new", ["sample.py", *options], one_thread_env)
    assert time.process_time() - start < 5


def busy(until: float) -> None:
    while time.process_time() < until:
        pass


def test_steps(tmp_path):
    (tmp_path / "page.md").write_text("```sh\na --b \\\n    c   # d\n\n#SBATCH e\n```\ntext\n```python\nf\n```\n```text\ng\n```\n")
    assert list(steps(tmp_path / "page.md")) == [Step("sh", "a --b c"), Step("sh", "#SBATCH e"), Step("python", "f\n")]
    page = Page(changes=(("--b", "--h=1 --b"),), dry=("c",))
    assert shortened(page, "a --b c") == ["a", "--h=1", "--b", "c", "--dry-run"] and shortened(page, "a 'x y'") == ["a", "x y"]


def test_links():
    """Lead to files of the repository, and to headings that are there."""
    for path in pages().values():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
            name, _, heading = target.partition("#")
            if re.match(r"https?:", target):
                continue
            file = path.parent / name if name else path
            assert file.exists(), f"{path.name}: {target}"
            assert not heading or heading in headings(file), f"{path.name}: {target}"


def headings(path: Path) -> set[str]:
    """As links name them."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_figures():
    """Those of bench/results that pages show."""
    text = pages()["sampling"].read_text()
    one, whole = (json.loads((ROOT / f"bench/results/cpu/sample_digits_n100{name}.json").read_text()) for name in ("", "_decoded"))
    for title, name in (("plain PyTorch", "eager"), ("this project", "edm2 batch-invariant"), ("this project, `--fast`", "edm2")):
        times = [1e3 * found["candidates"][name]["median"] for found in (one, whole)]
        assert f"| {title} | {times[0]:.1f} ms | {float(f'{times[1]:.3g}'):,.0f} ms |" in text
    ledger = {(entry["candidate"], entry["phase"]): entry for entry in json.loads((ROOT / "bench/results/ledger.json").read_text())}
    table = [line for line in pages()["kernels"].read_text().splitlines() if re.match(r"\| .* \| [\d,]+ \| [\d.]+ \|", line)]
    classes = ["pointwise"], ["convolution"], ["copy", "reduction"], ["attention", "matrix product"], ["optimizer"], None
    for line, names in zip(table, classes, strict=True):
        cells = []
        for candidate in ("eager", "this project"):
            entry = ledger[candidate, "train"]
            parts = [entry["total"]] if names is None else [entry["classes"][name] for name in names]
            cells += [f"{sum(part['launches'] for part in parts):,}", f"{sum(part['bytes'] for part in parts) / 1e9:.1f}"]
        assert line.split(" | ", 1)[1] == " | ".join(cells) + " |"
    evaluations = [ledger[candidate, "eval"]["total"] for candidate in ("this project", "eager")]
    for total in evaluations:
        words = f"{total['launches']:,}", f"{total['bytes'] / 1e9:.1f} GB"
        assert all(word in text for word in words)


def test_launchers():
    found = split_launcher("A=1 torchrun --standalone --nproc_per_node=8 train.py --outdir=sample.py".split())
    assert found == (True, ["train.py", "--outdir=sample.py"])
    assert split_launcher(["python", "-m", "edm2", "info", "A=1"]) == (False, ["edm2", "info", "A=1"])
    assert split_launcher(["ls", "-l"]) == (False, ["ls", "-l"])


NAMED = re.compile(r"(?<![\w.])(train\.py|sample\.py|-m edm2|-m bench) ")


def mentions() -> list[str]:
    """In the text, which need not be whole."""
    texts = [path.read_text() for path in pages().values()]
    return [words for text in texts for words in re.findall(r"`([^`\n]+)`", text) if NAMED.search(words + " ") and "…" not in words]


def parsed(line: str) -> tuple[click.Command, list[str]]:
    words = split_launcher(shlex.split(line, comments=True))[1]
    command, words = COMMANDS[words[0]], words[1:]
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", [step.text for path in pages().values() for step in steps(path) if "-m bench" in step.text])
def test_benchmarks(line):
    """The command line takes them."""
    command, words = parsed(line)
    command.make_context("command", words)


@pytest.mark.parametrize("line", mentions())
def test_options(line):
    command, words = parsed(line)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known
    assert command not in (main, benchmarks.main) and not (isinstance(command, click.Group) and words and not words[0].startswith("-"))


def test_there_are_some():
    found = [step for path in pages().values() for step in steps(path)]
    kinds = [step.kind for step in found if step.kind == "python" or not not_run(step.text)]
    assert kinds.count("sh") > 20 and kinds.count("python") > 1 and len(mentions()) > 10
