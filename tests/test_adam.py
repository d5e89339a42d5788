"""The optimizer's kernel against PyTorch's path: in the interpreter (TRITON_INTERPRET=1), or on a GPU."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import edm2
import kernels.prepared
from edm2.layers import MPConv
from kernels.adam import AdamPass
from kernels.jit import INTERPRET
from kernels.prepared import PreparedWeights
from kernels.raw_weight import RawWeight
from kernels.reference import Factors
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
        step.set_rates([1] * len(shapes), 0.1, [0.5])
        assert int(step.step(*([x for x, _ in role] for role in (g, m, v)))) == 0
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


class Convolutions(nn.Module):
    """Weights that the optimizer prepares: qkv, 3×3, long rows, two that are part of one, with factors; and that it does not."""

    def __init__(self, dtype: torch.dtype = torch.float16):
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.qkv, self.long = MPConv(8, 12, (1, 1), heads=2), MPConv(264, 1, (3, 3), factors=Factors(right=0.3))
        self.short = MPConv(8, 2, (3, 3), factors=Factors(3, 0.7, 1.3))
        self.first, self.second = MPConv(16, 1, (1, 1)), MPConv(16, 2, (1, 1), factors=Factors(8, 1.5, 0.4))
        self.gained = MPConv(16, 1, (1, 1))
        self.odd, self.linear = MPConv(5, 2, (3, 3)), MPConv(16, 1)
        edm2.force_weight_norm_(self)
        self.dtype = dtype

    def prepared(self) -> PreparedWeights:
        together = [(self.first, None), (self.gained, self.gain), (self.second, None)]
        alone = [[RawWeight(x.weight, self.dtype, None, x.heads, factors=x.factors)] for x in (self.qkv, self.long, self.short, self.odd)]
        together = [RawWeight(x.weight, self.dtype, gain, factors=x.factors) for x, gain in together]
        return PreparedWeights([together, *alone, [RawWeight(self.linear.weight, torch.float32)]])

    def trained(self) -> tuple[PreparedWeights, edm2.EDM2Optimizer]:
        """After a step of an optimizer that prepares the weights."""
        prepared = self.prepared()
        optimizer = edm2.EDM2Optimizer(self, weights=prepared)
        run(optimizer, range(1, 2))
        return prepared, optimizer


def assert_fresh(prepared: PreparedWeights, net: Convolutions) -> None:
    """The values, and the gradients that follow from values and lengths, are those of weights prepared anew, bit for bit."""
    fresh = net.prepared()
    for x in (prepared, fresh):
        x.prepare()
    for weight, expected in zip(prepared.weights, fresh.weights):
        assert torch.equal(weight.value, expected.value)
    gradients = []
    for x in (prepared, fresh):
        torch.autograd.backward([w.master * 1 for w in x.weights], [torch.ones_like(w.master).cumsum(0).cumsum(2) for w in x.weights])
        x.project()
        gradients.append(x.gradients)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_prepared_for_the_next_step(dtype):
    net = Convolutions(dtype).to(DEVICE)
    prepared = net.prepared()
    for weight in prepared.weights:
        weight.value.fill_(NAN)
    run(edm2.EDM2Optimizer(net, weights=prepared), range(1, 2))
    assert list(prepared.targets()) == [getattr(net, name).weight for name in ("first", "second", "qkv", "long", "short")]
    written = [weight.value.isfinite().all(dim=2).all(dim=0) for weight in prepared.weights]
    assert [x.tolist() for x in written] == [[True, False, True, True], [True] * 12, [True], [True] * 2, [False] * 2, [False]]
    assert_fresh(prepared, net)


def test_what_the_optimizer_has_prepared_is_not_prepared_again(monkeypatch):
    net, launched = Convolutions().to(DEVICE), []
    prepared, _ = net.trained()
    monkeypatch.setattr(kernels.prepared, "launch", lambda kernel, grid, *args, **options: launched.append(grid[0]))
    prepared.prepare()
    assert sum(launched) == len(net.gained.weight) + len(net.odd.weight) + len(net.linear.weight)


def halve(net, prepared):
    with torch.no_grad():
        net.short.weight[1, :4].mul_(0.5)


def load(net, prepared):
    net.load_state_dict({name: x * 2 + 1 for name, x in net.state_dict().items()})


def replace(net, prepared):
    net.qkv.weight.data = net.qkv.weight.data + 1


def step_of_another_optimizer(net, prepared):
    run(edm2.EDM2Optimizer(net), range(1, 2))


def step_of_another_for_others(net, prepared):
    run(edm2.EDM2Optimizer(net, weights=net.prepared()), range(1, 2))


@pytest.mark.parametrize("change", [halve, load, replace, step_of_another_optimizer, step_of_another_for_others])
def test_prepared_weights_follow_any_change(change):
    """Between two steps, and with an optimizer that goes on after it."""
    net = Convolutions().to(DEVICE)
    prepared, _ = net.trained()
    prepared.prepare()
    change(net, prepared)
    assert_fresh(prepared, net)


def test_a_step_after_a_change_prepares_all():
    net = Convolutions().to(DEVICE)
    prepared, optimizer = net.trained()
    halve(net, prepared)
    run(optimizer, range(2, 3))
    assert_fresh(prepared, net)


def test_frozen_weights_and_weights_without_gradient_are_prepared():
    net = Convolutions().to(DEVICE)
    net.first.weight.requires_grad_(False)
    prepared, optimizer = net.trained()
    assert_fresh(prepared, net)
    give_gradients(optimizer, 2)
    net.qkv.weight.grad = None
    net.long.weight.grad.fill_(INF)
    optimizer.step(0.01, 8, 4)
    assert_fresh(prepared, net)
    with torch.no_grad():
        net.first.weight.neg_()
    assert_fresh(prepared, net)


def test_a_step_is_a_change_to_autograd():
    net = Convolutions(torch.float32).to(DEVICE)
    prepared, optimizer = net.trained()
    losses = [net.linear.weight.square().sum(), (prepared.weights[1].value * net.gain).sum()]
    run(optimizer, range(2, 3))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_targets_of_two_types_are_refused():
    net = Convolutions()
    raw = [[RawWeight(x.weight, dtype)] for x, dtype in ((net.first, torch.float16), (net.second, torch.bfloat16))]
    with pytest.raises(ValueError, match="expected one type"):
        run(edm2.EDM2Optimizer(net, weights=PreparedWeights(raw)), range(1, 2))
