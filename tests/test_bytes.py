"""The bytes that the ledger counts for each launch are its inputs plus its outputs, worked out here from the shapes."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import edm2
import kernels
from bench.cases import kernel_cases
from bench.ledger import fake_network, make_state
from bench.ops import PLAIN, Call, calls_of, traffic
from edm2.network import MPConv
from edm2.weights import StepWeights
from kernels.tracing import OnGPU

HALF, FLOAT = torch.float16, torch.float32
BYTES = {HALF: 2, torch.bfloat16: 2, FLOAT: 4}
N, H, W, C = 3, 6, 10, 24
P = N * H * W  # pixels
HEADS, D = 2, 16


def launched(run) -> list[tuple[str, int]]:
    """Kernel and bytes of each launch."""
    launches = []
    with OnGPU(launches.append):
        run()
    return [(x.kernel.__name__.removesuffix("_kernel"), x.bytes) for x in launches]


def both_ways(op, shapes, dtype, *constants):
    """The launches of an op, and those of its derivative, on tensors of these shapes."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        outputs = []
        forward = launched(lambda: outputs.append(op(*tensors, *constants)))
        outputs = outputs[0] if isinstance(outputs[0], tuple) else outputs
        gradients = [torch.empty_like(y) for y in outputs]
        return forward, launched(lambda: torch.autograd.grad(outputs, tensors, gradients))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("op", "shapes", "constants", "forward", "backward"),
    [
        # Elements of activations, and fp32 numbers: reads + writes
        ("pixel_norm_silu", [(N, H, W, C)], (), ((1 + 2) * P * C, P), ((3 + 1) * P * C, P)),  # gy, gs, y, rms → dx
        ("down_pixel_norm_silu", [(N, H, W, C)], (), ((1 + 2 / 4) * P * C, P / 4), ((3 / 4 + 1) * P * C, P / 4)),
        ("mp_silu", [(N, H, W, C)], (), ((1 + 1) * P * C, 0), ((2 + 1) * P * C, 0)),  # g, x → dx
        ("mp_sum", [(N, H, W, C)] * 2, (0.3, None), ((2 + 1) * P * C, 0), ((1 + 2) * P * C, 0)),
        ("mp_sum", [(N, H, W, C)] * 2, (0.3, 256.0), ((2 + 1) * P * C, 0), ((2 + 2) * P * C, 0)),  # g, y → da, db
        ("cat_silu", [(N, H, W, C), (N, H, W, 40)], (0.5,), (2 * P * (C + 40), 0), (3 * P * (C + 40), 0)),
    ],
)
def test_pointwise(op, shapes, constants, forward, backward, dtype):
    found = both_ways(getattr(kernels, op), shapes, dtype, *constants)
    name = op.removeprefix("down_")
    for launches, suffix, (elements, numbers) in zip(found, ("", "_backward"), (forward, backward)):
        assert launches == [(name + suffix, BYTES[dtype] * elements + 4 * numbers)]


@pytest.mark.parametrize(
    ("dtype", "tokens", "backward"),
    [
        (HALF, (16, 16), ["cosine_attention_backward"]),
        (HALF, (8, 8), ["cosine_attention_backward"]),
        (HALF, (8, 24), ["cosine_attention_dq", "cosine_attention_dkv"]),
        (FLOAT, (8, 8), ["cosine_attention_dq", "cosine_attention_dkv"]),
    ],
)
def test_attention(dtype, tokens, backward):
    """In units of one of q, k, v and y, and fp32 numbers per query."""
    found = both_ways(kernels.cosine_attention, [(N, *tokens, HEADS * 3 * D)], dtype, HEADS)
    queries = N * HEADS * math.prod(tokens)
    amounts = {
        "cosine_attention": (3 + 1, 1),  # qkv → y, log of sums
        "cosine_attention_backward": (3 + 2 + 3, 1),  # qkv, g, y, log of sums → dqkv
        "cosine_attention_dq": (3 + 2 + 1, 2),  # the same → dq, delta
        "cosine_attention_dkv": (3 + 1 + 2, 2),  # qkv, g, log of sums, delta → dk, dv
    }
    for launches, names in zip(found, (["cosine_attention"], backward)):
        expected = [(name, queries * (D * BYTES[dtype] * amounts[name][0] + 4 * amounts[name][1])) for name in names]
        assert launches == expected


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_linear(dtype):
    """A weight's gradient is fp32."""
    n, k, m, b = 7, 24, 40, BYTES[dtype]
    forward, backward = both_ways(kernels.linear, [(n, k), (1, m, k)], dtype)
    assert forward == [("matmul", b * (n * k + m * k + n * m))]
    assert sorted(backward) == sorted([("matmul", b * (n * m + m * k + n * k)), ("matmul", b * (n * m + n * k) + 4 * m * k)])


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(("shape", "heads"), [((40, 24, 3, 3), 0), ((48, 24, 1, 1), 2), ((40, 24), 0)])
@pytest.mark.parametrize("gained", [False, True])
def test_weight(shape, heads, gained, dtype):
    """raw, gain → prepared, lengths; gradient, raw, lengths, gain → gradient, each row's share of the gain's."""
    size, rows, b = math.prod(shape), shape[0], BYTES[dtype]
    shapes = [shape, ()] if gained else [shape]

    def prepare(w, gain=None):
        return kernels.mp_weight(w, gain, dtype, heads)

    forward, backward = both_ways(prepare, shapes, FLOAT)
    assert forward == [("mp_weight", 4 * size + b * size + 4 * rows + 4 * gained)]
    assert backward[0] == ("mp_weight_backward", b * size + 4 * size + 4 * rows + 4 * gained + 4 * size + 4 * rows)
    assert len(backward) == 1


