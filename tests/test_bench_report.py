"""README, docs and plots hold the figures of bench/results, all of them and no others."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import counted, gpu, training_goals
from bench.__main__ import main
from bench.case import OWN_COMPILED
from bench.convs import LIBRARY, conv_shapes, row
from bench.fused import FUSIONS, fused_name, parts, sites
from bench.report import BEGIN, differences, update
from edm2.errors import UserError
from tests.made_results import all_results, case, kernels, measured, pictures, store, train

ROOT = Path(__file__).parent.parent
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
        answer = "edm2 512 images/s; 2.00× eager (256), 1.20× compile max-autotune (427); each at its best batch."
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

    def test_differences_are_no_times(self, lines):
        assert "| edm2-img512-s/n64 | 1.00e-03 | 8.00e-04, 0.80× |" in lines

    def test_losses_that_should_agree(self, root, lines):
        row = "| edm2-img512-xxs, batch 32, last 1 of 2 steps | 0.50000 | 0.50100 (edm2, float16) | 0.2% | ≤ 0.5%: reached |"
        assert row in lines and row in (root / "docs" / "bench" / "nvidia-h200.md").read_text()

    def test_what_is_missing_is_named(self, root, lines):
        (line,) = (line for line in lines if line.startswith("Unmeasured here"))
        missing = [f"img512-{size}" for size in ("xxs", "l", "xxl")] + [f"img64-{size}" for size in ("xs", "s", "m", "l", "xl")]
        assert line == f"Unmeasured here: {'; '.join(f'training edm2-{name}' for name in missing)}."
        store(root, [train("s", 64, {"edm2": None})], "nvidia-h100")
        update(root)
        text = (root / "README.md").read_text()
        assert "on nvidia-h100: edm2 failed; eager unmeasured, compile unmeasured;" in text
        assert "Unmeasured here: evaluations of the network; reading training data, by two worker processes; ends of trajectories" in text

    def test_the_full_page_has_every_candidate(self, root, lines):
        text = (root / "docs" / "bench" / "nvidia-h200.md").read_text()
        cases = text.partition("## Training steps")[2].splitlines()
        others = [c for c in all_results() if c["group"] != "equivalence"]
        assert sum(line.startswith("| ") for line in cases) == sum(len(c["candidates"]) for c in others) + 1 + 8  # headers
        assert r"| kernels/attention/n8-64x12 | SDPA | failed: no kernel \| image |" in text
        row = "| train/edm2-img512-s/n64 | edm2 | 130 (127–134) | 492 images/s, 769 TFLOP/s (110%) | 20.0%"
        assert f"{row} | data 2.6, forward 39, backward 75.4, optimizer 13 | 30.00 | 0.0e+00 |" in text

    def test_traced_is_no_baseline(self, root):
        store(root, [train("s", 64, {"eager": 200, "traced, not compiled": 100, "edm2": 150})])
        update(root)
        assert "traced" not in (root / "README.md").read_text() + (root / "docs" / "bench" / "nvidia-h200.md").read_text()


def convolutions() -> list[dict]:
    """At every 3×3 shape of EDM2-S: a forward by turns at 600 and 800 TFLOP/s, which 1.1 and 1.2 times the time of the plain
    one makes a fused one; an input gradient that the library does quicker, but not where MP-SiLU follows it."""
    found, shapes = [], [key for key in conv_shapes("edm2-img512-s") if key[3] == 3 and min(key[1:3]) >= 8]
    for i, (res, cin, cout, _) in enumerate(shapes):
        shape = f"n256-{res}x{res}-{cin}-{cout}"
        ms = {"forward": 1 / (800 if i % 2 else 600), "dgrad": 1 / 610, "wgrad": 1 / 590}
        for way, own in ms.items():
            times = {"cuDNN": measured(1 / 500), "edm2": measured(own)}
            if way == "dgrad":
                times[LIBRARY] = measured(own * 0.8)
            if way == "wgrad" and i == 0:
                times["edm2"] = {"failure": "error 1 above 0.02"}
            facts = {"row": row(way, 3, res, cin, cout)} if way != "forward" else {}
            found.append(case(f"kernels/conv3x3/{way}/{shape}", times, 1e12, 1e9, n=256, count=5, **facts))
        found.append(case(f"kernels/gemm/as-conv3x3/{shape}", {"cuBLAS": measured(1 / 800)}, 1e12, 1e9))
    for op, site in sites("edm2-img512-s"):
        if FUSIONS[op].in_table:
            (way,), site = FUSIONS[op].ways, site._replace(n=256)
            (plain,) = (x["candidates"]["edm2"]["median"] for x in found if x["case"] in parts(way, site, False))
            own = plain * (1.2 if plain == 1 / 800 else 1.1)
            times = {"compile": measured(plain * 1.5), "edm2": measured(own), LIBRARY: measured(own * 1.1)}
            facts = {"parts": parts(way, site, False), "row": row(way, 3, site.res, site.cin, site.cout)}
            found.append(case(fused_name(op, way, site), times, 1e12, 1e9, n=256, count=site.count, **facts))
    block = {"eager": measured(0.02), "compile": measured(0.0096), "edm2": measured(0.006)}
    return [*found, case("block/edm2-img512-s/64x64/n256", block, preset="edm2-img512-s", batch=256)]


class TestConvolutions:
    @pytest.fixture
    def cells(self, root, monkeypatch):
        """Of the tables of the page and of the README, by the first in the row, of rows that share it those further up."""
        monkeypatch.setattr("bench.plots.draw", lambda planned, folder: None)
        store(root, convolutions())
        update(root)
        texts = [(root / path).read_text() for path in ("docs/bench/nvidia-h200.md", "README.md")]
        return [{line.split(" | ")[0]: line.split(" | ")[1:] for line in reversed(text.splitlines())} for text in texts]

    def test_averages_are_held_to_the_goals(self, cells):
        """Of rates, not of times; only where every shape was measured."""
        for rows in cells:
            assert rows["| 3×3, forward"] == ["20", "700", "500", "800", "1.40", "0.88", "650 TFLOP/s: reached |"]
            assert rows["| 3×3, input gradient"] == ["20", "610", "500", "800", "1.22", "0.76", "620 TFLOP/s: missed |"]
            assert rows["| 3×3, weight gradient"][0] == "19 of 20" and rows["| 3×3, weight gradient"][-1] == "580 TFLOP/s: incomplete |"

    def test_what_is_fused(self, cells):
        """Against torch.compile, and what it adds to the plain convolution."""
        expected = [x for x in convolutions() if x["case"].startswith("kernels/conv_silu/")]
        slower = [x for x in expected if x["candidates"]["edm2"]["median"] == 1.2 / 800]
        share = len(slower) / len(expected)
        for rows in cells:
            count, times, goal, added = rows["| conv_silu/forward"]
            assert 0 < share < 1 and count == str(len(expected)) == "17"
            assert times == f"{1.5 / 1.2 * share + 1.5 / 1.1 * (1 - share):.2f} (1.25–1.36)" and goal == "1.25×: reached"
            assert added.endswith(f"{0.1 + 0.1 * share:.0%} (10%–20%) |")
            assert rows["| silu_grad/dgrad"][1:3] == ["1.36 (1.36–1.36)", "1.25×: reached"]
            assert rows["| encoder block 64×64×192, forward and backward"] == ["1", "1.60", "1.5×: reached", " |"]

    def test_each_fused_case(self, cells):
        assert cells[0]["| silu_grad/dgrad/n256-64x64-384-384"] == ["1.8", "0.164", "10%", "1.36 |"]

    def test_rows_of_the_table_of_tiles(self, root, cells):
        """A row's times are those of all that a step has of it: of five input gradients here four are plain."""
        rows = cells[0]
        assert rows["| `('wgmma', 'input gradient', 9, 64, 64, 192, 384, 0)`"][2] == "library |"  # all five
        ops = [op for op, site in sites("edm2-img512-s") for _ in range(site.count) if (site.res, site.cin, site.cout) == (32, 576, 576)]
        assert [op for op in ops if "grad" in op] == ["silu_grad"]
        kernels, library = (4 + 1.1) / 0.61, (4 * 0.8 + 1.1 * 1.1) / 0.61
        name = "| `('wgmma', 'input gradient', 9, 32, 32, 576, 576, 0)`"
        assert rows[name] == [f"{kernels:.3g}", f"{library:.3g}", "library |"]
        assert rows["| `('wgmma', 'forward', 9, 64, 64, 384, 192, 0)`"][2] == "kernels |"
        assert not any("'weight gradient', 9" in other for other in rows)  # where the library was not measured
        folder = root / "bench" / "results" / "nvidia-h200"
        (folder / "kernels_silu_grad_dgrad_n256-32x32-576-576.json").unlink()
        update(root)
        assert name not in (root / "docs" / "bench" / "nvidia-h200.md").read_text()

    def test_a_run_ends_with_them(self, tmp_path, monkeypatch, capsys):
        tests = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "stopped": False, "seconds": 0.0}
        monkeypatch.setattr(gpu, "run_tests", lambda *args: tests)
        monkeypatch.setattr(gpu, "run_cases", lambda *args: [*convolutions(), train("s", 256, {"eager": 600, "edm2": 256})])
        gpu.run(lambda: [], [], tmp_path, 60, 3)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("encoder block 64×64×192, forward and backward | 1 | 1.60 | 1.5×: reached")
        assert "images/s | 1,000 | ≥ 950: reached" in lines and "speed against eager | 2.34× | ≥ 2.2×: reached" in lines


