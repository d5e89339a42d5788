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
from edm2.layers import MPConv
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


OUT = 40  # channels of outputs
SPLITS = 4  # of the 18 rows of pixels in a weight's gradient
DM_PARTS = 8  # quarters of the two boxes of 4 × 16 pixels that cover an image


def product(k: int, c: int, taps: int, more: int = 0) -> tuple[str, int]:
    """A convolution: x, w → y. `more` elements are read or written by its epilogue."""
    return "conv", 2 * (P * (k + c) + taps * k * c + more)


def weight_gradient(k: int, c: int, taps: int) -> list[tuple[str, int]]:
    """x, g → fp32 parts → their sum."""
    return weight_gradients([(k, c)], taps)


def weight_gradients(weights: list[tuple[int, int]], taps: int) -> list[tuple[str, int]]:
    """The same of several over as many pixels."""
    parts = 4 * SPLITS * taps * sum(k * c for k, c in weights)
    return [("wgrad", 2 * P * sum(map(sum, weights)) + parts), ("sum_parts", parts + parts // SPLITS)]


def together(name: str, *launches: tuple[str, int]) -> tuple[str, int]:
    assert {x for x, _ in launches} == {name}
    return name, sum(size for _, size in launches)


def clipped(c: int, clip: float | None) -> tuple[str, int]:
    """g, y → g′."""
    return "masked_gradient", 2 * (2 + (clip is not None)) * P * c


def dm_of(parts: int, c: int) -> tuple[str, int]:
    """fp32 parts → dm."""
    return "sum_parts", N * c * (4 * parts + 2)


@pytest.mark.parametrize("taps", [9, 1])
def test_conv(taps):
    forward, backward = both_ways(kernels.conv, [(N, H, W, C), (taps, OUT, C)], HALF)
    assert forward == [product(C, OUT, taps)]
    assert backward == [*weight_gradient(C, OUT, taps), product(OUT, C, taps)]


def test_conv_silu():
    """x, w, m → y, u; then g, u, m → du and a part of dm for each image."""
    forward, backward = both_ways(kernels.conv_silu, [(N, H, W, C), (9, OUT, C), (N, OUT)], HALF)
    assert forward == [product(C, OUT, 9, N * OUT + P * OUT)]
    pointwise = ("modulated_silu_backward", 2 * (3 * P * OUT + N * OUT) + 4 * N * OUT)
    assert backward == [pointwise, dm_of(1, OUT), *weight_gradient(C, OUT, 9), product(OUT, C, 9)]


@pytest.mark.parametrize("clip", [None, 256.0])
def test_conv_sum(clip):
    """The residual's gradient is g′."""
    forward, backward = both_ways(kernels.conv_sum, [(N, H, W, C), (9, OUT, C), (N, H, W, OUT)], HALF, 0.3, clip)
    assert forward == [product(C, OUT, 9, P * OUT)]
    assert backward == [clipped(OUT, clip), product(OUT, C, 9), *weight_gradient(C, OUT, 9)]


def test_conv_cat_sum():
    """a, b and both their weights in the launch of the 3×3."""
    a, b = 8, 16
    shapes = [(N, H, W, C), (9, OUT, C), (N, H, W, a), (N, H, W, b), (1, OUT, a + b)]
    forward, backward = both_ways(kernels.conv_cat_sum, shapes, HALF, 256.0)
    assert forward == [product(C, OUT, 9, (P + OUT) * (a + b))]
    skip = [*weight_gradient(a + b, OUT, 1), product(OUT, a + b, 1)]
    assert backward == [clipped(OUT, 256.0), product(OUT, C, 9), *weight_gradient(C, OUT, 9), *skip]


def second_backward(channels: int) -> tuple[str, int]:
    """Of a branch's second convolution: g, w, u, m → du and fp32 parts of dm."""
    return product(channels, OUT, 9, P * OUT + N * OUT + 2 * N * DM_PARTS * OUT)


def test_residual_branch_norm():
    """No pass for the gradient of the main path, nor for the clip."""
    shapes = [(N, H, W, C), (9, OUT, C), (N, OUT), (9, C, OUT)]
    forward, backward = both_ways(kernels.residual_branch_norm, shapes, HALF, 0.3, 256.0)
    norm = "pixel_norm_silu", 2 * 3 * P * C + 4 * P
    assert forward == [norm, product(C, OUT, 9, N * OUT + P * OUT), product(OUT, C, 9, P * C)]
    norm = "pixel_norm_silu_backward", 2 * 4 * P * C + 4 * P
    wgrad, sums = weight_gradients([(C, OUT), (OUT, C)], 9)
    assert backward == [second_backward(C), product(OUT, C, 9), wgrad, together("sum_parts", sums, dm_of(DM_PARTS, OUT)), norm]


def test_residual_branch_norm_fork():
    """The norm's backward also reads the other reader's gradient, and x for the clip."""
    shapes = [(N, H, W, C), (9, OUT, C), (N, OUT), (9, C, OUT)]
    _, backward = both_ways(kernels.residual_branch_norm_fork, shapes, HALF, 0.3, 256.0, False, 256.0)
    assert backward[-1] == ("pixel_norm_silu_backward", 2 * 6 * P * C + 4 * P)


def test_residual_branch_silu():
    """The last epilogue reads g and x."""
    shapes = [(N, H, W, C), (9, OUT, C), (N, OUT), (9, C, OUT)]
    forward, backward = both_ways(kernels.residual_branch_silu, shapes, HALF, 0.3, 256.0, 256.0)
    assert forward == [("mp_silu", 2 * 2 * P * C), product(C, OUT, 9, N * OUT + P * OUT), product(OUT, C, 9, P * C)]
    wgrad, sums = weight_gradients([(C, OUT), (OUT, C)], 9)
    assert backward == [second_backward(C), wgrad, together("sum_parts", sums, dm_of(DM_PARTS, OUT)), product(OUT, C, 9, 2 * P * C)]


@pytest.mark.parametrize("op", ["residual_branch_silu", "residual_branch_norm"])
def test_activated_results(op):
    """A branch's last epilogue writes what the next reads, who then has no pass of its own."""
    shapes = [(N, H, W, C), (9, OUT, C), (N, OUT), (9, C, OUT)]
    forward, _ = both_ways(lambda *inputs: getattr(kernels, op)(*inputs, 0.3, 256.0, activate=0.7)[0], shapes, HALF)
    assert forward[-1] == product(OUT, C, 9, 2 * P * C)
    forward, _ = both_ways(lambda x, *weights: kernels.residual_branch_silu(x, *weights, 0.3, s=torch.empty_like(x)), shapes, HALF)
    assert [name for name, _ in forward] == ["conv", "conv"]


def test_residual_branch_cat():
    """Each source's gradient through w_skip is read by the epilogue of that through w0, with the source."""
    a, b = 8, 16
    shapes = [(N, H, W, a), (N, H, W, b), (9, OUT, C), (N, OUT), (9, C, OUT), (1, C, a + b)]
    assert a + b == C
    forward, backward = both_ways(kernels.residual_branch_cat, shapes, HALF, 0.5, 256.0, 256.0)
    activations = [("mp_silu", 2 * 2 * P * k) for k in (a, b)]
    assert forward == [*activations, product(C, OUT, 9, N * OUT + P * OUT), product(OUT, C, 9, (P + C) * (a + b))]
    skip, *sums = weight_gradient(a + b, C, 1)
    wgrad, more = weight_gradients([(C, OUT), (OUT, C)], 9)
    last = together("sum_parts", *sums, more, dm_of(DM_PARTS, OUT))
    assert backward == [skip, product(C, a + b, 1), second_backward(C), product(OUT, a + b, 9, 2 * P * (a + b)), wgrad, last]


def test_attention_branch():
    """The residual's gradient is read where that of qkv's convolution is written."""
    channels = HEADS * D
    shapes = [(N, H, W, channels), (1, 3 * channels, channels), (1, channels, channels)]
    forward, backward = both_ways(kernels.attention_branch, shapes, HALF, HEADS, 0.3, 256.0)
    assert [name for name, _ in forward] == ["conv", "cosine_attention", "conv"]
    assert forward[::2] == [product(channels, 3 * channels, 1), product(channels, channels, 1, P * channels)]
    qkv, *sums = weight_gradient(channels, 3 * channels, 1)  # these few channels have tiles of their own
    proj, *more = weight_gradient(channels, channels, 1)
    products = [product(channels, channels, 1), product(3 * channels, channels, 1, P * channels)]
    assert [x for x in backward if "attention" not in x[0]] == [*products, qkv, proj, together("sum_parts", *sums, *more)]


@pytest.mark.parametrize("readers", [1, 2])
def test_fork(readers):
    """The readers' gradients and x → their sum."""
    forward, backward = both_ways(kernels.fork, [(N, H, W, C)], HALF, 256.0, readers)
    assert (forward, backward) == ([], [("masked_gradient", 2 * (readers + 2) * P * C)])


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_linear(dtype):
    """A weight's gradient is fp32."""
    n, k, m, b = 7, 24, 40, BYTES[dtype]
    forward, backward = both_ways(kernels.linear, [(n, k), (1, m, k)], dtype, 2.0, 1.0)
    assert forward == [("matmul", b * (n * k + m * k + n * m))]
    assert sorted(backward) == sorted([("matmul", b * (n * m + m * k + n * k)), ("matmul", b * (n * m + n * k) + 4 * m * k)])


def test_preconditioning_and_loss():
    """Images in fp32 outside of the network, in fp16 with 8 channels inside; some numbers for each image."""
    channels, image, inside = 4, (N, 4, H, W), (N, H, W, 8)
    with FakeTensorMode():
        x, y, sigma, u, freqs = (torch.empty(shape) for shape in (image, image, N, N, C))
        f = torch.empty(inside, dtype=HALF, requires_grad=True)
        d, logvar = (torch.empty(shape, requires_grad=True) for shape in (image, N))
        outputs = []
        calls = {
            "mp_fourier": lambda: kernels.mp_fourier(sigma, freqs, freqs),
            "precondition_input": lambda: kernels.precondition_input(x, sigma, 0.5, HALF),
            "precondition_output": lambda: outputs.append(kernels.precondition_output(f, x, sigma, 0.5)),
            "precondition_output_backward": lambda: torch.autograd.grad(outputs[-1], f, x),
            "uncertainty_loss": lambda: outputs.append(kernels.uncertainty_loss(d, y, sigma, logvar, 0.5)),
            "uncertainty_loss_backward": lambda: outputs[-1].sum().backward(),
        }
        images = 4 * channels * P
        expected = {
            "mp_fourier": 4 * (N + C + N * C),  # x, frequencies (phases are the same tensor) → features
            "precondition_input": images + 2 * 8 * P + 4 * 2 * N,  # x, σ → x′, c_noise
            "precondition_output": 2 * images + 2 * 8 * P + 4 * N,  # F, x, σ → D
            "precondition_output_backward": images + 2 * 8 * P + 4 * N,  # g, σ → dF
            "uncertainty_loss": 3 * images + 4 * 2 * N,  # D, y, σ, u → loss
            "uncertainty_loss_backward": 3 * images + 4 * (1 + 3 * N),  # one g for all, D, y, σ, u → dD, du
        }
        for name, call in calls.items():
            assert launched(call) == [(name, expected[name])]


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
