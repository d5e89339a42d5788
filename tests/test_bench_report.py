"""README, docs and plots hold the figures of bench/results, all of them and no others."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from bench.__main__ import main
from bench.plots import plan
from bench.report import BEGIN, END, differences, load, update
from edm2.errors import UserError

ROOT = Path(__file__).parent.parent
CEILINGS = {"TFLOP/s": 700.0, "GB/s": 4000.0}


def measured(seconds: float, **facts) -> dict:
    return {"error": 0.0, "tolerance": 0.02, "median": seconds, "low": seconds * 0.98, "high": seconds * 1.03, "runs": 20, **facts}


def case(name: str, candidates: dict, flops: float = 0.0, bytes: float = 0.0, **facts) -> dict:
    """As `bench.runner` writes it, for an NVIDIA H200."""
    machine = {"device": "cuda", "name": "NVIDIA H200", "driver_version": "570.1", "torch": "2.13.0", "triton": "3.6.0", "commit": "abc"}
    for candidate in candidates.values():
        for unit, amount in (("TFLOP/s", flops / 1e12), ("GB/s", bytes / 1e9)):
            if amount and "median" in candidate:
                rate = amount / candidate["median"]
                candidate |= {unit: rate, f"share of {unit}": rate / CEILINGS[unit]}
        if "batch" in facts and "median" in candidate:
            candidate["images/s"] = facts["batch"] / candidate["median"]
    head = {"case": name, "group": name.split("/")[0], **facts, "flops": flops, "bytes": bytes}
    return head | {"candidates": candidates, "machine": machine, "ceilings": CEILINGS}


def train(size: str, batch: int, times: dict[str, float | None], mode: str | None = None) -> dict:
    """Milliseconds of each candidate, None for one that ran out of memory."""
    candidates = {}
    for name, ms in times.items():
        shares = {"data": 0.02, "forward": 0.3, "backward": 0.58, "optimizer": 0.1}
        parts = {phase: share * ms / 1e3 for phase, share in shares.items()} if ms else {}
        oom = {"error": 0.0, "tolerance": 0.02, "failure": "CUDA out of memory. Tried to allocate 2.00 GiB | GPU 0 has 139 GiB."}
        candidates[name] = measured(ms / 1e3, parts=parts, peak_memory=30 * 2**30, MFU=0.2) if ms else oom
    preset = f"edm2-img512-{size}"
    name = "/".join(["train", preset, f"n{batch}", *([mode] if mode else [])])
    return case(name, candidates, flops=1e14, preset=preset, batch=batch, **({"mode": mode} if mode else {}))


def kernels() -> list[dict]:
    """Some hundred, as many as one run measures; one fails."""
    found = [case("kernels/copy", {"copy": measured(5e-4)}, bytes=2e9)]
    found.append(case("kernels/gemm/square", {"cuBLAS": measured(1.6e-3)}, 1.1e12, 4e8))
    for n in (256, 8):
        for res, c in ((64, 192), (32, 384), (16, 576), (8, 768)):
            for k in (3, 1):
                shape, flops, traffic = f"n{n}-{res}x{res}-{c}-{c}", 2.0 * n * res**2 * c * c * k * k, 4.0 * (n * res**2 * c)
                least = flops / min(700e12, flops / traffic * 4e12)  # seconds at the roof
                for i, kind in enumerate(("forward", "dgrad", "wgrad")):
                    times = {"cuDNN": measured(least / (0.8 - 0.2 * i)), "edm2": measured(least / (0.25 + 0.01 * res + n / 5120))}
                    found.append(case(f"kernels/conv{k}x{k}/{kind}/{shape}", times, flops, traffic))
                found.append(case(f"kernels/gemm/as-conv{k}x{k}/{shape}", {"cuBLAS": measured(flops / 650e12)}, flops, traffic))
    for backward, name in enumerate(("forward", "backward")):
        times = {"eager": measured(3e-3), "compile": measured(1e-3), "edm2": measured(4e-4 * (1 + backward))}
        found.append(case(f"kernels/cosine_attention/{name}/n256-256x9", times, 4e10, 3e8))
        times = {"eager": measured(2e-3), "compile": measured(9e-4), "edm2": measured(8e-4)}
        found += [case(f"kernels/cat_silu/{name}/n256-{shape}", times, 0.0, 2.4e9) for shape in ("64x64-384-192", "32x32-384-384")]
    found.append(case("kernels/attention/n256-256x9", {"SDPA": measured(1e-3)}, 2e11, 3e8))
    return [*found, case("kernels/attention/n8-64x12", {"SDPA": {"failure": "no kernel | image"}}, 1e9, 1e7)]


def all_results() -> list[dict]:
    names = "eager", "eager channels-last", "compile", "edm2"
    times = {"xs": (500, 400, 300, 250), "s": (1000, 800, 650, 500), "m": (None, 1500, 1300, 900), "xl": (4000, 3500, None, 2100)}
    training = [train(size, 256, dict(zip(names, own))) for size, own in times.items()]
    training += [train("s", 64, dict(zip(names, (260, 220, 180, 130)))), train("m", 64, dict(zip(names, (500, 420, 350, 240))))]
    training += [train("s", 256, {"eager channels-last": 810, "compile max-autotune": 600}, "max-autotune")]
    size = {"preset": "edm2-img512-s", "batch": 8}
    others = [
        case("sample/edm2-img512-s/n8", {"eager": measured(0.04), "edm2": measured(0.016)}, 1e12, **size),
        case("block/edm2-img512-s/64x64/n8", {"eager": measured(0.01), "edm2": measured(0.005)}, **size),
        case("optimizer/edm2-img512-s", {"eager": measured(0.02), "edm2": measured(0.005)}, bytes=1.3e10, preset="edm2-img512-s"),
    ]
    return training + others + kernels()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    return tmp_path


def store(root: Path, cases: list[dict], machine: str = "nvidia-h200") -> Path:
    folder = root / "bench" / "results" / machine
    folder.mkdir(exist_ok=True)
    for result in cases:
        (folder / f"{result['case'].replace('/', '_')}.json").write_text(json.dumps(result))
    return folder


def pictures(root: Path) -> set[str]:
    return {path.stem for path in (root / "docs" / "bench").rglob("*.png")}


def test_readme_and_docs_hold_the_measured_figures():
    assert differences(ROOT) == ""


def test_nothing_measured(root):
    update(root)
    text = (root / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "No GPU results exist yet: EDM2-S training, and all else on a GPU, is unmeasured" in text
    assert pictures(root) == set()


class TestTables:
    @pytest.fixture
    def lines(self, root, monkeypatch):
        monkeypatch.setattr("bench.plots.draw", lambda planned, folder: None)  # seconds
        store(root, all_results())
        update(root)
        return (root / "README.md").read_text().splitlines()

    def test_the_answer_comes_first(self, lines):
        answer = "512 images/s; 2.00× eager (256), 1.20× compile max-autotune (427); each at its best batch."
        assert lines[lines.index(BEGIN) + 1] == f"**EDM2-S training on nvidia-h200: {answer}**"

    def test_rows(self, lines):
        """Rates, spread, failures in one cell; modes of torch.compile in the row of their batch."""
        heading = "| case | eager | eager channels-last | compile | compile max-autotune | edm2 |"
        start = lines.index(heading) + 2
        rows = [line.split(" | ") for line in lines[start : start + 6]]
        assert [row[0] for row in rows] == [f"| edm2-img512-{x}" for x in ("xs/n256", "s/n64", "s/n256", "m/n64", "m/n256", "xl/n256")]
        assert rows[2][1] == "256 images/s, 1,000 ms (980–1,030), 20.0% MFU"
        assert rows[2][2].startswith("320 images/s") and rows[2][4] == "427 images/s, 600 ms (588–618), 20.0% MFU, 1.67×"
        assert rows[4][1] == "failed: out of memory" and rows[4][4] == "unmeasured"
        assert "| edm2-img512-s | 650 GB/s, 20 ms (19.6–20.6) | 2,600 GB/s, 5 ms (4.9–5.15), 4.00× |" in lines
        assert "| edm2-img512-s/n8 | 200 images/s, 40 ms (39.2–41.2) | 500 images/s, 16 ms (15.7–16.5), 2.50× |" in lines

    def test_kernels_in_a_row_per_op(self, lines):
        rows = [line for line in lines if line.startswith(("| conv", "| gemm", "| attention", "| copy"))]
        assert len(rows) == 6 * 2 + 2 + 1 + 1 + 1
        assert "| copy | copy | 1 | 4,000 GB/s (100%) | 4,000 GB/s (100%) | 100% |  |" in rows
        assert next(row for row in rows if "attention" in row).startswith("| attention | SDPA | 1 of 2 | n256-256x9: 200 TFLOP/s (29%) |")

    def test_a_ceiling_is_that_which_is_nearer(self, lines):
        """A 1×1 convolution of few channels is bound by memory."""
        (row,) = (line for line in lines if line.startswith("| conv1x1/forward | edm2 |"))
        assert row == "| conv1x1/forward | edm2 | 8 | n256-64x64-192-192: 3,760 GB/s (94%) | n8-8x8-768-768: 232 TFLOP/s (33%) | 52% |  |"

    def test_kernels_against_compile(self, lines):
        """At the shape where that is least and most; shapes without a product by their share of the copy."""
        (row,) = (line for line in lines if line.startswith("| cosine_attention/backward | edm2 |"))
        assert row.endswith("| 1.25–1.25 |")
        (row,) = (line for line in lines if line.startswith("| cat_silu/forward | edm2 | 2 |"))
        assert "3,000 GB/s (75%)" in row and row.endswith("| 75% | 1.12–1.12 |")

    def test_what_is_missing_is_named(self, root, lines):
        (line,) = (line for line in lines if line.startswith("Unmeasured here"))
        missing = [f"img512-{size}" for size in ("xxs", "l", "xxl")] + [f"img64-{size}" for size in ("xs", "s", "m", "l", "xl")]
        assert line == f"Unmeasured here: {'; '.join(f'training edm2-{name}' for name in missing)}."
        store(root, [train("s", 64, {"edm2": None})], "nvidia-h100")
        update(root)
        text = (root / "README.md").read_text()
        assert "on nvidia-h100: failed; eager unmeasured, compile unmeasured;" in text
        assert "Unmeasured here: evaluations of the network; the optimizer's step alone;" in text

    def test_the_full_page_has_every_candidate(self, root, lines):
        text = (root / "docs" / "bench" / "nvidia-h200.md").read_text()
        assert sum(line.startswith("| ") for line in text.splitlines()) == sum(len(c["candidates"]) for c in all_results()) + 5
        assert r"| kernels/attention/n8-64x12 | SDPA | failed: no kernel \| image |" in text
        row = "| train/edm2-img512-s/n64 | edm2 | 130 (127–134) | 492 images/s, 769 TFLOP/s (110%) | 20.0%"
        assert f"{row} | data 2.6, forward 39, backward 75.4, optimizer 13 | 30.00 | 0.0e+00 |" in text

    def test_traced_is_no_baseline(self, root):
        store(root, [train("s", 64, {"eager": 200, "traced, not compiled": 100, "edm2": 150})])
        update(root)
        assert "traced" not in (root / "README.md").read_text() + (root / "docs" / "bench" / "nvidia-h200.md").read_text()


class TestPlots:
    def test_what_is_shown(self, root):
        """Best batches; of each preset the phases at the batch that most candidates managed; kernels by op."""
        store(root, all_results())
        (machine,) = load(root / "bench" / "results")
        shown = plan(machine.merged)
        assert shown["speedup"]["img512-s"]["edm2"] == pytest.approx(2) and shown["speedup"]["img512-m"]["edm2"] == pytest.approx(20 / 9)
        assert "compile" not in shown["speedup"]["img512-xl"]
        panels = shown["steps"]
        assert list(panels) == [f"edm2-img512-{x}" for x in ("xs, batch 256", "s, batch 256", "m, batch 64", "xl, batch 256")]
        assert list(panels["edm2-img512-s, batch 256"])[2:] == ["compile", "compile max-autotune", "edm2"]
        assert panels["edm2-img512-s, batch 256"]["edm2"] == pytest.approx({"data": 10, "forward": 150, "backward": 290, "optimizer": 50})
        assert shown["roofline"]["roof"] == CEILINGS and len(shown["roofline"]["points"]) == 16 * 7 + 2 + 2 * 3
        streams = shown["roofline"]["streams"]
        assert len(streams) == 2 * 2 * 3 and ("cat_silu/forward", "edm2", pytest.approx(3000)) in streams
        assert ("gemm", "cuBLAS", 2750, pytest.approx(687.5)) in shown["roofline"]["points"]

    def test_drawn_and_shown(self, root):
        store(root, all_results())
        update(root)
        assert pictures(root) == {"speedup", "roofline", "steps"}
        for path in (root / "docs" / "bench" / "nvidia-h200").iterdir():
            with Image.open(path) as image:
                assert min(image.size) > 300 and len(image.convert("RGB").getcolors(2**24)) > 50
            assert f"(docs/bench/nvidia-h200/{path.name})" in (root / "README.md").read_text()
            assert f"(nvidia-h200/{path.name})" in (root / "docs" / "bench" / "nvidia-h200.md").read_text()

    @pytest.mark.parametrize(
        ("groups", "expected"), [({"train"}, {"speedup", "steps"}), ({"kernels"}, {"roofline"}), ({"sample", "optimizer", "block"}, set())]
    )
    def test_only_what_was_measured(self, root, groups, expected):
        store(root, [result for result in all_results() if result["group"] in groups])
        update(root)
        assert pictures(root) == expected
        assert (root / "README.md").read_text().count("![") == len(expected)

    def test_no_roof_no_roofline(self, root):
        store(root, [result | {"ceilings": {}} for result in kernels()])
        update(root)
        assert pictures(root) == set()

    def test_leftovers_are_removed(self, root):
        folder = store(root, all_results())
        store(root, kernels(), "nvidia-h100")
        update(root)
        for path in (*folder.glob("kernels_*"), *(root / "bench" / "results" / "nvidia-h100").iterdir()):
            path.unlink()
        assert "docs/bench/nvidia-h100.md: outdated" in differences(root)
        update(root)
        assert {path.name for path in (root / "docs" / "bench").rglob("*.*")} == {"nvidia-h200.md", "speedup.png", "steps.png"}
        assert "roofline" not in (root / "README.md").read_text()

    def test_without_matplotlib(self, root, monkeypatch):
        """The tables are written, and no picture shows figures of another day."""
        store(root, all_results())
        update(root)
        store(root, [train("s", 256, {"eager": 1000, "edm2": 400})])
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(UserError, match=r"pip install -e \.\[plot\]"):
            update(root)
        text = (root / "README.md").read_text()
        assert "640 images/s" in text and pictures(root) == {"roofline"} and text.count("![") == 1


class TestCheck:
    @pytest.fixture
    def check(self, root, monkeypatch):
        monkeypatch.setattr("bench.__main__.RESULTS", store(root, all_results()).parent)
        assert CliRunner().invoke(main, ["report"]).exit_code == 0
        return lambda: CliRunner().invoke(main, ["report", "--check"])

    def test_agreement(self, check):
        result = check()
        assert (result.exit_code, result.output) == (0, "")

    @pytest.mark.parametrize("path", ["README.md", "docs/bench/nvidia-h200.md"])
    def test_a_figure_that_no_file_holds(self, root, check, path):
        text = (root / path).read_text()
        (root / path).write_text(text.replace("492 images/s", "592 images/s"))
        result = check()
        assert result.exit_code == 1 and "python -m bench report" in result.output
        assert f"+++ {path}" in result.output and "592 images/s" in result.output
        assert "592 images/s" in (root / path).read_text()  # it only looks

    def test_new_results(self, root, check):
        store(root, [train("s", 64, {"eager": 260, "edm2": 120})])
        result = check()
        assert result.exit_code == 1
        assert "speedup.png: outdated" in result.output and "steps.png: outdated" not in result.output  # of batch 256

    def test_missing_plot(self, root, check):
        (root / "docs" / "bench" / "nvidia-h200" / "roofline.png").unlink()
        assert "docs/bench/nvidia-h200/roofline.png: missing" in check().output


def test_errors(root):
    (store(root, kernels()) / "half.json").write_text('{"case": "train/')
    with pytest.raises(UserError, match="half.json is not a result"):
        update(root)
    (root / "README.md").write_text("no marks")
    (root / "bench" / "results" / "nvidia-h200" / "half.json").unlink()
    with pytest.raises(UserError, match="no place for the tables"):
        update(root)
