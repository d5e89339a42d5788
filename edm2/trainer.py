"""A run's network, optimizer and data in one process, and the random numbers that belong to its images."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edm2.backends import full_precision, keep_freed_memory, peak_flops
from edm2.checkpoint import drop_old_checkpoints, save_checkpoint
from edm2.config import TrainingConfig
from edm2.data import Dataset, ImageDataset, batches
from edm2.diagnostics import NoiseLevels, gradient_norm, magnitudes
from edm2.distributed import Processes
from edm2.errors import UserError
from edm2.held_out import HeldOut
from edm2.inputs import check_alike, open_dataset, start_from
from edm2.latents import differences, encoder_from_config
from edm2.layers import force_weight_norm_
from edm2.loss import EDM2Loss, denoising_loss
from edm2.names import snapshot_name
from edm2.network import Precond
from edm2.optimizer import EDM2Optimizer, learning_rate_schedule, trained_parameters
from edm2.prefetch import Prefetcher
from edm2.sharding import Shards
from edm2.snapshot import write_tensors
from edm2.step import Round, TrainingStep
from edm2.summary import multiply_adds
from edm2.weights import BUCKET, StepWeights

BACKEND = "inductor"  # of torch.compile
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


class Trainer:
    """Network, optimizer and data of a run in one process. `start`, then `step` as often as wanted.

    UserError if the configuration, the data and the number of processes do not fit together.
    """

    def __init__(
        self,
        config: TrainingConfig,
        procs: Processes,
        dataset: Dataset | None = None,
        net: Precond | None = None,
        loss: Callable[..., Tensor] = denoising_loss,
        held_out: Dataset | None = None,
    ):
        self.config, self.procs = config.resolved(), procs
        self.config.check(procs.world_size)
        self.dataset, self.encoder, self.image_shape = open_dataset(self.config, dataset)
        self.net = (self._build() if net is None else self._fitting(net)).to(procs.device).train()
        self.levels = NoiseLevels(procs, weighted=loss is denoising_loss)
        self.loss = EDM2Loss(self.config.P_mean, self.config.P_std, self.net.sigma_data)
        self.weights, self.optimizer = self._optimizer()
        losses = torch.compile(loss, fullgraph=True, dynamic=False, backend=BACKEND) if self._compiles else loss
        self._step = TrainingStep(
            self.net, losses, self.encoder, self.weights, self.optimizer, self.levels, self.config.ls / self.config.batch,
            self.loss.sigma_data, procs.start_sum if procs.world_size > 1 else None, self.config.cuda_graph,
        )  # fmt: skip
        self.held_out = self._held_out(held_out, loss)
        self.nimg, self.lr, self.elapsed = 0, 0.0, 0.0
        self.licence: str | None = None  # of the weights that the run began with
        self.interrupted: str | None = None  # why the run ended before its time

    def start(self, state: dict[str, Any] | None = None) -> None:
        """Continue from a `state_dict()`, or begin with fresh or given weights."""
        full_precision(self.config.bench)
        if self.procs.device.type == "cpu":
            keep_freed_memory()
        if state is None:
            if self.config.init is not None:
                self.licence = start_from(self.net, self.config.init, self.encoder)
            force_weight_norm_(self.net)
        else:
            self._resume(state)
        self._step.restart()
        where = torch.tensor([self.nimg], device=self.procs.device)
        if not self.procs.alike(where):
            raise UserError(f"the processes read different training states in {self.config.outdir}: do all see it?")
        if not self.procs.alike(fingerprint(self.net)):
            raise UserError("the processes start with different weights: make the network from the same seed in all of them")
        stream = batches(
            self.dataset, self.config.seed, self.nimg, self.config.batch, self.procs.rank, self.procs.world_size,
            self.config.micro_batch(self.procs.world_size), self.config.workers,
        )  # fmt: skip
        self.data = Prefetcher(stream, self.procs.device)

    def step(self) -> Tensor:
        """One optimizer step. Returns the sum over this process's images of the loss per element (0-d), until the next step."""
        config, share, micro = self.config, self.config.batch // self.procs.world_size, self.config.micro_batch(self.procs.world_size)
        draws = Draws.of_step(self, share)
        rounds = [Round(*next(self.data), **draws.part(slice(start, start + micro))) for start in range(0, share, micro)]
        self.lr = learning_rate_schedule(self.nimg, config.batch, config.lr, config.decay, config.rampup_Mimg)
        self.nimg += config.batch
        total = self._step(rounds, self.lr, self.nimg, config.batch)
        self.data.used()
        return total

    def finish(self) -> None:
        """Let go of what only further steps need: the loader's processes, memory of a CUDA graph."""
        self.data.close()
        self._step.restart()

    def diagnosis(self) -> dict[str, Any]:
        """Of the steps since the last call, by noise level; of the last step, its gradients and some of its images by block."""
        facts = {"Loss/by_noise_level": self.levels.take(), "Gradients/norm": gradient_norm(self.weights.gradients())}
        facts["Timing/data_wait_sec"] = self.data.take_wait()  # the host's: a GPU may have had work meanwhile
        facts |= self.held_out.measure() if self.held_out is not None else {}
        if self.procs.rank == 0:
            facts |= {f"Magnitudes/{key}": values for key, values in magnitudes(self.net, *self._step.seen).items()}
        return facts

    @property
    def flops(self) -> float:
        """Of an image's forward and backward, in operations that count towards MFU."""
        return 6.0 * multiply_adds(lambda: Precond(**self.net.config)) if peak_flops(self.procs.device) else 0.0

    def due(self, interval: int) -> bool:
        """Does something that happens every `interval` images (0: never), and at the end, happen now?"""
        return interval > 0 and (self.nimg % interval == 0 or self.nimg >= self.config.duration)

    def state_dict(self, elapsed: float) -> dict[str, Any]:
        """All that a resumed run needs, with the seconds taken so far. With shards the first process has it, when all ask."""
        return {
            "nimg": self.nimg,
            "elapsed": elapsed,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "licence": self.licence,
            "encoder": self.encoder.config(),
        }

    def save_state(self, outdir: Path, elapsed: float) -> None:
        """The first process writes a training state, which all must call. UserError if their weights have become unlike."""
        if not self.procs.alike(fingerprint(self.net)):
            raise UserError(f"the processes' weights differ after {self.nimg} images: a GPU or the network between them is faulty")
        state = self.state_dict(elapsed)
        if self.procs.rank == 0:
            save_checkpoint(outdir, self.nimg, state)
            drop_old_checkpoints(outdir, self.config.keep)

    def save_snapshots(self, outdir: Path) -> list[Path]:
        """The first process writes each tracked average as a network, which all must call. Returns the files that it wrote."""
        files = []
        for std in self.optimizer.emas:
            average = self.optimizer.ema(std)
            if self.procs.rank > 0:
                continue
            facts = {name: getattr(self.config, name) for name in ("preset", "batch", "label_dropout")}
            meta = {"nimg": self.nimg, "std": std, **facts} | ({"licence": self.licence} if self.licence else {})
            files.append(outdir / snapshot_name(self.nimg, std))
            dtype = DTYPES[self.config.snapshot_dtype]
            write_tensors(files[-1], average, self.net, encoder=self.encoder, meta=meta, dtype=dtype)
        return files

    def _optimizer(self) -> tuple[StepWeights, EDM2Optimizer]:
        several = self.procs.world_size > 1
        weights = StepWeights(self.net, BUCKET if several else None)
        shards = Shards(trained_parameters(self.net), self.procs) if self.config.shard and several else None
        return weights, EDM2Optimizer(self.net, weights=weights, shards=shards)

    def _held_out(self, dataset: Dataset | None, losses: Callable[..., Tensor]) -> HeldOut | None:
        """UserError if its images are of another kind than those to train on."""
        if dataset is None and self.config.held_out is None:
            return None
        dataset = ImageDataset(self.config.held_out, use_labels=self.config.cond) if dataset is None else dataset
        check_alike(dataset, self.dataset)
        levels = NoiseLevels(self.procs, self.levels.weighted)
        at_once = self.config.micro_batch(self.procs.world_size)
        return HeldOut(dataset, self.net, self.encoder, losses, self.loss, levels, self.procs, at_once)

    @property
    def _compiles(self) -> bool:
        return self.procs.device.type == "cuda" if self.config.compile is None else self.config.compile

    def _fitting(self, net: Precond) -> Precond:
        """UserError if a network given does not fit the data."""
        if not isinstance(net, Precond):
            raise UserError(f"net: expected an edm2.Precond, got {type(net).__name__}")
        expected, got = (*self.image_shape[:2], self.dataset.label_dim), (net.img_channels, net.img_resolution, net.label_dim)
        if got != expected:
            raise UserError(f"the network takes channels, resolution, labels of {got}, and the data has {expected}")
        return net

    def _build(self) -> Precond:
        torch.manual_seed(self.config.seed)  # on the CPU, so that every device starts from the same weights
        return self.config.build(self.image_shape[1], self.image_shape[0], self.dataset.label_dim)

    def _resume(self, state: dict[str, Any]) -> None:
        try:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.nimg, self.elapsed, self.licence = state["nimg"], state["elapsed"], state.get("licence")
            unlike = differences(encoder_from_config(state["encoder"]), self.encoder) if state.get("encoder") else {}
        except (KeyError, RuntimeError, TypeError, ValueError) as e:
            reason = str(e).splitlines()[0]
            raise UserError(f"the training state in {self.config.outdir} is of another network ({reason})") from e
        if unlike:
            raise UserError(f"the run in {self.config.outdir} began with other data ({'; '.join(unlike.values())})")


