"""The plots of bench/results: what they show, and when they are drawn."""

import sys

import numpy as np
import pytest
from PIL import Image

from bench.plots import _means, plan
from bench.report import differences, load, update
from edm2.errors import UserError
from tests.made_results import CEILINGS, all_results, kernels, pictures, store, train


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
        assert shown["equivalence"] == {"edm2-img512-xxs, batch 32": {"eager": [1.0, 0.5], "edm2": [1.0, 0.501]}}

    def test_drawn_and_shown(self, root):
        store(root, all_results())
        update(root)
        assert pictures(root) == {"speedup", "roofline", "steps", "equivalence"}
        for path in (root / "docs" / "bench" / "nvidia-h200").iterdir():
            with Image.open(path) as image:
                assert min(image.size) > 300 and len(image.convert("RGB").getcolors(2**24)) > 50
            assert f"(docs/bench/nvidia-h200/{path.name})" in (root / "README.md").read_text()
            assert f"(nvidia-h200/{path.name})" in (root / "docs" / "bench" / "nvidia-h200.md").read_text()

    @pytest.mark.parametrize(
        ("groups", "expected"),
        [
            ({"train"}, {"speedup", "steps"}),
            ({"kernels"}, {"roofline"}),
            ({"equivalence"}, {"equivalence"}),
            ({"sample", "optimizer", "block"}, set()),
        ],
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
        pngs = {"speedup.png", "steps.png", "equivalence.png"}
        assert {path.name for path in (root / "docs" / "bench").rglob("*.*")} == {"nvidia-h200.md", *pngs}
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
        assert "640 images/s" in text and pictures(root) == {"roofline", "equivalence"} and text.count("![") == 2

    def test_curves(self):
        """Means of steps, at the last of them; what is not finite leaves a gap."""
        steps, means = _means([*[1.0] * 10, *[2.0] * 9, None, *[4.0] * 10, 5.0])
        assert steps.tolist() == [10, 20, 30] and means.tolist()[::2] == [1, 4] and np.isnan(means[1])
        assert [x.tolist() for x in _means([1.0, 3.0])] == [[2], [2]]
