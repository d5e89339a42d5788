"""Tuning without a GPU: the candidates, rows that the choice of tiles follows, and a rehearsal with made-up times."""

import csv
import json
import multiprocessing
import time
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import runner, tune
from bench.__main__ import main
from bench.candidates import BARRIERS, SHARED, candidates, shared, table_row, text
from bench.ledger import launches_of
from bench.measure import Timing
from kernels import conv_tiles
from kernels.conv_tiles import CONV, WGRAD, ConvTile, WgradTile
from kernels.jit import INTERPRET, Launch
from kernels.tracing import OnGPU

PRESET = "edm2-img512-s"
STEPS = [(256, 90), (8, 90), (8, 80)]  # batches and architectures
BATCHES = (1, 2, 8, 64, 256, 2048)
TABLE = Path(__file__).parent / "gate" / "triton-3.9.0.csv"


@lru_cache
def problems(batch: int, capability: int, preset: str = PRESET) -> list[tune.Problem]:
    return tune.problems(preset, batch, capability)


def heaviest(op: str, found: list[tune.Problem]) -> tune.Problem:
    return next(problem for problem in found if problem.row.op == op)


def chosen(problem: tune.Problem, images: int | None = None) -> tune.Tile:
    is_weight = problem.row.op == "weight gradient"
    return conv_tiles.wgrad(problem.row) if is_weight else conv_tiles.conv(problem.row, images or problem.images)


def table(*rows: str) -> dict:
    """As it would stand in kernels/conv_tiles.py."""
    return eval("{" + "\n".join(rows) + "}", {"ConvTile": ConvTile, "WgradTile": WgradTile})


def constants(tile: tune.Tile) -> dict:
    """Those of a launch that tell tiles apart."""
    parts = [("BM0", "BM1"), ("BN0", "BN1")] if isinstance(tile, WgradTile) else [("BN0", "BN1")]
    sizes = (tile.rows, tile.columns) if isinstance(tile, WgradTile) else (tile.channels,)
    found = {name: n for names, part in zip(parts, sizes) for name, n in zip(names, part)}
    return found | {"num_warps": tile.warps, "num_stages": tile.stages}


def launched(run) -> list[Launch]:
    found: list[Launch] = []
    with FakeTensorMode(), OnGPU(found.append, 90):
        run()
    return [x for x in found if x.kernel.__name__ in ("conv_kernel", "wgrad_kernel")]


class TestProblems:
    def test_calls_are_all_that_a_step_makes(self):
        launches = [x for x in launches_of("this project", PRESET, 256, "train") if x.kernel.__name__ in ("conv_kernel", "wgrad_kernel")]
        assert sum(tune.calls_of(PRESET, 256, 90).values()) == len(launches)
        assert sum(problem.flops for problem in problems(256, 90)) == sum(x.flops for x in launches)

    def test_the_most_arithmetic_comes_first(self):
        found = problems(256, 90)
        assert len({problem.name for problem in found}) == len(found)
        order = [(problem.row.taps > 1, problem.flops) for problem in found]
        assert order == sorted(order, reverse=True) and {problem.row.op for problem in found[:5]} == set(tune.WAYS.values())

    def test_calls_are_made_as_in_the_step(self):
        """One after the other, and with the candidate."""
        for problem in problems(8, 90):
            tile = problem.candidates[-1]
            found = launched(lambda: problem.on(torch.device("cpu"))(tile))  # noqa: B023
            assert len(found) == len(problem.calls) and sum(x.flops for x in found) == sum(call.flops for call in problem.calls)
            assert all(constants(tile).items() <= x.options.items() for x in found)


