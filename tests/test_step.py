"""A training step as a CUDA graph repeats what it does plainly: on a GPU, or recorded in Triton's interpreter; batches ahead."""

from dataclasses import replace

import pytest
import torch

import edm2
from edm2 import graphs, prefetch, step
from edm2.diagnostics import NoiseLevels
from edm2.distributed import Processes
from edm2.latents import RGBEncoder
from edm2.optimizer import EDM2Optimizer
from edm2.step import Round, TrainingStep
from edm2.trainer import Trainer
from edm2.weights import StepWeights
from kernels import capturing
from kernels.jit import INTERPRET
from kernels.rows import Addresses
from tests.conftest import tiny_net

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def make_step(device: str, graph: bool, dtype: torch.dtype) -> TrainingStep:
    net = tiny_net(model_channels=8, channel_mult=(1,), attn_resolutions=(), dtype=dtype, dropout=0.1).to(device).train()
    weights = StepWeights(net)
    levels = NoiseLevels(Processes(0, 1, torch.device(device)))
    optimizer = EDM2Optimizer(net, weights=weights)
    return TrainingStep(net, edm2.denoising_loss, RGBEncoder(), weights, optimizer, levels, 0.25, 0.5, graph=graph)


def rounds(seed: int, device: str) -> list[Round]:
    """Two of an image each, whose labels may be dropped."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(2):
        images = torch.randint(256, [1, 2, 8, 8], dtype=torch.uint8, generator=generator)
        sigma, noise = torch.rand(1, 1, 1, 1, generator=generator) + 0.1, torch.randn(1, 2, 8, 8, generator=generator)
        tensors = images, torch.eye(5)[seed % 5][None], sigma, noise, None, torch.tensor([i + seed % 2 > 0])
        found.append(Round(*(None if x is None else x.to(device) for x in tensors)))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_graphed_steps_equal_plain_ones(device, monkeypatch):
    """To the bit, with other data, dropped labels, rates, decays and dropout at each, and a status line in between."""
    if device == "cpu":
        from tests import recorded

        monkeypatch.setattr(step, "captures", lambda x: True)
        monkeypatch.setattr(step, "record", recorded.record)
        monkeypatch.setattr(graphs.Memory, "run", lambda self, function: function())
    plain, graphed = (make_step(device, graph, torch.float16) for graph in (False, True))
    for seed in range(1, 5):
        found = []
        for each in (plain, graphed):
            torch.manual_seed(seed)
            total = each(rounds(seed, device), 0.01 * seed, 4 * seed, 4).clone()
            found.append((total, each.optimizer.nonfinite.clone(), *(x.clone() for x in each.seen)))
            if seed == 3:
                found[-1] += (str(each.levels.take()),)
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*found)), seed
        for (name, a), b in zip(plain.net.named_parameters(), graphed.net.parameters()):
            assert torch.equal(a, b), (seed, name)
    assert graphed._graph is not None and plain._graph is None
    assert str(plain.optimizer.state_dict()) == str(graphed.optimizer.state_dict())
    assert plain.levels.take() == graphed.levels.take()


def test_a_graph_is_for_one_gpu(config):
    with pytest.raises(edm2.UserError, match="--cuda-graph is for training on one GPU"):
        Trainer(replace(config, cuda_graph=True), Processes(0, 1, torch.device("cpu")))


class TestTablesOfGraphs:
    """Addresses that a captured kernel reads."""

    def capture(self, monkeypatch, addresses: Addresses, *tensors: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(capturing, "is_capturing", lambda: True)
        table = addresses.table(tensors)
        monkeypatch.undo()
        return table

    def test_they_are_the_graphs_own(self, monkeypatch):
        """Allocated before the capture, filled after it, kept as they are by later calls without the graph."""
        addresses, (a, b, c) = Addresses(), torch.zeros(3, 4)
        before = addresses.table([a])
        with capturing.filling() as kept:
            table = self.capture(monkeypatch, addresses, b)
            assert table is before and table.item() == a.data_ptr()
        assert table.item() == b.data_ptr() and kept == [table]
        found = [addresses.table([x]).item() for x in (a, b, c)]
        assert found == [x.data_ptr() for x in (a, b, c)] and table.item() == b.data_ptr()

    def test_what_cannot_be(self, monkeypatch):
        addresses, x = Addresses(), torch.zeros(4)
        with capturing.filling(), pytest.raises(RuntimeError, match="without a call before"):
            self.capture(monkeypatch, addresses, x)
        monkeypatch.undo()
        addresses.table([x])
        with pytest.raises(RuntimeError, match="must be captured by edm2.graphs.capture"):
            self.capture(monkeypatch, addresses, x)


def test_batches_on_their_way(monkeypatch):
    """In their order; the time that the host waits for them is told once."""
    clock = iter([10.0, 12.5, 20.0, 20.0, 30.0, 31.0])
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: next(clock))
    batches = prefetch.Prefetcher(((torch.tensor(i), torch.tensor(-i)) for i in range(3)), torch.device("cpu"))
    assert [next(batches), next(batches)] == [(0, 0), (1, -1)] and batches.take_wait() == 2.5
    assert next(batches) == (2, -2) and (batches.take_wait(), batches.take_wait()) == (1.0, 0.0)


@pytest.mark.gpu
def test_batches_on_their_way_to_a_gpu():
    """While kernels of the batch before still run: its memory is not overwritten, the next one's not read too early."""
    source = (torch.full([2**20], float(i)).pin_memory() for i in range(20))
    batches, sums = prefetch.Prefetcher(((x,) for x in source), torch.device("cuda")), []
    for _ in range(10):
        (x,) = next(batches)
        torch.cuda._sleep(10_000_000)
        sums.append((x.min(), x.max()))
    assert [(int(a), int(b)) for a, b in sums] == [(i, i) for i in range(10)]
