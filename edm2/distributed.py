"""The processes of a run, as `torchrun` starts them; one process without it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among the others of the run."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the processes that `torchrun` started (NCCL on GPUs, gloo on CPUs), and leave them at the end."""
    cuda = torch.cuda.is_available()
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in _TORCHRUN.items())
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield Processes(rank, world_size, device)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
