"""Time of one training step of the `digits` preset on the device at hand: `pytest bench`.

Batch 128: forward, loss, backward and optimizer on given data. `plain` is the network as a user of PyTorch would write
it (see `bench/baseline.py`), measured in the same run. The first steps are warm-up.
"""

import pytest
import torch

import edm2
from bench.baseline import Baseline, BaselineOptimizer
from edm2.backends import full_precision, keep_freed_memory

CANDIDATES = {"plain": (Baseline, BaselineOptimizer), "edm2": (lambda net: net, edm2.EDM2Optimizer)}


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_digits_training_step(benchmark, candidate):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full_precision()
    keep_freed_memory()
    wrap, optimizer_type = CANDIDATES[candidate]
    net = edm2.build("digits", 8, 1, 10).to(device).train()
    model, optimizer, loss = wrap(net), optimizer_type(net), edm2.EDM2Loss(-0.8, 1.4)
    images = torch.randn(128, 1, 8, 8, device=device) / 2
    labels = torch.nn.functional.one_hot(torch.arange(128, device=device) % 10, 10).float()

    def step():
        optimizer.zero_grad()
        (loss(model, images, labels).sum() / 128).backward()
        optimizer.step(0.01, 256, 128)
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info.update(device=str(device), threads=torch.get_num_threads(), batch=128)
    benchmark.pedantic(step, rounds=20, warmup_rounds=3)
