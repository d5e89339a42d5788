"""The processes of a run, as `torchrun` starts them; one process without it."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process among the others of the run."""

    rank: int
    world_size: int
    device: torch.device

    def wrap(self, net: nn.Module) -> nn.Module:
        """`net`, its gradients averaged over all processes where there are several."""
        if self.world_size == 1:
            return net
        device_ids = [self.device] if self.device.type == "cuda" else None
        # The buffers are constants. PyTorch 2.13 renamed the option that says so.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        constant = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        return DistributedDataParallel(net, device_ids=device_ids, gradient_as_bucket_view=True, **constant)

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
