"""The optimizer's kernel against PyTorch's path: in the interpreter (TRITON_INTERPRET=1), or on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import edm2
import kernels
from edm2.network import MPConv
from kernels.adam import AdamPass
from kernels.jit import INTERPRET
from tests.conftest import relative_error
from tests.tolerances import EXACT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRET, reason="needs TRITON_INTERPRET=1 or a CUDA device")


class Rows(nn.Module):
    """Rows of 1, 16, 45, 2,100 and 8,200 elements, with and without normalisation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.free = nn.Parameter(torch.randn(2, 5))
        self.weights = nn.ModuleList([MPConv(1, 2), MPConv(16, 2), MPConv(5, 2, (3, 3)), MPConv(2100, 2), MPConv(8200, 1)])
        edm2.force_weight_norm_(self)


def reference(net: nn.Module, **kwargs) -> edm2.EDM2Optimizer:
    optimizer = edm2.EDM2Optimizer(net, **kwargs)
    optimizer._kernel = None
    return optimizer


def both(**kwargs) -> list[edm2.EDM2Optimizer]:
    """Of equal networks: by the kernel, and by PyTorch on a CPU."""
    return [edm2.EDM2Optimizer(Rows().to(DEVICE), **kwargs), reference(Rows(), **kwargs)]


def give_gradients(optimizer: edm2.EDM2Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in optimizer.params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def run(optimizer: edm2.EDM2Optimizer, steps: range) -> None:
    """With another learning rate and other decays at each."""
    for step in steps:
        give_gradients(optimizer, step)
        optimizer.step(0.01 * step, step * 4, 4)


def results(optimizer: edm2.EDM2Optimizer) -> dict[str, torch.Tensor]:
    """Weights, averages and Adam's state by name."""
    found = dict(optimizer.params)
    for std in optimizer.emas:
        found |= {f"{std} {name}": x for name, x in optimizer.ema(std).items()}
    for i, state in optimizer.state_dict()["adam"]["state"].items():
        found |= {f"{i} {name}": x for name, x in state.items()}
    return found


def assert_close(actual: edm2.EDM2Optimizer, expected: edm2.EDM2Optimizer) -> None:
    actual, expected = results(actual), results(expected)
    assert actual.keys() == expected.keys()
    for name in actual:
        assert relative_error(actual[name], expected[name]) < EXACT[torch.float32], name


@pytest.mark.parametrize("stds", [(), (0.1,), (0.05, 0.1), (0.02, 0.05, 0.1)])
def test_steps_equal_those_of_pytorch(stds):
    actual, expected = both(ema_stds=stds, betas=(0.8, 0.95), eps=1e-6)
    for optimizer in (actual, expected):
        run(optimizer, range(1, 5))
    assert_close(actual, expected)


def test_nonfinite_gradients_are_counted_and_zeroed():
    actual, expected = both()
    for optimizer, values in ((actual, [NAN, INF, -INF]), (expected, [0, 0, 0])):
        run(optimizer, range(1, 2))
        give_gradients(optimizer, 2)
        net = list(optimizer.params.values())
        net[0].grad.fill_(values[0])
        net[-1].grad[0, [0, 5000, 8199]] = torch.tensor(values, dtype=torch.float32, device=net[-1].device)
        optimizer.step(0.01, 8, 4)
    assert actual.nonfinite.dtype == torch.int64 and actual.nonfinite.shape == ()
    assert [int(actual.nonfinite), int(expected.nonfinite)] == [4, 0]
    assert_close(actual, expected)
    run(actual, range(3, 4))
    assert int(actual.nonfinite) == 0


def test_two_runs_give_the_same_bits():
    first, second = both()[0], both()[0]
    for optimizer in (first, second):
        run(optimizer, range(1, 3))
    first, second = results(first), results(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kernel_first", [True, False])
def test_a_checkpoint_of_one_loads_in_the_other(kernel_first):
    ours, theirs = both()
    before, after = (ours, theirs) if kernel_first else (theirs, ours)
    run(before, range(1, 3))
    state = deepcopy(before.state_dict())
    for p, q in zip(after.params.values(), before.params.values()):
        p.data.copy_(q)
    after.load_state_dict(state)
    for optimizer in (before, after):
        run(optimizer, range(3, 5))
    assert_close(after, before)


def test_a_parameter_may_lack_its_gradient():
    """Adam passes it over; its averages and normalisation go on."""
    actual, expected = both(eps=0.0)
    for optimizer in (actual, expected):
        for missing in (2, 5, 2, None):
            give_gradients(optimizer, 1)
            if missing is not None:
                list(optimizer.params.values())[missing].grad = None
            optimizer.step(0.01, 8, 4)
        assert {int(state["step"]) for state in optimizer.state_dict()["adam"]["state"].values()} == {2, 3, 4}
    assert_close(actual, expected)


def test_gradients_may_lie_anywhere():
    """Views of one flat tensor, as some libraries keep them, and transposed ones: the kernel accesses 16 bytes at a time."""
    actual, expected = both()
    for optimizer in (actual, expected):
        give_gradients(optimizer, 1)
        params = list(optimizer.params.values())
        sizes = [p.numel() for p in params]
        for p, grad in zip(params, torch.cat([p.grad.flatten() for p in params]).split(sizes)):
            p.grad = grad.view(p.shape)
        assert any(p.grad.data_ptr() % 16 for p in params)
        if optimizer is actual:  # PyTorch's fused Adam on a CPU takes no heed of strides
            params[-2].grad = params[-2].grad.T.contiguous().T
        optimizer.step(0.01, 4, 4)
    assert_close(actual, expected)
    assert not (actual._kernel.addresses._table % 16).any()


def test_zero_rows_stay_finite():
    actual, expected = both()
    for optimizer in (actual, expected):
        for p in optimizer.params.values():
            p.data.zero_()
            p.grad = torch.zeros_like(p)
        optimizer.step(0.01, 8, 4)
    assert_close(actual, expected)


def guarded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy between NaNs, and the memory that holds both."""
    memory = torch.full([values.numel() + 64], NAN, device=DEVICE)
    inner = memory[32 : 32 + values.numel()].view(values.shape)
    return inner.copy_(values), memory


def test_nothing_else_is_written_or_read():
    shapes = [(), (3, 1), (2, 45), (2, 16), (1, 2052)]
    w, g, m, v, average = ([guarded(torch.rand(shape)) for shape in shapes] for _ in range(5))
    step = AdamPass([x for x, _ in w], [len(shape) > 0 for shape in shapes], [[x for x, _ in average]], (0.9, 0.99), 1e-8)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        assert int(step.step(*([x for x, _ in role] for role in (g, m, v)), [1] * len(shapes), 0.1, [0.5])) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    for x, memory in (*w, *g, *m, *v, *average):
        assert x.isfinite().all()
        assert memory[:32].isnan().all() and memory[32 + x.numel() :].isnan().all()


@pytest.mark.parametrize("unfit", [lambda net: net.double(), lambda net: net.to(memory_format=torch.channels_last)])
def test_what_the_kernel_cannot_take_goes_to_pytorch(unfit):
    optimizer, expected = edm2.EDM2Optimizer(unfit(Rows().to(DEVICE))), reference(unfit(Rows()))
    with pytest.warns(kernels.FallbackWarning, match="optimizer fell back: a parameter of"):
        kernels.clear_fallbacks()
        for x in (optimizer, expected):
            for p in x.params.values():
                p.grad = torch.ones_like(p)
            x.step(0.01, 4, 4)
    assert_close(optimizer, expected)
