"""Batches on their way to the device while it computes with the one before."""

import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

STEPS_AHEAD = 2
Tensors = tuple[Tensor, ...]


class Prefetcher:
    """The batches of `source`, on `device`. A GPU gets the next one by a stream of its own while it works on the last.

    `waited` are the seconds that the host has spent on `source`: with worker processes, waiting for them.
    """

    def __init__(self, source: Iterator[Tensors], device: torch.device):
        self.source, self.device, self.waited = source, device, 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: Tensors | None = None
        self._steps: deque[torch.cuda.Event] = deque()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Tensors:
        if self._stream is None:
            return self._sent()
        batch = self._sent() if self._ahead is None else self._ahead
        used = torch.cuda.current_stream(self.device)
        used.wait_stream(self._stream)
        for x in batch:
            x.record_stream(used)  # its memory is the stream's own
        self._ahead = self._sent()
        return batch

    def used(self) -> None:
        """To be said after each step: the host, which launches faster than a GPU computes, waits for the one before the last, or
        batches would pile up."""
        if self._stream is not None:
            self._steps.append(torch.cuda.current_stream(self.device).record_event())
            if len(self._steps) > STEPS_AHEAD:
                self._steps.popleft().synchronize()

    def close(self) -> None:
        """Let go of the source and what it holds: processes, pinned memory."""
        self.source, self._ahead = iter(()), None

    def take_wait(self) -> float:
        """`waited` since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def _sent(self) -> Tensors:
        start = time.perf_counter()
        batch = next(self.source)
        self.waited += time.perf_counter() - start
        with torch.cuda.stream(self._stream):
            return tuple(x.to(self.device, non_blocking=True) for x in batch)
