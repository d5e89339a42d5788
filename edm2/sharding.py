"""The optimizer's state spread over the processes of a run: stage 1 of ZeRO (Rajbhandari et al. 2020)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from edm2.distributed import Processes
from edm2.errors import UserError
from kernels.flat import flat_views


class Shards:
    """Which process has Adam's moments and the averages of which of `parameters`, and updates them: `own` are this one's.

    The parameters of each process move into one tensor, so that a step's new weights reach the others by one broadcast of
    each. UserError for more processes than parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], procs: Processes):
        if len(parameters) < procs.world_size:
            raise UserError(f"--shard: {procs.world_size} processes cannot share {len(parameters)} parameters")
        self.procs = procs
        owners = share_out([p.numel() for p in parameters.values()], procs.world_size)
        shares = [{name: p for (name, p), owner in zip(parameters.items(), owners) if owner == rank} for rank in range(procs.world_size)]
        self.own = shares[procs.rank]
        self._others = [p for rank, share in enumerate(shares) if rank != procs.rank for p in share.values()]
        self._flat = [_move_together(list(share.values())) for share in shares]

    @torch.no_grad()
    def exchange(self, count: Tensor) -> Tensor:
        """Give the others this process's new weights, and take theirs. Returns the sum of all processes' counts."""
        self.procs.spread(self._flat)
        increment_version(self._others)  # or what was prepared from them would pass for current
        return self.procs.sum(count)

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of all processes on the first one's host, which all must call together; the others get none."""
        return self.procs.collect(tensors)


def share_out(sizes: Sequence[int], shares: int) -> list[int]:
    """The share of each: the largest first, to that which has least."""
    totals, owners = [0] * shares, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = totals.index(min(totals))
        totals[owners[i]] += sizes[i]
    return owners


def _move_together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Into one tensor, which is returned."""
    flat, views = flat_views([p.detach() for p in parameters])
    for p, view in zip(parameters, views):
        p.data = view.copy_(p.detach())
    return flat