class TestTraining:
    """The goals of EDM2-S at batch 256."""

    def rows(self, *cases: dict) -> dict[str, list[str]]:
        (((_, *header), rows),) = training_goals.training(cases)
        return {"": header} | {row[0]: row[1:] for row in rows}

    def step(self, **facts) -> dict:
        """600 images/s of eager and 990 of this project compiled; `facts` of the latter."""
        case = train("s", 256, {"eager": 25600 / 60, "compile": 25600 / 70, "edm2": 25600 / 94, OWN_COMPILED: 25600 / 99})
        case["candidates"][OWN_COMPILED] |= {"MFU": 0.6, "peak_memory": 15 * 2**30, **facts}
        return case

    def test_all_are_judged_by_the_quickest_of_this_project(self):
        parts = {"data": 0.01, "forward": 0.1, "backward": 0.145, "optimizer": 0.005}
        rows = self.rows(train("s", 64, {"edm2": 1}), train("m", 256, {"edm2": 1}), self.step(parts=parts))
        assert rows == {
            "": ["edm2 compiled", "goal"],
            "images/s": ["990", "≥ 950: reached"],
            "MFU": ["60%", "≥ 58%: reached"],
            "speed against eager": ["1.65×", "≥ 2.2×: missed"],
            "speed against compile": ["1.41×", "≥ 1.4×: reached"],
            "peak memory against eager": ["0.5×", "≤ 0.6×: reached"],
            "outside forward and backward": ["2% (5.8% with data)", "≤ 2.5%: reached"],
        }

    def test_at_most_is_not_at_least(self):
        rows = self.rows(self.step(peak_memory=21 * 2**30, parts={"data": 0, "forward": 0.1, "backward": 0.2, "optimizer": 0.02}))
        assert rows["peak memory against eager"] == ["0.7×", "≤ 0.6×: missed"]
        assert rows["outside forward and backward"][1] == "≤ 2.5%: missed"

    def test_the_best_of_torch_compile(self):
        """Of any mode, and not this project's own."""
        slow = train("s", 256, {"eager channels-last": 600, "compile max-autotune": 25600 / 75}, "max-autotune")
        assert self.rows(self.step(), slow)["speed against compile max-autotune"] == ["1.32×", "≥ 1.4×: missed"]

    def test_what_is_unmeasured(self):
        rows = self.rows(train("s", 256, {"eager": None, "edm2": 270}))
        assert rows[""][0] == "edm2" and rows["images/s"][1] == "≥ 950: missed"
        for name in ("speed against eager", "speed against compile", "peak memory against eager"):
            assert rows[name][0] == "unmeasured" and rows[name][1].endswith(": unmeasured")
        assert all(cells[0] == "unmeasured" for name, cells in self.rows(train("s", 256, {"eager": 270})).items() if name)
        assert training_goals.training([train("s", 64, {"edm2": 1})]) == []

    def test_where_it_is_shown(self, root, monkeypatch):
        monkeypatch.setattr("bench.plots.draw", lambda planned, folder: None)
        store(root, [self.step()])
        update(root)
        for path in ("README.md", "docs/bench/nvidia-h200.md"):
            text = (root / path).read_text()
            assert "goals are for an H200" in text and "| training step | edm2 compiled | goal |" in text
        assert "nvidia-h200: edm2 compiled 990 images/s; 1.65× eager (600), 1.41× compile (700);" in (root / "README.md").read_text()