@torch.no_grad()
def fingerprint(net: Precond) -> Tensor:
    """int64 `[number of parameters]`: sums of their bits."""
    return torch.stack([p.view(torch.int32).sum(dtype=torch.int64) for p in net.parameters()])


@dataclass
class Draws:
    """The random numbers of one process's share of a step; see `Round`.

    They belong to (seed, image number): the whole batch is drawn and a share of it kept, so that neither the number
    of processes nor the size of a round changes them.
    """

    normal: Tensor | None  # for the encoder
    sigma: Tensor
    noise: Tensor
    kept: Tensor | None  # bool `[N]`: whose label stays; all with None

    @classmethod
    def of_step(cls, trainer: Trainer, share: int) -> "Draws":
        config, procs = trainer.config, trainer.procs
        generator = torch.Generator(procs.device).manual_seed(_mix(config.seed, trainer.nimg))
        if config.dropout > 0:
            torch.manual_seed(_mix(config.seed, trainer.nimg, procs.rank + 1))
        mine = slice(procs.rank * share, (procs.rank + 1) * share)

        def randn(*shape: int) -> Tensor:
            return torch.randn(config.batch, *shape, generator=generator, device=procs.device)[mine]

        sigma, noise = trainer.loss.sigma(randn(1, 1, 1)), randn(*trainer.image_shape)
        normal = randn(*trainer.image_shape) if trainer.encoder.draws_noise else None
        kept = None
        if config.label_dropout > 0:  # drawn last: the others are as without it
            kept = torch.rand(config.batch, generator=generator, device=procs.device)[mine] >= config.label_dropout
        return cls(normal, sigma, noise, kept)

    def part(self, part: slice) -> dict[str, Tensor | None]:
        """Of a `Round`."""
        return {name: None if x is None else x[part] for name, x in vars(self).items()}


def _mix(*numbers: int) -> int:
    """One 64-bit seed from several numbers."""
    return int(np.random.SeedSequence([n % 2**64 for n in numbers]).generate_state(1, np.uint64)[0])
