"""Imports go down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up: a module may import those before it.
EDM2 = """version errors files backends image_files data latents network weights loss presets phema optimizer sampler summary config
distributed stats snapshot checkpoint training generate""".split()


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def project_imports(path: Path) -> set[str]:
    own = ("kernels", "edm2", "bench", "tests", "train", "sample")
    return {name for name in imports(path) if name.split(".")[0] in own}


def test_kernels_know_nothing_above_them():
    for path in (ROOT / "kernels").rglob("*.py"):
        assert all(name.split(".")[0] == "kernels" for name in project_imports(path)), path


def test_every_module_is_ranked():
    found = {path.stem for path in (ROOT / "edm2").glob("*.py")} - {"__init__", "__main__"}
    assert found == set(EDM2)


@pytest.mark.parametrize("module", EDM2)
def test_edm2_imports_downwards(module):
    below = EDM2[: EDM2.index(module)]
    for name in project_imports(ROOT / "edm2" / f"{module}.py"):
        top, _, rest = name.partition(".")
        assert top == "kernels" or (top == "edm2" and (not rest or rest.split(".")[0] in below)), name


def test_nothing_imports_bench_or_tests():
    files = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "edm2").rglob("*.py"), ROOT / "train.py", ROOT / "sample.py"]
    for path in files:
        assert not any(name.split(".")[0] in ("bench", "tests", "train", "sample") for name in project_imports(path)), path


def test_everything_imports_without_triton_and_the_extras():
    code = (
        "import sys\n"
        "for name in ('triton', 'sklearn', 'matplotlib'): sys.modules[name] = None\n"
        "import edm2, kernels, train, sample, edm2.cli.main\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
