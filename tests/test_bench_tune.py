"""Tuning without a GPU: the candidates, rows that the choice of tiles follows, and a rehearsal with made-up times."""

import csv
import json
import multiprocessing
import os
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch._subclasses.fake_tensor import FakeTensorMode

import bench.problems
from bench import runner, tune
from bench.__main__ import main
from bench.candidates import BARRIERS, SHARED, Tile, candidates, shared, table_row, text
from bench.case import Case
from bench.convs import WAYS
from bench.counted import load as counted_ledger
from bench.ledger import launches_of
from bench.measure import Timing
from bench.problems import Call, Problem, calls_of, small_problems
from bench.runner import blank
from kernels import conv_tiles
from kernels.conv_tiles import CONV, WGRAD, ConvTile, Row, WgradTile
from kernels.jit import INTERPRET, Launch
from kernels.tracing import OnGPU
from kernels.wgrad import Product, weight_gradients
from tests.gate.build import compile_all, workers
from tests.gate.collect import job

PRESET = "edm2-img512-s"
STEPS = [(256, 90), (8, 90), (8, 80)]  # batches and architectures
BATCHES = (1, 2, 8, 64, 256, 2048)
ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "gate" / "triton-3.9.0.csv"
every_step = pytest.mark.parametrize(("images", "capability"), STEPS)
no_kernels = pytest.mark.skipif(INTERPRET, reason="not about what kernels compute")


@lru_cache
def problems(batch: int, capability: int, preset: str = PRESET) -> list[Problem]:
    return bench.problems.problems(preset, batch, capability)


small = lru_cache(small_problems)


def heaviest(op: str, found: list[Problem], taps: int = 9) -> Problem:
    return next(problem for problem in found if problem.row.op == op and problem.row.taps == taps)


def rows(capability: int) -> list[Row]:
    """That a training step looks up on an architecture."""
    return [problem.row._replace(kind=conv_tiles.kind(capability)) for problem in problems(256, 90)]


def chosen(row: Row, images: int) -> Tile:
    return conv_tiles.wgrad(row) if row.op == "weight gradient" else conv_tiles.conv(row, images)


def table(*rows: str) -> dict:
    """As it would stand in kernels/conv_tiles.py."""
    return eval("{" + "\n".join(rows) + "}", {"ConvTile": ConvTile, "WgradTile": WgradTile})


def constants(tile: Tile) -> dict:
    """Those of a launch that tell tiles apart."""
    parts = [("BM0", "BM1"), ("BN0", "BN1")] if isinstance(tile, WgradTile) else [("BN0", "BN1")]
    sizes = (tile.rows, tile.columns) if isinstance(tile, WgradTile) else (tile.channels,)
    found = {name: n for names, part in zip(parts, sizes) for name, n in zip(names, part)}
    return found | {"num_warps": tile.warps, "num_stages": tile.stages}


def launched(run, capability: int = 90) -> list[Launch]:
    found: list[Launch] = []
    with FakeTensorMode(), OnGPU(found.append, capability):
        run()
    return products(found)


def launched_by(found: Problem | Call, tile: Tile | None, capability: int = 90) -> list[Launch]:
    return launched(lambda: found.on(torch.device("cpu"))(tile), capability)


def products(launches: list[Launch]) -> list[Launch]:
    return [x for x in launches if x.kernel.__name__ in ("conv_kernel", "wgrad_kernel")]