@pytest.fixture
def network():
    """EDM2-S."""
    with fake_network("edm2-img512-s") as net:
        yield net


def only_tables(extra: int, rows: int, tensors: int) -> bool:
    """Are these the tables of a launch over many tensors: (tensor, row) of each row, sizes, addresses, gains, rates?"""
    return 8 * rows <= extra <= 8 * rows + 128 * tensors


def test_weights_of_a_network(network):
    """Convolutions are prepared in fp16, linear layers in fp32. raw → prepared, lengths; gradient, raw, lengths → gradient, shares.

    Of those behind an up-sampling 9 taps become 16.
    """
    weights = [module.weight for module in network.modules() if isinstance(module, MPConv)]
    rows = sum(len(w) for w in weights)
    half, full = (sum(w.numel() for w in weights if w.ndim == n) for n in (4, 2))
    more = sum(module.weight.numel() * 7 // 9 for module in network.modules() if isinstance(module, MPConv) and module.up)
    assert more
    step = StepWeights(network)

    def prepare():
        with step.prepared():
            prepared = [module.prepared for module in network.modules() if getattr(module, "prepared", None)]
            for weight in [*prepared, network.unet.prepared_modulation]:
                weight.master.grad = torch.empty(weight.master.shape)

    prepared, projected = launched(prepare), launched(step.project)
    assert {name for name, _ in prepared} == {"prepare"} and {name for name, _ in projected} == {"project", "sum_rows"}
    expected = 4 * (half + full) + 2 * (half + more) + 4 * full + 4 * rows, 3 * 4 * (half + full) + 4 * more + 2 * 4 * rows
    for launches, size in zip((prepared, projected), expected):
        assert only_tables(sum(n for name, n in launches if name != "sum_rows") - size, rows, len(weights))


@pytest.mark.parametrize("stds", [(), (0.05, 0.10)])
def test_optimizer(network, stds):
    """w, m, v and each average read and written, g read: 44 bytes per parameter with two averages."""
    optimizer = edm2.EDM2Optimizer(network, ema_stds=stds)
    make_state(network, optimizer)
    for p in network.parameters():
        p.grad = torch.empty_like(p)
    parameters = list(network.parameters())
    size, rows = sum(p.numel() for p in parameters), sum(len(p) if p.ndim else 1 for p in parameters)
    ((name, counted),) = launched(lambda: optimizer.step(0.01, 2, 1))
    bad = 4 * rows  # each row's number of non-finite gradients
    assert name == "adam" and only_tables(counted - 4 * size * (2 * (3 + len(stds)) + 1) - bad, rows, len(parameters))


def test_cases_count_the_same():
    """What rates are computed from, of each kernel of EDM2-S in the registry."""
    calls = [call for n in (256, 8) for call in calls_of("edm2-img512-s", n)]
    assert {call.op for call in calls} == set(PLAIN)
    cases = {case.name: case for part in kernel_cases() for case in part}
    assert len(cases) == 2 * len(calls) + 2
    for name, elements in {
        "pixel_norm_silu/forward/n256-64x64-192": 3 * 256 * 64 * 64 * 192,
        "cat_silu/backward/n8-32x32-576-384": 3 * 8 * 32 * 32 * 960,
    }.items():
        assert cases[f"kernels/{name}"].bytes == pytest.approx(2 * elements, rel=0.01)
    call = Call("cosine_attention", ((256, 16, 16, 1728),), (9,))
    assert call in calls and cases["kernels/cosine_attention/forward/n256-256x9"].bytes == traffic(call, False)[1]
