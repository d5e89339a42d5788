"""Kernels of every form that EDM2-S launches (under torture: all of any preset), compiled for three architectures without a GPU;
faults are seen."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels
from kernels.jit import INTERPRET, Launch
from kernels.tracing import OnGPU
from tests.gate import loops, planted, table
from tests.gate.build import Facts, compile_all, compile_presets, jobs_of_presets, workers
from tests.gate.choice import family, of_every_run
from tests.gate.collect import CAPABILITIES, CASES, Job, distinct, job
from tests.gate.limits import broken, violations
from tests.gate.sass import Code, Loop

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels of the interpreter do not compile")
HALF, FLOAT = torch.empty(64, dtype=torch.float16), torch.empty(64)


@pytest.fixture(scope="module")
def pool():
    with workers() as pool:
        yield pool


@pytest.fixture(scope="module")
def jobs(pool):
    """All that the table holds."""
    return jobs_of_presets(pool)


@pytest.fixture(scope="module")
def presets(pool, jobs):
    """What every run compiles of them."""
    return compile_all(pool, of_every_run(jobs))


def test_every_form_is_compiled(jobs):
    """By the table's own rows: on sm_90 all epilogues, types, tiles and paths; elsewhere each kernel in all its tiles."""
    chosen = of_every_run(jobs)
    assert {x.shape_class for x in jobs if x.capability == 90} == {x.shape_class for x in chosen if x.capability == 90}
    assert {family(x) for x in jobs} == {family(x) for x in chosen}
    tiles = [{loops.tile(x) for x in some if x.name in loops.KERNELS} for some in (jobs, chosen)]
    assert tiles[0] == tiles[1] and len(set(chosen)) == len(chosen) < len(jobs)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_limits(presets, capability):
    """Those of design §5, in every version of Triton."""
    facts = {x: f for x, f in presets.items() if x.capability == capability}
    assert len({x.name for x in facts}) >= 10
    failures = broken(facts)
    assert not failures, "\n".join(["", *failures])


@pytest.mark.torture
def test_everything():
    """Where there is a table, all of it."""
    facts, held = compile_presets(everything=True), table.read()
    changes = table.differences(held, {key: row for key, row in table.rows(facts).items() if key in held})
    failures = [*broken(facts), *changes]
    assert not failures, "\n".join(["", *failures])


def test_table(jobs, presets):
    """A change to what kernels are compiled to shows in the table's diff; so does a kernel that comes or goes, compiled here or not."""
    if not table.PATH.exists():
        pytest.skip(f"no {table.PATH.name}: limits only")
    held = table.read()
    others = {key: held.get(key, ("?",) * len(table.FACTS)) for key in (table.key(x) for x in jobs if x not in presets)}
    changes = table.differences(held, others | table.rows(presets))
    assert not changes, "\n".join(["", *changes, "", "If that is what you want: python -m tests.gate --update"])


def test_loops(presets):
    """Nor does one to the main loops of the convolutions go unseen."""
    if not loops.PATH.exists():
        pytest.skip(f"no {loops.PATH.name}: limits only")
    changes = table.differences(loops.read(), loops.rows(presets), loops.COUNTS)
    assert not changes, "\n".join(["", *changes, "", "If that is what you want: python -m tests.gate --update"])


def launch(kernel, *args, **options) -> Launch:
    return Launch(kernel, (1,), args, options, 0, 0)


def product(m, n, k=64, warps=4, x=HALF, precision=None) -> Launch:
    return launch(planted.product_kernel, x, x, x, 64, M=m, N=n, K=k, PRECISION=precision, num_warps=warps)


def box() -> Launch:
    w = TensorDescriptor(torch.empty(128, 9, 64, dtype=torch.float16), [128, 9, 64], [576, 64, 1], [128, 1, 64])
    x = TensorDescriptor(torch.empty(128, 64, dtype=torch.float16), [128, 64], [64, 1], [128, 64])
    return launch(planted.box_kernel, w, x, HALF, 64, M=128, N=128, K=64, num_warps=8)


TWO = launch(planted.two_products_kernel, HALF, HALF, HALF, 64, M=128, N=512, K=16, num_warps=8)
PLANTED = {
    "fine": (CAPABILITIES, product(128, 128, warps=8), []),
    "fine fp32": ((80, 90), product(32, 32, 16, x=FLOAT, precision="ieee"), []),
    "too large": ((90,), product(128, 256, 32), ["C75", "bytes spilled", "spills in a loop"]),
    "too large for Ampere": ((80,), product(128, 256, 32), ["bytes spilled", "spills in a loop"]),
    "shared memory": ((90,), product(64, 64, 1024), ["of shared memory"]),
    "tensor memory": ((100,), TWO, ["1024 columns", "a trap", "no tensor-core instruction", "4 registers"]),
    "loaded operand": ((90,), box(), ["operands of matrix products"]),
    "spill": ((90,), launch(planted.spilling_kernel, FLOAT, FLOAT, BLOCK=8192, num_warps=1), ["bytes spilled"]),
    "assertion": (CAPABILITIES, launch(planted.trapping_kernel, FLOAT, debug=True), ["a trap"]),
    "error": ((90,), launch(planted.failing_kernel, FLOAT), ["does not compile"]),
}