@no_kernels
class TestProblems:
    def test_calls_are_all_that_a_step_makes(self):
        launches = products(launches_of("this project", "digits", 8, "train"))
        assert sum(calls_of("digits", 8, 90).values()) == len(launches)
        assert sum(problem.flops for problem in problems(8, 90, "digits")) == sum(x.flops for x in launches)
        (counted,) = (x["classes"] for x in counted_ledger(ROOT) if (x["candidate"], x["phase"]) == ("this project", "train"))
        assert sum(problem.flops for problem in problems(256, 90)) == counted["convolution"]["flops"]

    def test_weight_gradients_of_a_launch_are_one_call(self):
        """Of the first one's row. Two sources share a gradient."""
        found = [call for problem in problems(256, 90) for call in problem.calls if call.row.op == "weight gradient"]
        weights = [dict(call.arguments)["weights"] for call in found]
        assert {tuple(map(len, x)) for x in weights} == {(1,), (2,), (1, 1), (2, 1)}
        for call, (first, *_) in zip(found, weights):
            sizes = first[0].g.shape[3], first[0].x.shape[3]
            assert (call.row.channels, call.row.depth) == (sizes[::-1] if call.row.taps == 16 else sizes) and call.images == 256
            assert len({product.g for product in first}) == 1 and len({product.x for product in first}) == len(first)

    def test_the_most_arithmetic_comes_first(self):
        found = problems(256, 90)
        assert len({problem.name for problem in found}) == len(found)
        order = [(problem.row.taps > 1, problem.flops) for problem in found]
        assert order == sorted(order, reverse=True) and {problem.row.op for problem in found[:5]} == set(WAYS.values())

    def test_calls_are_made_as_in_the_step(self):
        """One after the other, and with the candidate."""
        for problem in problems(256, 90):
            tile = problem.candidates[-1]
            found = launched_by(problem, tile)
            assert len(found) == len(problem.calls) and sum(x.flops for x in found) == sum(call.flops for call in problem.calls)
            assert all(constants(tile).items() <= x.options.items() for x in found)


def form(row: Row) -> tuple:
    """Rows that share it are served by the same forms of kernels."""
    return row.op == "weight gradient", row.op if row.taps == 16 else ""


def demand(call: Call) -> tuple[int, ...]:
    """The more memory a call takes the larger, among those of a form."""
    given = dict(call.arguments)
    return sum(map(len, given.get("weights", ()))), given.get("epilogue") == "residual_silu_grad", given.get("rest") is not None


