"""One step of training: forward and backward in rounds that fit the memory, then the optimizer."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edm2.diagnostics import NoiseLevels
from edm2.errors import UserError
from edm2.graphs import WARM, Graph, Memory, captures, record
from edm2.latents import Encoder
from edm2.network import Precond
from edm2.optimizer import EDM2Optimizer
from edm2.weights import StartSum, StepWeights

DIAGNOSED = 16  # images


@dataclass(frozen=True)
class Round:
    """Images that are in memory at a time, and what was drawn for them."""

    images: Tensor  # `[N, C, H, W]` as the dataset has them
    labels: Tensor  # `[N, label_dim]`
    sigma: Tensor  # `[N, 1, 1, 1]`
    noise: Tensor  # standard normal, of the form of what the network sees, `[N, C, H, W]`
    normal: Tensor | None  # the same, for the encoder
    kept: Tensor | None  # bool `[N]`: whose label stays; all with None


class TrainingStep:
    """Calling it makes a step of the rounds given, of one process. Returns the sum over its images of the loss per element.

    `losses` has the signature of `denoising_loss`, and `scale` multiplies its sum; with several processes `start_sum` begins to
    sum gradients. As a CUDA `graph` (one GPU; the same number and form of rounds each time) the whole step is captured after
    two plain ones, and the result is overwritten by the next: what `losses` reads and keeps in Python stays as it was then.
    UserError where that cannot be.
    """

    def __init__(
        self,
        net: Precond,
        losses: Callable[..., Tensor],
        encoder: Encoder,
        weights: StepWeights,
        optimizer: EDM2Optimizer,
        levels: NoiseLevels,
        scale: float,
        sigma_data: float,
        start_sum: StartSum | None = None,
        graph: bool = False,
    ):
        self.net, self.losses, self.encoder, self.weights, self.optimizer = net, losses, encoder, weights, optimizer
        self.levels, self.scale, self.sigma_data, self.start_sum = levels, scale, sigma_data, start_sum
        if graph and (start_sum is not None or not captures(optimizer.nonfinite) or not optimizer.can_be_captured):
            raise UserError("--cuda-graph is for training on one GPU, by Triton kernels")
        self._memory = Memory() if graph else None
        self.restart()
        self.seen: tuple[Tensor, Tensor, Tensor]  # noisy images, σ and labels: some of the last round's

    def __call__(self, rounds: Sequence[Round], lr: float, next_nimg: int, batch: int) -> Tensor:
        def plainly() -> Tensor:
            total = self._gradients(rounds)
            self.optimizer.step(lr, next_nimg, batch)
            return total

        if self._memory is None:
            return plainly()
        if self._plain_steps_left > 0:
            self._plain_steps_left -= 1
            return self._memory.run(plainly)
        self.optimizer.advance(lr, next_nimg, batch)
        inputs = [x for each in rounds for x in vars(each).values() if x is not None]
        if self._graph is None:
            self._graph = self._record(rounds, inputs)
        return self._graph(inputs)

    def restart(self) -> None:
        """Forget the graph: what it reads is about to be replaced, or no longer needed."""
        self._graph, self._plain_steps_left = None, WARM

    def _record(self, rounds: Sequence[Round], inputs: Sequence[Tensor]) -> Graph:
        try:
            return record(partial(self._captured, rounds), inputs, self._memory)
        except RuntimeError as e:  # a loss of the user's own may read numbers from the GPU
            raise UserError(f"--cuda-graph: this step cannot be captured ({str(e).splitlines()[0]})") from e

    def _captured(self, like: Sequence[Round], *inputs: Tensor) -> Tensor:
        left = iter(inputs)
        rounds = [Round(**{name: None if x is None else next(left) for name, x in vars(each).items()}) for each in like]
        total = self._gradients(rounds)
        self.optimizer.apply()
        return total

    def _gradients(self, rounds: Sequence[Round]) -> Tensor:
        """Forward and backward, and what they leave in the raw weights."""
        self.optimizer.zero_grad()
        total = torch.zeros([], device=self.net.device)
        with self.weights.prepared():
            for each in rounds:
                images, noise, labels = self.encoder.encode(each.images, each.normal), each.noise * each.sigma, each.labels
                labels = labels if each.kept is None else torch.where(each.kept[:, None], labels, 0)
                loss = self.losses(self.net, images, each.sigma, noise, labels, self.sigma_data)
                last = each is rounds[-1] and self.start_sum is not None
                with self.weights.summing(self.start_sum) if last else nullcontext():
                    (loss.sum() * self.scale).backward()
                means = loss.detach().mean(dim=(1, 2, 3))
                total += means.sum()
                self.levels.add(self.net, each.sigma, means)
        self.weights.project(self.start_sum)
        self.seen = images[:DIAGNOSED] + noise[:DIAGNOSED], each.sigma[:DIAGNOSED], labels[:DIAGNOSED]
        return total