class TestCandidates:
    @pytest.mark.parametrize("step", STEPS)
    def test_are_tiles_that_fit(self, step):
        for problem in problems(*step):
            row, found = problem.row, problem.candidates
            assert found[0] == chosen(problem) and len(set(found)) == len(found) >= 4, row
            for tile in found:
                bi, bh, bw = tile.box(row.height, row.width)[0] if isinstance(tile, WgradTile) else tile.box(row.height, row.width)
                assert bi * bh * bw <= tile.pixels and shared(tile, row.kind) <= SHARED[row.kind] and tile.stages >= 2
                if isinstance(tile, ConvTile):
                    assert bi * bh * bw == tile.pixels and bh % max(4 // bi, 1) == 0, "quarters are whole rows"
                    assert sum(tile.channels) * tile.pixels <= 255 * 32 * tile.warps

    @pytest.mark.parametrize("step", STEPS)
    def test_steps_are_those_of_the_lists(self, step):
        """Else the order of K would be another."""
        for problem in problems(*step):
            known = {(tiles[0].channels, tiles[0].block_k) for tiles in CONV[problem.row.kind]}
            assert all((x.channels, x.block_k) in known for x in problem.candidates if isinstance(x, ConvTile))

    def test_shared_memory_is_what_the_gate_found(self):
        """Of each tile in the gate's table the most that a kernel needs."""
        found = defaultdict(int)
        for line in csv.DictReader(TABLE.read_text().splitlines()):
            facts = dict(pair.split("=") for pair in line["constants"].split())
            if line["arch"] != "sm_100" and line["kernel"] in ("conv_kernel", "wgrad_kernel"):
                pixels = int(facts["BI"]) * int(facts["BH"]) * int(facts["BW"])
                names = ("BM0", "BM1", "BN0", "BN1", "num_warps", "num_stages")
                key = ("mma" if line["arch"] == "sm_80" else "wgmma", pixels, *(int(facts.get(name, 0)) for name in names))
                found[key] = max(found[key], int(line["shared"]))
        held = 0
        for kind in CONV:
            for tile in [*(tile for tiles in CONV[kind] for tile in tiles), *WGRAD[kind]]:
                parts = (*tile.rows, *tile.columns) if isinstance(tile, WgradTile) else (0, 0, *tile.channels)
                if most := found.get((kind, tile.pixels, *parts, tile.warps, tile.stages)):
                    assert most <= shared(tile, kind) <= most + BARRIERS, tile
                    held += 1
        assert held >= 15


class TestRows:
    @pytest.mark.parametrize("step", STEPS)
    def test_make_a_candidate_the_choice(self, step, monkeypatch):
        """Whatever the batch, of the same channels and steps; of other rows nothing changes."""
        found = problems(*step)
        before = [chosen(problem) for problem in found]
        for i, problem in enumerate(found):
            for tile in problem.candidates:
                monkeypatch.setattr(conv_tiles, "TUNED", table(table_row(problem.row, tile, problem.images)))
                assert chosen(problem) == tile
                if isinstance(tile, ConvTile):
                    steps = {(x.channels, x.block_k) for x in (chosen(problem, images) for images in BATCHES)}
                    assert steps == {(tile.channels, tile.block_k)}
            assert [chosen(other) for other in found if other is not problem] == before[:i] + before[i + 1 :]
            monkeypatch.setattr(conv_tiles, "TUNED", {})

    def test_a_row_is_amended_for_another_batch(self, monkeypatch):
        """A tile of fewer pixels for small batches stays when one of more is found, and the other way round."""
        row = conv_tiles.row(90, "forward", 9, 64, 64, 192, 192)
        small, large = ConvTile((128, 64), 64, 64, 4, 3), ConvTile((128, 64), 256, 64, 8, 4)
        for first, second in [((small, 1), (large, 256)), ((large, 256), (small, 1))]:
            monkeypatch.setattr(conv_tiles, "TUNED", {})
            for tile, images in (first, second):
                monkeypatch.setattr(conv_tiles, "TUNED", table(table_row(row, tile, images)))
            assert (conv_tiles.conv(row, 1), conv_tiles.conv(row, 256)) == (small, large)

    def test_are_looked_up_by_launches(self, monkeypatch):
        for problem in problems(8, 90):
            monkeypatch.setattr(conv_tiles, "TUNED", {})
            present, *others = problem.candidates
            tile = next(tile for tile in others if constants(tile) != constants(present))
            for call in problem.calls:
                monkeypatch.setattr(conv_tiles, "TUNED", {})
                untuned = launched(lambda: call.on(torch.device("cpu"))(None))  # noqa: B023
                monkeypatch.setattr(conv_tiles, "TUNED", table(table_row(problem.row, tile, problem.images)))
                tuned = launched(lambda: call.on(torch.device("cpu"))(None))  # noqa: B023
                assert constants(present).items() <= untuned[0].options.items()
                assert constants(tile).items() <= tuned[0].options.items(), call

    def test_waves_are_programs(self):
        row = conv_tiles.row(90, "weight gradient", 9, 64, 64, 192, 192)
        tile = conv_tiles.wgrad(row)
        assert [conv_tiles.splits(replace(tile, waves=n), 9, 16384) for n in (1, 3, 6)] == [14, 44, 88]

    def test_steps_never_follow_the_batch(self):
        """In the table of measured rows as in the lists."""
        lists = [tiles for kind in CONV.values() for tiles in kind] + [x for x in conv_tiles.TUNED.values() if isinstance(x, list)]
        assert lists and all(len({(tile.channels, tile.block_k) for tile in tiles}) == 1 for tiles in lists)
        for row, value in conv_tiles.TUNED.items():
            assert isinstance(value, WgradTile) == (row[1] == "weight gradient"), row


def sums(x, tile, **others):
    """In place of a convolution."""
    return x.float().sum()


class TestRehearsal:
    """With times made up by tile: the later a candidate, the quicker."""

    spread = 0.1

    @pytest.fixture
    def found(self, monkeypatch):
        """Problems whose calls are `sums`, of which the last candidate is wrong and the one before fails."""
        found = [heaviest(op, problems(8, 90, "digits")) for op in tune.WAYS.values()]
        bad = [problem.candidates[-1] for problem in found], [problem.candidates[-2] for problem in found]

        def planted(x, tile, **others):
            if tile in bad[1]:
                raise RuntimeError("out of resources")
            return sums(x, tile) * (1.01 if tile in bad[0] else 1)

        monkeypatch.setattr(tune, "FUNCTIONS", dict.fromkeys(tune.FUNCTIONS, planted))
        return found

    @pytest.fixture
    def times(self, monkeypatch):
        """How many candidates were timed, each time."""
        rounds = []

        def timings(runs, *args, **kwargs):
            rounds.append(len(runs))
            spread = self.spread * (len(runs) - 1) / 100  # as a share of the largest gain
            return [Timing(1 - i / 100, 1 - i / 100 - spread, 1 - i / 100 + spread, 20) for i in range(len(runs))]

        monkeypatch.setattr(runner, "measure_in_turn", timings)
        return rounds

    def test_the_quickest_of_the_right_is_recommended(self, found, times, tmp_path, capsys, monkeypatch):
        tune.measure(found, tune.tune_cases(found, needs_gpu=False), tmp_path, 60, 3)
        lines, _, rows = capsys.readouterr().out.partition("\n\n")
        recommended = table(*rows.splitlines()[1:])
        for problem, told in zip(found, lines.splitlines(), strict=True):
            *right, failing, wrong = problem.candidates
            stored = json.loads((tmp_path / f"{problem.name.replace('/', '_')}.json").read_text())
            assert list(stored["candidates"]) == [text(tile) for tile in problem.candidates] and stored["row"] == list(problem.row)
            assert stored["candidates"][text(failing)] == {"failure": "out of resources"}
            assert "error" in stored["candidates"][text(wrong)]["failure"] and "median" not in stored["candidates"][text(wrong)]
            assert f"{text(wrong)}: error" in told and f"{text(failing)}: out of resources" in told
            assert told.startswith(problem.name) and f"quickest {text(right[-1])} {1000 - 10 * (len(right) - 1):.3f} ms" in told
            assert f"present {text(right[0])} 1000.000 ms" in told and f"{len(right)} of {len(problem.candidates)}" in told
        assert recommended.keys() == {problem.row for problem in found} and "8 images: 1000.000 → " in rows
        best = {problem: problem.candidates[-3] for problem in found}
        monkeypatch.setattr(conv_tiles, "TUNED", recommended)
        assert {problem: chosen(problem) for problem in found} == best

    def test_a_gain_within_the_noise_is_no_row(self, found, times, tmp_path, capsys):
        self.spread = 0.75
        tune.measure(found, tune.tune_cases(found, needs_gpu=False), tmp_path, 60, 3)
        out = capsys.readouterr().out
        assert out.count("within the noise") == len(found) and "No tile is quicker" in out and "TUNED" not in out

    def test_without_the_present_tile_nothing_is_recommended(self, found, times, tmp_path, capsys, monkeypatch):
        first = found[0].candidates[0]

        def failing(x, tile, **others):
            if tile == first:
                raise RuntimeError("no luck")
            return sums(x, tile)

        monkeypatch.setattr(tune, "FUNCTIONS", dict.fromkeys(tune.FUNCTIONS, failing))
        tune.measure(found[:1], tune.tune_cases(found[:1], needs_gpu=False), tmp_path, 60, 3)
        out = capsys.readouterr().out
        assert f"present {text(first)} failed" in out and "quickest" not in out and "TUNED" not in out

    def test_a_run_cut_short_loses_nothing(self, found, times, tmp_path, capsys, monkeypatch):
        whole = runner.measure_in_turn

        def interrupted(*args, **kwargs):
            if len(times) == 1:
                raise KeyboardInterrupt
            return whole(*args, **kwargs)

        monkeypatch.setattr(runner, "measure_in_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune.measure(found, tune.tune_cases(found, needs_gpu=False), tmp_path, 60, 3)
        first, second = (json.loads((tmp_path / f"{problem.name.replace('/', '_')}.json").read_text()) for problem in found[:2])
        assert "median" in first["candidates"][text(found[0].candidates[-3])] and "torch" in first["machine"]
        assert not any("median" in facts for facts in second["candidates"].values())
        assert table(*capsys.readouterr().out.partition("\n\n")[2].splitlines()[1:]).keys() == {found[0].row}

    def test_budget(self, found, times, tmp_path, capsys):
        tune.measure(found, tune.tune_cases(found, needs_gpu=False), tmp_path, 1e-9, 3)
        assert not times and not list(tmp_path.iterdir()) and "left out" in capsys.readouterr().err


@pytest.mark.skipif(not INTERPRET, reason="about kernels")
@pytest.mark.parametrize("op", tune.WAYS.values())
def test_candidates_agree(op, tmp_path, monkeypatch):
    """The kernels themselves: whatever the tile, the result is the present one's."""
    monkeypatch.setattr(runner, "measure_in_turn", lambda runs, *args, **kwargs: [Timing(1, 1, 1, 1)] * len(runs))
    problem = heaviest(op, problems(1, 90, "digits"))
    tune.measure([problem], tune.tune_cases([problem], needs_gpu=False), tmp_path, 60, 1)
    (path,) = tmp_path.iterdir()
    facts = json.loads(path.read_text())["candidates"]
    assert facts.keys() == {text(tile) for tile in candidates(problem.row, 1)}
    assert all("median" in x and x["error"] < tune.TOLERANCE for x in facts.values()), facts


def test_in_processes_of_their_own(tmp_path, capsys, monkeypatch):
    """All but the GPU: what compiles, what measures, the result. Where kernels cannot run the present tile fails."""
    monkeypatch.setattr(tune, "WORKERS", 1)
    (problem,) = (x for x in problems(1, 90, "digits") if x.name == "tune/conv1x1/forward/n1-4x4-64-64")
    tune.run([problem], tmp_path, 100, 90, runs=3, needs_gpu=False)
    (path,) = tmp_path.iterdir()
    facts = json.loads(path.read_text())["candidates"]
    assert list(facts) == [text(tile) for tile in problem.candidates]
    assert all(("median" in x) == INTERPRET and ("failure" in x) != INTERPRET for x in facts.values())
    assert capsys.readouterr().out.startswith(f"{problem.name}  present {text(problem.candidates[0])}")


def hang_or_fail(problem, tile, capability):
    """In place of a compilation."""
    if problem.images == 8:
        time.sleep(60)
    raise RuntimeError("no luck")


class TestCompilers:
    def test_nothing_goes_on_beside_the_measurement(self, monkeypatch):
        """Where a compilation hangs all are ended, and those of the next problem start anew; one that fails is at an end."""
        monkeypatch.setattr(tune, "WORKERS", 1)
        with tune.Compilers(90, hang_or_fail) as compilers:
            start = time.monotonic()
            assert not compilers(problems(8, 90)[0], start + 3) and time.monotonic() - start < 15
            assert not multiprocessing.active_children()
            assert compilers(problems(256, 90)[0], time.monotonic() + 60)
        assert not multiprocessing.active_children()

    @pytest.mark.skipif(INTERPRET, reason="kernels of the interpreter do not compile")
    def test_what_a_candidate_launches_is_compiled(self, monkeypatch):
        warmed = []
        monkeypatch.setattr(tune, "warm", warmed.append)
        problem = problems(256, 90)[0]
        tile = problem.candidates[-1]
        tune.compile_candidate(problem, tile, 90)
        products = [x for x in warmed if x.kernel.__name__ == "conv_kernel"]
        epilogues = {dict(call.arguments).get("epilogue", "sum") for call in problem.calls}
        assert {x.options["EPILOGUE"] for x in products} == epilogues and len(warmed) == len({tune.warm_key(x) for x in warmed})
        assert all(constants(tile).items() <= x.options.items() for x in products)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(main, ["tune", "--budget=1"])
    assert result.exit_code == 1 and result.output == "Error: tune measures on a GPU, and there is none here\n"
