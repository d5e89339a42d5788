"""Several processes train as one does, each with all of the optimizer's state or with its share of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import edm2
from edm2.checkpoint import load_newest_checkpoint
from edm2.distributed import Processes
from edm2.optimizer import trained_parameters
from edm2.sharding import Shards, share_out
from edm2.stats import read_stats
from edm2.weights import StepWeights
from tests.conftest import relative_error, tiny_net
from tests.run_files import equal

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def test_several_processes_equal_one(config, tmp_path, one_thread_env):
    """Through torchrun and train.py, with accumulation: two that share the state equal two that do not to the bit, and go on
    alone; all, four too, equal one to rounding."""
    options = "--preset=digits --batch=16 --status=32 --snapshot=64 --checkpoint=32 --batch-gpu=2 --samples=0".split()

    def launch(name, processes=1, duration=64, *more):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
        arguments = [f"--outdir={tmp_path / name}", f"--data={config.data}", f"--duration={duration}", *options, *more]
        result = subprocess.run(
            [sys.executable, *launcher, "train.py", *arguments], cwd=ROOT, env=one_thread_env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return load_newest_checkpoint(tmp_path / name), read_stats(tmp_path / name)

    def near(states, stats):
        for kind, tensors in (("net", one["net"]), *((std, averages) for std, averages in one["optimizer"]["emas"].items())):
            other = states["net"] if kind == "net" else states["optimizer"]["emas"][kind]
            assert other.keys() == tensors.keys() and all(relative_error(other[name], x) < 1e-5 for name, x in tensors.items()), kind
        assert [s["Loss/loss"] for s in stats] == pytest.approx([s["Loss/loss"] for s in one_stats], rel=1e-5)

    def files(name):
        return {path.name: load_file(path) for path in (tmp_path / name).glob("*.safetensors")}

    one, one_stats = launch("one")
    two, two_stats = launch("two", 2)
    near(two, two_stats)
    shared, _ = launch("shared", 2, 64, "--shard")
    assert equal(shared | {"elapsed": two["elapsed"]}, two) and equal(files("shared"), files("two")) and len(files("two")) == 2
    near(*launch("four", 4, 64, "--shard"))
    shutil.copytree(tmp_path / "shared", tmp_path / "resumed", ignore=shutil.ignore_patterns("*0.064*"))
    assert [path.name for path in (tmp_path / "resumed").glob("training-state-*")] == ["training-state-0000000.032.pt"]
    near(*launch("resumed"))


class Alone(Processes):
    """One of several processes that never hears of the others, but gets 7 for each of their weights."""

    def spread(self, tensors):
        for rank, x in enumerate(tensors):
            if rank != self.rank:
                x.fill_(7)

    def sum(self, x):
        return 3 * x


class TestShards:
    def shards(self, net, rank=0, processes=3):
        return Shards(trained_parameters(net), Alone(rank, processes, CPU))

    def test_shares_are_alike(self):
        assert share_out([5, 1, 4, 2, 3], 2) == [0, 0, 1, 0, 1]
        sizes = [p.numel() for p in edm2.build("digits", 8, 1, 10).parameters()]
        owners = share_out(sizes, 4)
        totals = [sum(size for size, owner in zip(sizes, owners) if owner == i) for i in range(4)]
        assert set(owners) == {0, 1, 2, 3} and max(totals) - min(totals) <= max(sizes) and max(totals) < 1.1 * sum(sizes) / 4

    def test_every_parameter_is_one_processes(self):
        net = tiny_net()
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        owned = [list(self.shards(net, rank).own) for rank in range(3)]
        assert sorted(name for names in owned for name in names) == sorted(before)
        assert all(torch.equal(p, before[name]) and p.data_ptr() % 16 == 0 for name, p in net.named_parameters())

    def test_an_exchange(self):
        """What comes from others is seen, also by those who look whether a weight has changed."""
        net = tiny_net()
        shards = self.shards(net, rank=1)
        before = {name: (p.detach().clone(), p._version) for name, p in net.named_parameters()}
        assert shards.exchange(torch.tensor(5)) == 15
        for name, p in net.named_parameters():
            own = name in shards.own
            assert torch.equal(p, before[name][0] if own else torch.full_like(p, 7)) and (p._version > before[name][1]) != own, name

    def test_a_step_changes_what_a_process_has(self):
        """Which normalises its own rows alone, and prepares none: most weights come from others."""
        net = tiny_net().train()
        optimizer = edm2.EDM2Optimizer(net, weights=StepWeights(net), shards=self.shards(net))
        edm2.denoising_loss(net, torch.randn(2, 2, 8, 8), torch.ones(2), torch.randn(2, 2, 8, 8), torch.eye(5)[:2]).sum().backward()
        optimizer.step(0.01, 2, 2)
        assert set(optimizer.adam.state) == set(optimizer.params.values()) and set(optimizer.normalized) < set(optimizer.params.values())
        assert all(bool((p == 7).all()) != (name in optimizer.params) for name, p in net.named_parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())

    def test_more_processes_than_parameters(self):
        with pytest.raises(edm2.UserError, match="--shard: 9 processes cannot share 2 parameters"):
            self.shards(nn.Linear(2, 2), processes=9)