@pytest.fixture(scope="module")
def found(pool):
    """The violations of all planted kernels."""
    jobs = {job(x, capability): name for name, (capabilities, x, _) in PLANTED.items() for capability in capabilities}
    return {(jobs[x], x.capability): list(violations(x, f)) for x, f in compile_all(pool, list(jobs)).items()}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(found, name):
    """Each fault is named, and nothing else."""
    capabilities, _, expected = PLANTED[name]
    for capability in capabilities:
        messages = found[name, capability]
        assert all(any(text in m for m in messages) for text in expected), messages
        assert all(any(text in m for text in expected) for m in messages), messages


def test_sizes_of_one(pool):
    """Integers that are 1 are constants to Triton: a network of one class, one image of one pixel."""
    launches = []
    with FakeTensorMode(), OnGPU(launches.append, 90):
        kernels.mp_weight(torch.empty(64, 1, requires_grad=True)).sum().backward()
        x = torch.empty(1, 1, 1, 8, dtype=torch.float16, requires_grad=True)
        y = kernels.cat_silu(x, x, 0.5)
        y.backward(torch.empty_like(y))
    jobs = [job(x, 90) for x in launches]
    assert {x.name for x in jobs} >= {"mp_weight_kernel", "mp_weight_backward_kernel", "cat_silu_kernel", "cat_silu_backward_kernel"}
    assert not {x.name: f.failure for x, f in compile_all(pool, jobs).items() if f.failure}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (Facts(registers=40, spilled=32), None),
        (Facts(registers=40, spilled=36), "36 bytes spilled"),
        (Facts(registers=16), None),
        (Facts(registers=32, wants_products=True, products=8), "32 registers"),
        (Facts(registers=33, wants_products=True, products=8), None),
        (Facts(registers=99, wants_products=True), "no tensor-core"),
        (Facts(registers=99, products=8, wants_products=True, spilled=4, spills_in_loops=1), "1 spills in a loop"),
        (Facts(registers=99, shared=232448, tensor_memory=512), None),
        (Facts(registers=99, shared=232449), "232449 bytes of shared memory"),
    ],
)
def test_edges_of_the_limits(facts, message):
    messages = list(violations(Job(90, "", "", (), ()), facts))
    assert len(messages) == bool(message) and all(message in m for m in messages)


LISTING = """
        /*0000*/              {first} ;
        /*0010*/              HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;   /* 0x1 */
        /*0020*/              HFMA2.MMA R61, -RZ, RZ, 0, 0 ;
        /*0030*/              @!P1 BRA 0x0090 ;
        /*0040*/              {inside} ;
        /*0050*/              @P0 BRA 0x0010 ;
        /*0060*/              {after} ;
        /*0070*/              @P2 BRA 0x0060 ;
        /*0080*/              EXIT ;
        /*0090*/              {aside} ;
        /*00a0*/              BRA 0x0040 ;
        /*00b0*/              BRA 0x00b0 ;
"""


@pytest.mark.parametrize(("place", "count"), [("first", 0), ("inside", 1), ("after", 0), ("aside", 1)])
def test_spills_count_where_control_returns_to_a_product(place, count):
    """Also out of line; not in another loop, nor around the loop."""
    nothing = dict.fromkeys(("first", "inside", "after", "aside"), "NOP")
    code = Code(LISTING.format(**{**nothing, place: "STL [R1+0x4], R5"}))
    assert len(code.instructions) == 12 and len(code.tensor_core) == 1 and code.spills_in_loops() == count


STEP = """
        /*0000*/              LDS R4, [R2] ;
        /*0010*/              {product} ;
        /*0020*/              {more} ;
        /*0030*/              @P0 BRA 0x0010 ;
        /*0040*/              EXIT ;
"""
WGMMA = "HGMMA.64x128x16.F32 R24, gdesc[UR4].tnspA, R24"


@pytest.mark.parametrize(
    ("product", "more", "warps", "expected"),
    [
        (WGMMA, "NOP", 8, dict(multiply_adds=2 * 64 * 128 * 16)),
        (WGMMA, "HGMMA.64x64x16.F32 R8, R4, gdesc[UR4], R8, gsb0", 4, dict(products=2, multiply_adds=64 * 192 * 16, from_registers=1)),
        ("HMMA.16816.F32 R4, R8.reuse, R2, R4", "LDSM.16.M88.4 R8, [R2]", 4, dict(multiply_adds=4 * 16 * 8 * 16, shared_loads=1)),
        ("HMMA.16816.F32 R4, R8, R2, R4", "LDGSTS.E.BYPASS.128 [R3], [R4.64]", 8, dict(multiply_adds=8 * 16 * 8 * 16, copies=1)),
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR2], idesc[UR3], UPT", "BAR.SYNC 0x0", 8, dict(multiply_adds=2**19, barriers=1)),
        (WGMMA, "UTMALDG.4D [UR8], [UR6]", 4, dict(multiply_adds=64 * 128 * 16, copies=1)),
        (WGMMA, "LDG.E R4, [R2.64]", 4, dict(multiply_adds=64 * 128 * 16, global_loads=1)),
    ],
)
def test_counts_of_a_loop(product, more, warps, expected):
    nothing = dict.fromkeys(Loop._fields, 0) | dict(products=1, instructions=3)
    assert Code(STEP.format(product=product, more=more)).main_loops(warps) == [Loop(**{**nothing, **expected})]


