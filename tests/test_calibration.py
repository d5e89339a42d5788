"""Suggested noise levels, against errors made of a known dip."""

import json
import math

import numpy as np
import pytest

import edm2
from edm2.calibration import calibrate
from edm2.cli.main import main
from edm2.diagnostics import EDGES
from tests.command_lines import call, refused

SIGMA = ((EDGES[1:] + EDGES[:-1]) / 2).exp().numpy()


def lines(center: float = -1.0, width: float = 0.8, std: float = 0.5, count: int = 8, seen: slice = slice(None), u: float = 0.0) -> list:
    """Status lines of a run whose error is a Gaussian dip below that of data of this standard deviation; the first half says
    something else."""
    unstructured = (SIGMA**2 + 0.25) * std**2 / (0.25 * (SIGMA**2 + std**2))
    error = unstructured * (1 - 0.6 * np.exp(-0.5 * ((np.log(SIGMA) - center) / width) ** 2))
    images = np.zeros(len(SIGMA))
    images[seen] = 1000
    told = [x if n else None for x, n in zip(error, images)]
    found = {"sigma": SIGMA.tolist(), "images": images.tolist(), "error": told, "u": [None if x is None else math.log(x) + u for x in told]}
    early = found | {"error": [None if x is None else 0.9 for x in told]}
    return [{"Loss/by_noise_level": early if i < count // 2 else found} for i in range(count)]


@pytest.mark.parametrize(("center", "width", "std"), [(-1.0, 0.8, 0.5), (-0.4, 1.0, 0.5), (-1.5, 1.0, 0.4), (0.0, 0.7, 0.6)])
def test_a_known_dip(center, width, std):
    found = calibrate(lines(center, width, std))
    assert (found.p_mean, found.p_std) == (pytest.approx(center, abs=0.03), pytest.approx(width, rel=0.05))
    assert any("standard deviation of" in words for words in found.warnings) == (std != 0.5)
    np.testing.assert_allclose(found.learnt, found.error)


def test_which_lines_count():
    """Those at the end, by their images; levels of few images do not."""
    run = lines()
    assert calibrate(run, share=1).p_std > calibrate(run, share=0.5).p_std + 0.1
    last = {name: list(values) for name, values in run[-1]["Loss/by_noise_level"].items()}
    last["error"][3], last["images"][3] = 50.0, 1
    assert calibrate([*run, {"Loss/by_noise_level": last}], share=0.2).p_mean == pytest.approx(-1, abs=0.03)
    last["images"] = [20] * len(SIGMA)
    with pytest.raises(edm2.UserError, match="tell of 0 noise levels, of 100 images or more"):
        calibrate([{"Loss/by_noise_level": last}])


def test_what_is_odd():
    assert calibrate(lines()).warnings == []
    assert "there is more to learn" in " ".join(calibrate(lines(seen=slice(10, None))).warnings)
    assert "no noise above σ = 2" in " ".join(calibrate(lines(seen=slice(0, 15))).warnings)
    assert "u(σ) is 35% off the error" in " ".join(calibrate(lines(u=0.3)).warnings)


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ([], "tell nothing by noise level"),
        ([{"Loss/loss": 1.0}], "tell nothing by noise level"),
        ([{"Loss/by_noise_level": {}}], "are damaged"),
        ([{"Loss/by_noise_level": {"sigma": [1], "images": [1, 2], "error": [1, 2], "u": [1, 2]}}], "are damaged"),
        (lines(seen=slice(5, 8)), "tell of 3 noise levels"),
        ([{"Loss/by_noise_level": {"sigma": SIGMA.tolist(), "images": [1e3] * 22, "error": [1.0] * 22, "u": [0.0] * 22}}], "errs as much"),
        (
            [{"Loss/by_noise_level": {"sigma": SIGMA.tolist(), "images": [1e3] * 22, "error": [0.5, *[1.0] * 21], "u": [0.0] * 22}}],
            "at one noise level only",
        ),
    ],
)
def test_what_is_not_enough(stats, words):
    with pytest.raises(edm2.UserError, match=words):
        calibrate(stats)


def test_the_command(tmp_path):
    (tmp_path / "stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(u=0.3)))
    told = call(main, "calibrate", str(tmp_path)).output.splitlines()
    assert told[0].startswith("Note: u(σ) is 35% off") and told[1] == "suggested: --P_mean=-1.00 --P_std=0.80"
    assert (tmp_path / "noise_levels.png").read_bytes()[:4] == b"\x89PNG"
    with open(tmp_path / "stats.jsonl", "a") as file:
        file.write('{"Loss/by_noise_le')  # by a process that was killed
    assert call(main, "calibrate", str(tmp_path)).output.splitlines() == told
    assert "cannot create the folder /dev/null" in refused(main, "calibrate", str(tmp_path), "--out=/dev/null/a.png")
    assert "stats.jsonl cannot be read" in refused(main, "calibrate", str(tmp_path / "none"))
