"""Weights prepared together equal those prepared one by one, forward and backward."""

import pytest
import torch

from edm2.folding import prepare
from kernels.jit import recording
from kernels.prepared import PreparedWeights
from kernels.raw_weight import RawWeight
from kernels.reference import Factors
from tests.conftest import relative_error
from tests.tolerances import EXACT


def raw_weights(device: str = "cpu") -> list[list[RawWeight]]:
    """Every shape class: 3×3 aligned and not, 1×1, qkv, a group of linear ones with gains, a single row; all kinds of factors."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    half, single = torch.float16, torch.float32
    return [
        [RawWeight(leaf(8, 16, 3, 3), half)],
        [RawWeight(leaf(8, 5, 3, 3), half)],
        [RawWeight(leaf(16, 8, 3, 3), half, up=True)],
        [RawWeight(leaf(4, 3, 3, 3), half, leaf(), up=True)],
        [RawWeight(leaf(3, 8, 3, 3), half, leaf())],
        [RawWeight(leaf(24, 40, 1, 1), half, heads=2)],
        [RawWeight(leaf(3, 16, 3, 3), half, leaf(), padded=True)],
        [RawWeight(leaf(8, 24), single, leaf()), RawWeight(leaf(5, 24), single, leaf()), RawWeight(leaf(16, 24), single, leaf())],
        [RawWeight(leaf(1, 2100), single)],
        [RawWeight(leaf(8, 16, 3, 3), half, factors=Factors(right=0.4))],
        [RawWeight(leaf(4, 24, 1, 1), half, factors=Factors(8, 0.7, 1.3))],
        [RawWeight(leaf(3, 16, 3, 3), half, leaf(), factors=Factors(5, 1.5, -0.5))],
        [RawWeight(leaf(8, 8, 3, 3), half, up=True, factors=Factors(3, 0.7, 1.3))],
    ]


def leaves(groups: list[list[RawWeight]]) -> list[torch.Tensor]:
    return [x for group in groups for raw in group for x in (raw.weight, raw.gain) if x is not None]


def give_gradients(prepared: PreparedWeights, seed: int) -> list[torch.Tensor]:
    """A backward pass that gives each prepared weight a random fp32 gradient; returns these."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(w.value.shape, generator=generator).to(w.value.device) for w in prepared.weights]
    torch.autograd.backward([w.master * 1 for w in prepared.weights], grads)
    return grads


def test_values():
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    prepared.prepare()
    for group, weight in zip(groups, prepared.weights):
        assert weight.value.dtype == group[0].dtype and weight.master.shape == weight.value.shape
        assert relative_error(weight.value, prepare(group)) < EXACT[torch.float32]


def test_gradients_add_up_and_are_projected_once():
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    prepared.prepare()
    grads = [give_gradients(prepared, seed) for seed in (1, 2)]
    prepared.project()
    singles = [[raw._replace(dtype=torch.float32) for raw in group] for group in groups]
    total = sum((prepare(group) * (a + b)).sum() for group, a, b in zip(singles, *grads))
    for leaf, expected in zip(leaves(groups), torch.autograd.grad(total, leaves(groups))):
        assert relative_error(leaf.grad, expected) < EXACT[torch.float32]


def test_a_step_forgets_the_gradients_of_the_last_and_sees_new_weights():
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    for seed in (1, 2):
        with torch.no_grad():
            groups[0][0].weight.mul_(-1)
        prepared.prepare()
        give_gradients(prepared, seed)
        prepared.project()
    assert relative_error(prepared.weights[0].value, prepare(groups[0])) < EXACT[torch.float32]
    last = [leaf.grad.clone() for leaf in leaves(groups)]
    prepared.prepare()
    give_gradients(prepared, 2)
    prepared.project()
    assert all(torch.equal(leaf.grad, before) for leaf, before in zip(leaves(groups), last))


def test_gradients_are_views_of_one_tensor():
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    prepared.prepare()
    give_gradients(prepared, 1)
    prepared.project()
    prepared.gradients.zero_()
    assert all(leaf.grad.abs().max() == 0 and leaf.grad.data_ptr() % 32 == prepared.gradients.data_ptr() % 32 for leaf in leaves(groups))


def test_projecting_too_early():
    prepared = PreparedWeights(raw_weights())
    prepared.prepare()
    with pytest.raises(RuntimeError, match="before backward"):
        prepared.project()


def test_a_weight_without_a_gradient():
    """As a loss may leave one out: zeros."""
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    prepared.prepare()
    prepared.gradients.fill_(5)
    torch.autograd.backward([w.master.sum() for w in prepared.weights[1:]])
    prepared.project()
    assert torch.equal(groups[0][0].weight.grad, torch.zeros_like(groups[0][0].weight)) and groups[1][0].weight.grad.abs().max() > 0


def test_bytes_are_those_of_raw_and_prepared_weights():
    """But for tables and a number or two per row, each moved once."""
    groups = raw_weights()
    prepared = PreparedWeights(groups)
    give_gradients(prepared, 1)
    raw = sum(4 * r.weight.numel() for group in groups for r in group)
    own = [w.value[:, : sum(len(r.weight) for r in group)] for group, w in zip(groups, prepared.weights)]  # not rows of padding
    taps = sum(4 * w.numel() for w in own)
    values = sum(w.numel() * w.element_size() for w in own)
    for call, expected in ((prepared.prepare, raw + values), (prepared.project, 2 * raw + taps)):
        launches = []
        give_gradients(prepared, 1)
        with recording(launches.append):
            call()
        assert expected < sum(x.bytes for x in launches) < 1.06 * expected
