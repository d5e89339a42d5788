"""Time of one training step of the `digits` preset on the device at hand: `pytest bench`.

Batch 128; data, noise, forward, backward and optimizer included. The first steps are warm-up.
"""

import pytest
import torch

from edm2.cli.dataset import load_digits
from edm2.config import TrainingConfig
from edm2.distributed import processes
from edm2.image_files import write_zip
from edm2.training import Trainer


@pytest.fixture()
def trainer(tmp_path):
    write_zip(tmp_path / "digits.zip", *load_digits())
    with processes() as procs:
        trainer = Trainer(TrainingConfig(outdir="", data=str(tmp_path / "digits.zip"), preset="digits"), procs)
        trainer.start()
        yield trainer


def test_digits_training_step(benchmark, trainer):
    def step():
        trainer.step()
        if trainer.procs.device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info.update(device=str(trainer.procs.device), threads=torch.get_num_threads(), batch=128)
    benchmark.pedantic(step, rounds=20, warmup_rounds=3)
