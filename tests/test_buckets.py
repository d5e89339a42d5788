"""Gradients summed over processes bucket by bucket, while the backward makes others."""

import pytest
import torch

import edm2
from edm2.weights import StepWeights, _buckets, weight_groups
from tests.conftest import relative_error, tiny_net


class Sums:
    """In place of other processes: doubles, as two that are alike would; remembers what was still missing at each start."""

    def __init__(self, weights: StepWeights):
        self.weights, self.started, self.missing, self.waited = weights, [], [], 0

    def __call__(self, x: torch.Tensor) -> "Sums":
        self.started.append(x.data_ptr())
        self.missing.append(sum(n for n in self.weights._missing if n > 0))
        self.pending = x
        x.mul_(2)
        return self

    def wait(self) -> None:
        self.waited += 1


def backward(net, weights, sums, rounds=2, loss_function=edm2.denoising_loss) -> dict[str, torch.Tensor]:
    """Gradients of a step of some rounds; only its last backward may sum."""
    generator = torch.Generator().manual_seed(1)
    with weights.prepared():
        for i in range(rounds):
            images, noise = torch.randn(2, 3, 2, 8, 8, generator=generator)
            loss = loss_function(net, images, torch.tensor([0.3, 1.0, 3.0]), noise, torch.eye(5)[:3])
            if i + 1 < rounds or sums is None:
                loss.sum().backward()
                assert sums is None or not sums.started
            else:
                with weights.summing(sums):
                    loss.sum().backward()
    weights.project(sums)
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bucket", [1, 3000, 2**25])
def test_sums_of_buckets(bucket, compiled):
    """Each once, to the bit what comes of one; in eager mode most begin before the backward is over."""
    net = tiny_net().train()
    weights = StepWeights(net, bucket)
    sums, loss = Sums(weights), edm2.denoising_loss
    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    plain = backward(net, StepWeights(net), None, loss_function=loss)
    for _ in range(2):  # steps
        sums.started, sums.missing, sums.waited = [], [], 0
        for name, gradient in backward(net, weights, sums, loss_function=loss).items():
            assert torch.equal(gradient, 2 * plain[name]), name
        assert sorted(sums.started) == sorted(x.data_ptr() for x in weights.gradients()) and sums.waited == len(sums.started)
        assert len(set(sums.started)) == len(weights._sets) >= 2
    if not compiled and bucket == 3000:
        assert sum(n > 0 for n in sums.missing) >= len(sums.missing) - 1  # all but the embedding's


def test_a_step_without_sums():
    """One process: nothing is started; the same gradients."""
    net = tiny_net().train()
    one, several = (backward(net, StepWeights(net, bucket), None) for bucket in (None, 3000))
    assert all(torch.equal(one[name], several[name]) for name in one)


def test_what_is_in_a_bucket():
    """Neighbours, the embedding's apart; no more than its size, but for a weight that is larger."""
    net = tiny_net(model_channels=16)
    places, groups = zip(*weight_groups(net, torch.float32))
    sizes = [sum(raw.weight.numel() for raw in group) for group in groups]
    parts = _buckets(groups, 20000)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    assert all(sum(sizes[i] for i in part) <= 20000 or len(part) == 1 for part in parts) and 2 < len(parts) < len(groups)
    assert [{groups[i][0].weight.ndim for i in part} for part in parts].count({2, 4}) == 0
    assert _buckets(groups, None) == [list(range(len(groups)))]


def test_the_optimizer_is_given_what_is_in_all_of_them():
    net = tiny_net().train()
    one, several = StepWeights(net), StepWeights(net, 3000)
    assert set(one.targets()) == set(several.targets()) and one.targets()


def test_a_parameter_of_the_users_own():
    """Of which no prepared weight is made: its gradient is summed too, and told among all."""
    net = tiny_net().train()
    net.unet.own = torch.nn.Parameter(torch.ones(3))
    weights = StepWeights(net, 3000)
    sums, plain = Sums(weights), []

    def loss(*arguments):
        return edm2.denoising_loss(*arguments) + net.unet.own.sum()

    plain = backward(net, StepWeights(net), None, loss_function=loss)
    net.zero_grad()
    found = backward(net, weights, sums, loss_function=loss)
    assert all(torch.equal(found[name], 2 * x) for name, x in plain.items()) and plain["unet.own"].abs().min() > 0
    assert weights.gradients()[-1] is net.unet.own.grad and len(sums.started) == len(weights.gradients()) == sums.waited


def test_without_triton(monkeypatch):
    """Every parameter's gradient is summed."""
    monkeypatch.setattr("edm2.weights.PreparedWeights", None)
    net = tiny_net().train()
    weights = StepWeights(net, 3000)
    sums, plain = Sums(weights), backward(net, StepWeights(net), None, rounds=1)
    net.zero_grad()
    summed = backward(net, weights, sums, rounds=1)
    assert len(sums.started) == sums.waited == len(plain)
    assert all(relative_error(summed[name], 2 * plain[name]) == 0 for name in plain)
