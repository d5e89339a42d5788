"""The processes of a run, as `torchrun` starts them; one process without it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edm2.errors import UserError


def is_first() -> bool:
    """Does this process speak for all, also before they know of each other?"""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Processes:
    """This process among the others of the run."""

    rank: int
    world_size: int
    device: torch.device
    hosts: Any = None  # a process group that reaches the others without their GPUs

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def start_sum(self, x: Tensor) -> Any:
        """Begin `sum`; x holds it after `wait()` of the result."""
        return dist.all_reduce(x, async_op=True)

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """`tensors[i]` as process i has it, to all."""
        if self.world_size > 1:
            for work in [dist.broadcast(x, src=rank, async_op=True) for rank, x in enumerate(tensors)]:
                work.wait()

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """All processes' fp32 tensors, of different names, on the host of the first; none in the others. Each sends one message."""
        if self.world_size == 1:
            return tensors
        shapes: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object({name: x.shape for name, x in tensors.items()}, shapes, group=self.hosts)
        if shapes is None:
            dist.send(torch.cat([x.flatten() for x in tensors.values()]), dst=0)
            return {}
        found = {name: x.cpu() for name, x in tensors.items()}
        for rank, theirs in enumerate(shapes[1:], 1):
            sizes = [shape.numel() for shape in theirs.values()]
            flat = torch.empty(sum(sizes), device=self.device)
            dist.recv(flat, src=rank)
            found |= {name: x.view(shape) for (name, shape), x in zip(theirs.items(), flat.cpu().split(sizes))}
        return found

    def highest(self, number: int) -> int:
        """The highest of all processes' numbers. Their hosts wait for each other, not for a GPU."""
        if self.world_size == 1:
            return number
        x = torch.tensor(number)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.hosts)
        return int(x)

    def alike(self, x: Tensor) -> bool:
        """Is x, of integers, the same in all processes?"""
        if self.world_size == 1:
            return True
        both = torch.stack([x, -x])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return bool((both[0] == -both[1]).all())

    def share(self, x: Any) -> Any:
        """What the first process has of it, in all; their hosts wait for it."""
        if self.world_size == 1:
            return x
        box = [x]
        dist.broadcast_object_list(box, group=self.hosts)
        return box[0]

    def gather(self, x: Any) -> list[Any] | None:
        """What each process has of it, in their order, in the first; None in the others. Their hosts wait for it."""
        if self.world_size == 1:
            return [x]
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(x, found, group=self.hosts)
        return found

    def first(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, in the first process, which alone does it; None in the others. A UserError is raised in all."""
        found = error = None
        if self.rank == 0:
            try:
                found = action()
            except UserError as e:
                error = e
        self.raise_any(error)
        return found

    def raise_any(self, error: UserError | None) -> None:
        """Raises what one of them has met in all, so that the first can tell it and none waits for those that ended."""
        met = self.gather(error)
        met = self.share(met and next((each for each in met if each is not None), None))
        if met is not None:
            raise met

    def barrier(self) -> None:
        """Until all hosts are here: for a day, not for the minutes that collectives of GPUs have."""
        if self.world_size > 1:
            dist.barrier(group=self.hosts)


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the processes that `torchrun` started (NCCL on GPUs, gloo on CPUs), and leave them at the end.

    After an error they are not left: the others would be waited for, who wait for this one, before it tells of the error.
    """
    cuda = torch.cuda.is_available()
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in _TORCHRUN.items())
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", local_rank if "LOCAL_RANK" in os.environ else torch.cuda.current_device())
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    hosts = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if world_size > 1 else None
    yield Processes(rank, world_size, device, hosts)
    if world_size > 1:
        dist.destroy_process_group()


_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