@no_kernels
class TestCandidates:
    @every_step
    def test_are_tiles_that_fit(self, images, capability):
        for row in rows(capability):
            found = candidates(row, images)
            assert found[0] == chosen(row, images) and len(set(found)) == len(found) >= 4, row
            for tile in found:
                whole = row.taps == 16 and row.op == "forward"
                bi, bh, bw = tile.box(row.height, row.width)[0] if isinstance(tile, WgradTile) else tile.box(row.height, row.width, whole)
                assert bi * bh * bw <= tile.pixels and shared(tile, row.kind) <= SHARED[row.kind] and tile.stages >= 2
                if isinstance(tile, ConvTile):
                    assert bi * bh * bw == tile.pixels and bh % max(4 // bi, 1) == 0, "quarters are whole rows"
                    assert sum(tile.channels) * tile.pixels <= 255 * 32 * tile.warps
                    assert not (row.taps == 16 and row.op == "input gradient") or tile.pixels <= 128, "five loads would spill"

    @every_step
    def test_steps_are_those_of_the_lists(self, images, capability):
        """Else the order of K would be another."""
        for row in rows(capability):
            known = {(tiles[0].channels, tiles[0].block_k) for tiles in CONV[row.kind]}
            assert all((x.channels, x.block_k) in known for x in candidates(row, images) if isinstance(x, ConvTile))

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
        held = set()
        for kind in CONV:
            for tile in [*(tile for tiles in CONV[kind] for tile in tiles), *WGRAD[kind]]:
                parts = (*tile.rows, *tile.columns) if isinstance(tile, WgradTile) else (0, 0, *tile.channels)
                if most := found.get((kind, tile.pixels, *parts, tile.warps, tile.stages)):
                    assert most <= shared(tile, kind), tile
                    held |= {(kind, tile)} if shared(tile, kind) <= most + BARRIERS else set()  # not all in the kernels that take most
        assert len(held) >= 7 and {(kind, type(tile)) for kind, tile in held} == set(product(CONV, (ConvTile, WgradTile)))

    @pytest.mark.torture
    def test_shared_memory_is_enough_as_compiled(self):
        """Of every candidate, with the call that loads the most in its epilogue or has the most products."""
        calls = sorted((call for problem in problems(256, 90) for call in problem.calls), key=demand)
        heaviest, held = {form(call.row): call for call in calls}, {}
        for call, (images, capability) in product(calls, STEPS):
            row = call.row._replace(kind=conv_tiles.kind(capability))
            for tile in candidates(row, images):
                key = row.kind, form(row), replace(tile, waves=3) if isinstance(tile, WgradTile) else tile
                if key not in held:
                    (launch,) = launched_by(heaviest[form(row)], tile, capability)
                    held[key] = job(launch, capability), shared(tile, row.kind)
        with workers() as pool:
            found = compile_all(pool, list({x for x, _ in held.values()}))
        assert not {key: (found[x], most) for key, (x, most) in held.items() if not 0 < found[x].shared <= most}


def squares(*channels: int, tile: WgradTile | None = None) -> list[torch.Tensor]:
    """The gradients of 3×3 weights with as many input as output channels, of 8 images."""
    tensors = [torch.empty(8, 32, 32, n, dtype=torch.float16) for n in channels]
    return weight_gradients([[Product(x, x)] for x in tensors], 9, tile)


@no_kernels
class TestRows:
    @every_step
    def test_make_a_candidate_the_choice(self, images, capability, monkeypatch):
        """Whatever the batch, of the same channels and steps; of other rows nothing changes."""
        before = {row: chosen(row, images) for row in rows(capability)}
        for row in before:
            for tile in candidates(row, images):
                monkeypatch.setattr(conv_tiles, "TUNED", table(table_row(row, tile, images)))
                assert chosen(row, images) == tile
                if isinstance(tile, ConvTile):
                    assert conv_tiles.allowed(row, conv_tiles.TUNED[row]) == conv_tiles.TUNED[row]
                    assert {(x.channels, x.block_k) for x in (chosen(row, n) for n in BATCHES)} == {(tile.channels, tile.block_k)}
            assert {other: chosen(other, images) for other in before if other != row}.items() <= before.items()
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
        for problem in problems(256, 90):
            monkeypatch.setattr(conv_tiles, "TUNED", {})
            present, *others = problem.candidates
            tile = next(tile for tile in others if constants(tile) != constants(present))
            for call in problem.calls:
                monkeypatch.setattr(conv_tiles, "TUNED", {})
                untuned = launched_by(call, None)
                monkeypatch.setattr(conv_tiles, "TUNED", table(table_row(problem.row, tile, problem.images)))
                tuned = launched_by(call, None)
                assert constants(present).items() <= untuned[0].options.items()
                assert constants(tile).items() <= tuned[0].options.items(), call

    def test_never_part_a_joint_launch(self, monkeypatch):
        """Not a row of the first weight, whose tile serves all, nor of another, which is not looked up."""
        first, second = (conv_tiles.row(90, "weight gradient", 9, 32, 32, channels, channels) for channels in (384, 192))
        listed, tile = conv_tiles.wgrad(first), WgradTile((64, 0), (64, 0), 64, 4, 2)
        assert listed == conv_tiles.wgrad(second) != tile
        for row, expected in [(first, tile), (second, listed)]:
            monkeypatch.setattr(conv_tiles, "TUNED", {row: tile})
            (launch,) = launched(lambda: squares(384, 192))
            assert constants(expected).items() <= launch.options.items() and launch.options["C_2"] == 192

    def test_an_explicit_tile_is_for_kernels(self, monkeypatch):
        """Where the table names the library too: what is tuned is what would replace it."""
        row = conv_tiles.row(90, "weight gradient", 9, 32, 32, 192, 192)
        monkeypatch.setattr(conv_tiles, "LIBRARY", {row})
        assert launched(lambda: squares(192, tile=conv_tiles.wgrad(row))) and not launched(lambda: squares(192))

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
            assert isinstance(value, WgradTile) or conv_tiles.allowed(conv_tiles.Row(*row), value) == value, row


def sums(tile, x=None, weights=None, **others):
    """In place of a convolution, or of weight gradients."""
    return (weights[0][0].x if x is None else x).float().sum()


@no_kernels
class TestRehearsal:
    """With times made up by tile: the later a candidate, the quicker."""

    spread = 0.1

    @pytest.fixture
    def found(self, monkeypatch):
        """Problems whose calls are `sums`, of which the last candidate is wrong and the one before fails."""
        found = [heaviest(op, problems(8, 90, "digits")) for op in WAYS.values()]
        bad = [problem.candidates[-1] for problem in found], [problem.candidates[-2] for problem in found]

        def planted(tile, **others):
            if tile in bad[1]:
                raise RuntimeError("out of resources")
            return sums(tile, **others) * (1.01 if tile in bad[0] else 1)

        monkeypatch.setattr(bench.problems, "FUNCTIONS", dict.fromkeys(bench.problems.FUNCTIONS, planted))
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
        monkeypatch.setattr(runner, "_free", lambda device: None)  # takes its time
        return rounds

    def test_the_quickest_of_the_right_is_recommended(self, found, times, tmp_path, capsys, monkeypatch):
        tune.measure(found, tmp_path, 60, 3)
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
        assert {problem: chosen(problem.row, problem.images) for problem in found} == best

    def test_a_gain_within_the_noise_is_no_row(self, found, times, tmp_path, capsys):
        self.spread = 0.75
        tune.measure(found, tmp_path, 60, 3)
        out = capsys.readouterr().out
        assert out.count("within the noise") == len(found) and "No tile is quicker" in out and "TUNED" not in out
        assert out.endswith(f"Rows timed: {len(found)}\n")

    def test_without_the_present_tile_nothing_is_recommended(self, found, times, tmp_path, capsys, monkeypatch):
        first = found[0].candidates[0]

        def failing(tile, **others):
            if tile == first:
                raise RuntimeError("no luck")
            return sums(tile, **others)

        monkeypatch.setattr(bench.problems, "FUNCTIONS", dict.fromkeys(bench.problems.FUNCTIONS, failing))
        tune.measure(found[:1], tmp_path, 60, 3)
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
            tune.measure(found, tmp_path, 60, 3)
        first, second = (json.loads((tmp_path / f"{problem.name.replace('/', '_')}.json").read_text()) for problem in found[:2])
        assert "median" in first["candidates"][text(found[0].candidates[-3])] and "torch" in first["machine"]
        assert not any("median" in facts for facts in second["candidates"].values())
        assert table(*capsys.readouterr().out.partition("\n\n")[2].splitlines()[1:]).keys() == {found[0].row}

    def test_budget(self, found, times, tmp_path, capsys):
        tune.measure(found, tmp_path, 1e-9, 3)
        out, err = capsys.readouterr()
        assert not times and not list(tmp_path.iterdir()) and "3 of 3 rows left out, 100%" in err and out.endswith("Rows timed: 0\n")


@pytest.mark.skipif(not INTERPRET, reason="about kernels")
@pytest.mark.parametrize("taps", [9, 16])
@pytest.mark.parametrize("op", WAYS.values())
def test_candidates_agree(op, taps, tmp_path, monkeypatch):
    """The kernels themselves: whatever the tile, the result is the present one's."""
    monkeypatch.setattr(runner, "measure_in_turn", lambda runs, *args, **kwargs: [Timing(1, 1, 1, 1)] * len(runs))
    problem = heaviest(op, problems(1, 90, "digits"), taps)
    tune.measure([problem], tmp_path, 60, 1)
    (path,) = tmp_path.iterdir()
    facts = json.loads(path.read_text())["candidates"]
    assert facts.keys() == {text(tile) for tile in candidates(problem.row, 1)}
    assert all("median" in x and x["error"] < tune.TOLERANCE for x in facts.values()), facts


@no_kernels
class TestDryRun:
    def test_rehearses_all_kinds(self):
        assert {(x.row.taps, x.row.op) for x in small(90)} == set(product((1, 9, 16), WAYS.values()))

    def test_in_a_process_of_its_own(self, tmp_path, monkeypatch):
        """All but the GPU and what compiles for it: the kernels, the times, the file, the rows."""
        monkeypatch.chdir(tmp_path)
        environment = dict(os.environ)
        result = CliRunner().invoke(main, ["tune", "--dry-run", "--only=conv1x1/forward"])
        (problem,) = (x for x in small(90) if "conv1x1/forward" in x.name)
        (path,) = (tmp_path / "out" / "rehearsal" / "tune").iterdir()
        facts = json.loads(path.read_text())["candidates"]
        assert list(facts) == [text(tile) for tile in problem.candidates] and all(x["median"] > 0 for x in facts.values())
        assert result.exit_code == 0 and "rehearsal" in result.stdout.splitlines()[0]
        assert result.stdout.splitlines()[1].startswith(f"{problem.name}  present {text(problem.candidates[0])}")
        assert os.environ == environment


def hang_or_fail(problem, tile, capability):
    """In place of a compilation."""
    if problem.images == 8:
        time.sleep(60)
    raise RuntimeError("no luck")


@no_kernels
class TestCompilers:
    def test_nothing_goes_on_beside_the_measurement(self, monkeypatch, capsys):
        """Where a compilation hangs all are ended, and those of the next problem start anew; where all fail it is told."""
        monkeypatch.setattr(tune, "WORKERS", 1)
        failing, hanging = small(90)[0], problems(8, 90, "digits")[0]
        with tune.Compilers(90, hang_or_fail) as compilers:
            start = time.monotonic()
            assert not compilers(hanging, start + 0.5) and time.monotonic() - start < 15
            assert not multiprocessing.active_children()
            assert compilers(failing, time.monotonic() + 60)
        assert not multiprocessing.active_children()
        assert capsys.readouterr().err == f"{failing.name}: nothing compiled ahead: no luck\n"

    def test_a_problem_is_compiled_then_measured(self, tmp_path, monkeypatch):
        """On a GPU."""
        done = []

        class Recorder(ExitStack):
            def __call__(self, x, *args):
                done.append((type(x), x.name))
                return blank(x) | {"candidates": {"present": {"failure": "no GPU"}}} if isinstance(x, Case) else True

        monkeypatch.setattr(tune, "this_device", lambda: torch.device("cuda"))
        monkeypatch.setattr(tune, "Compilers", lambda capability: Recorder())
        monkeypatch.setattr(tune, "Isolated", lambda source, limit, deadline: Recorder())
        tune.run(small(90)[:2], tmp_path, 60, 90)
        assert done == [(kind, problem.name) for problem in small(90)[:2] for kind in (Problem, Case)]

    def test_what_a_candidate_launches_is_compiled(self, monkeypatch):
        warmed = []
        monkeypatch.setattr(tune, "warm", warmed.append)
        problem = problems(256, 90)[0]
        tile = problem.candidates[-1]
        tune.compile_candidate(problem, tile, 90)
        epilogues = {dict(call.arguments).get("epilogue", "sum") for call in problem.calls}
        assert {x.options["EPILOGUE"] for x in products(warmed)} == epilogues and len(warmed) == len({tune.warm_key(x) for x in warmed})
        assert all(constants(tile).items() <= x.options.items() for x in products(warmed))


@no_kernels
class TestCommand:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self):
        result = CliRunner().invoke(main, ["tune", "--budget=1"])
        assert result.exit_code == 1
        assert result.output == "Error: tune measures on a GPU, and there is none here; --dry-run rehearses it anywhere\n"

    def test_nothing_of_that_name(self):
        result = CliRunner().invoke(main, ["tune", "--dry-run", "--only=conv5x5"])
        assert result.exit_code == 1 and result.output.startswith("Error: no convolution's name contains 'conv5x5'; names are like tune/")