def convolution(capability: int = 90, taps: int = 9) -> Job:
    """128 channels × 32 pixels in steps of 16: 65,536 multiply-adds."""
    sizes = dict(BN0=64, BN1=64, BI=1, BH=2, BW=16, BLOCK_K=16, K=64, TAPS=taps)
    return Job(capability, "", "conv_kernel", (), tuple(sizes.items()))


@pytest.mark.parametrize(
    ("job", "found", "message"),
    [
        (convolution(), [Loop(1, 65536, 0, 0, 0, 2, 2, 9)], None),
        (convolution(), [Loop(1, 65536, 0, 0, 0, 2, 2, 9), Loop(1, 65535, 0, 0, 0, 2, 2, 9)], "65535 multiply-adds in its loop"),
        (convolution(), [Loop(1, 65536, 1, 0, 0, 2, 2, 9)], "operand from registers"),
        (convolution(), [Loop(1, 65536, 0, 1, 0, 2, 2, 9)], "1 loads into registers"),
        (convolution(100), [Loop(1, 65536, 0, 0, 2, 2, 2, 9)], "2 loads into registers"),
        (convolution(80), [Loop(1, 65536, 0, 8, 2, 2, 2, 9)], None),
        (convolution(), [], "no loop"),
        (convolution(taps=1), [], None),
        (Job(90, "", "matmul_kernel", (), ()), [Loop(1, 1, 1, 1, 1, 1, 1, 1)], None),
    ],
)
def test_limits_of_loops(job, found, message):
    messages = list(violations(job, Facts(registers=99, loops=tuple(found))))
    assert len(messages) == bool(message) and all(message in m for m in messages)


def test_jobs_are_what_triton_tells_apart():
    def of(*args, **options):
        return job(launch(planted.product_kernel, HALF, HALF, HALF, *args, **options), 90)

    assert of(32) == of(64) and of(17) == of(18)
    assert len({of(1), of(17), of(32), of(2**32), of(None), of(32, M=16), of(32, num_warps=8)}) == 7
    assert of(steps=32) == of(steps=64) and of(steps=17) == of(steps=18) != of(steps=32)
    assert job(product(64, 64), 80) != job(product(64, 64), 90)
    assert str(job(box(), 90)).startswith("sm_90 box_kernel(fp16[128x1x64] fp16[128x64] fp16 16)")


def test_of_incomplete_cases_one_job_for_each_shape_class():
    complete, other = CASES[0], CASES[1]
    jobs = [job(launch(planted.failing_kernel, HALF, C=c, BLOCK=b), 90) for c, b in [(192, 1), (384, 1), (64, 1), (64, 2), (32, 2)]]
    assert complete.complete == (90,) and not other.complete
    assert distinct([complete, other], [jobs[:2], jobs[1:]]) == [jobs[0], jobs[1], jobs[3]]
    assert distinct([complete, other], [jobs[:2], jobs[1:]], everything=True) == jobs


class TestTable:
    old = {("sm_90", "k", "fp16 16", "C=8, D=1"): ("40", "0", "0", "0", "0"), ("sm_90", "m", "", ""): ("1",) * 5}

    def test_round_trip(self, tmp_path):
        table.write(self.old, tmp_path / "table.csv")
        assert table.read(tmp_path / "table.csv") == self.old and table.read(tmp_path / "none.csv") == {}

    def test_differences_in_words(self):
        key, gone = self.old
        new = {key: ("48", "8", "0", "0", "0"), ("sm_90", "n", "", ""): ("1",) * 5}
        assert table.differences(self.old, self.old) == []
        assert table.differences(self.old, new) == [
            "registers 40 → 48, spilled 0 → 8: sm_90 k fp16 16 C=8, D=1",
            "gone: sm_90 m  ",
            "new: sm_90 n  ",
        ]

    def test_rows_leave_out_what_does_not_compile(self):
        jobs = [Job(90, "module", "kernel", (torch.float16, 16), (("C", c), ("SCALE", 1 / 3))) for c in (8, 16)]
        rows = table.rows({jobs[0]: Facts(registers=40, shared=16), jobs[1]: Facts(failure="no")})
        assert rows == {("sm_90", "kernel", "fp16 16", "C=8 SCALE=0.3333"): ("40", "0", "16", "0", "0")}