class TestLedger:
    @pytest.fixture
    def counted_root(self, root):
        (root / "bench" / "README.md").write_text(f"before\n{counted.BEGIN}\n{counted.END}\nafter\n")
        entry = {"batch": 256, "preset": "edm2-img512-s", "classes": {}}
        totals = {("eager", "eval"): (1846, 2.3e11, 0), ("this project", "eval"): (392, 7e10, 0)}
        totals |= {("eager", "train"): (7125, 7.6e11, 6e10), ("this project", "train"): (927, 3e11, 3e10)}
        entries = [
            entry | {"candidate": name, "phase": phase, "total": dict(zip(("launches", "bytes", "saved"), own)) | {"flops": 5e13}}
            for (name, phase), own in totals.items()
        ]
        (root / "bench" / "results" / "ledger.json").write_text(json.dumps(entries))
        return root

    def test_figures_are_those_of_the_file(self, counted_root):
        update(counted_root)
        text = (counted_root / "bench" / "README.md").read_text()
        assert "| evaluation, eager | 1,846 | 230.0 | 50.0 |  |" in text
        assert "| training step, this project | 927 | 300.0 | 50.0 | 117.2 |" in text
        assert text.startswith("before\n") and text.endswith("after\n")
        sentence = (
            "a training step of EDM2-S at batch 256 is 927 launches and 300 GB of memory traffic; `eager` has 7,125 launches and 760 GB"
        )
        assert sentence in (counted_root / "README.md").read_text() and differences(counted_root) == ""

    def test_another_figure_is_found(self, counted_root):
        update(counted_root)
        path = counted_root / "bench" / "README.md"
        path.write_text(path.read_text().replace("| 927 |", "| 926 |"))
        assert "+++ bench/README.md" in differences(counted_root)

    def test_errors(self, counted_root):
        (counted_root / "bench" / "README.md").write_text("no marks")
        with pytest.raises(UserError, match="no place for the ledger"):
            update(counted_root)
        (counted_root / "bench" / "results" / "ledger.json").write_text("[")
        with pytest.raises(UserError, match="count-ledger"):
            update(counted_root)


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
