"""Every kind of benchmark case of the convolutions, on small sizes: built, compared and written as on a GPU.

With the kernels in Triton's interpreter (`TRITON_INTERPRET=1`) also those candidates that are kernels alone.
"""

import json

import pytest
import torch

from bench import cases
from bench.convs import LIBRARY, WAYS, conv_cases, conv_shapes
from bench.fused import FUSIONS, fused_cases, sites
from bench.isolated import case_launches
from bench.models import compile_name
from bench.problems import problems
from bench.runner import run_cases
from kernels import conv_tiles
from kernels.jit import INTERPRET

PRESET = "edm2-img512-s"
KINDS = ("kernels/conv", *(f"kernels/{op}/" for op in FUSIONS))
no_kernels = pytest.mark.skipif(INTERPRET, reason="not about what kernels compute")
SMALL = [case for case in cases.rehearsal_cases() if case.name.startswith(KINDS)]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_candidates_agree(case, tmp_path):
    run_cases([case], tmp_path, budget=60, runs=3)
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    found, facts = stored["candidates"], case.facts
    assert not {name: f["failure"] for name, f in found.items() if "failure" in f}
    expected = {"eager", compile_name(torch.device("cpu"))} if "op" in facts else {"cuDNN"}
    only_kernels = facts.get("op") in ("silu_grad", "residual_silu_grad") and not INTERPRET
    expected |= (set() if only_kernels else {"edm2"}) | ({LIBRARY} if INTERPRET and "row" in facts else set())
    assert found.keys() == expected and all(f["median"] > 0 for f in found.values())


@no_kernels
def test_every_kind_is_rehearsed():
    rehearsed = {case.name.rpartition("/")[0] for case in SMALL}
    measured = {case.name.rpartition("/")[0] for case in cases.gpu_cases() if case.name.startswith(KINDS)}
    assert measured == rehearsed and len(measured) == 2 * len(WAYS) + sum(len(fusion.ways) for fusion in FUSIONS.values())


@no_kernels
def test_parts_are_cases_of_their_own():
    """Hence what is added to them can be told."""
    alone = {case.name for k in (3, 1) for case in conv_cases(PRESET, 256, k)}
    assert all(set(case.facts["parts"]) <= alone and case.facts["parts"] for case in fused_cases(PRESET, 256, saves=True))


@no_kernels
def test_sites_make_the_network():
    """All 3×3 convolutions but the first and the last are the two of some branch, and sums where they are found."""
    inner = sum(count for (*_, k), count in conv_shapes(PRESET).items() if k == 3) - 2
    counts = {op: sum(site.count for name, site in sites(PRESET) if name == op) for op in FUSIONS}
    branches = sum(count for name, count in counts.items() if name.startswith("residual_branch"))
    first, second = counts["conv_silu"] + counts["conv_silu_up"], counts["conv_sum"] + counts["conv_cat_sum"]
    assert 2 * branches == inner == first + second and counts["conv_silu_up"] == counts["residual_branch_up"] > 0
    assert counts["silu_grad"] == branches and counts["residual_silu_grad"] == counts["residual_branch_silu"]


@no_kernels
def test_rows_are_those_of_a_training_step():
    """The library knows no second tensor."""
    asked = {problem.row._replace(rest=0) for problem in problems(PRESET, 256, 90)}
    cases = [*conv_cases(PRESET, 256, 3), *fused_cases(PRESET, 256, saves=True)]
    assert {("wgmma", *case.facts["row"]) for case in cases if "row" in case.facts and case.facts["row"][0] == "input gradient"} <= asked


@no_kernels
def test_rows_are_those_that_the_table_is_asked_for(monkeypatch):
    """One that names a row starts the library's convolution there, and no kernel."""
    for case in (*conv_cases(PRESET, 256, 3), *fused_cases(PRESET, 256, saves=True)):
        if "row" in case.facts:
            monkeypatch.setattr(conv_tiles, "LIBRARY", {("wgmma", *case.facts["row"])})
            names = {x.kernel.__name__ for x in case_launches(case, 90)}
            assert not names & {"conv_kernel", "wgrad_kernel"}, case.name
