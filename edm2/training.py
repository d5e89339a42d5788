"""The training loop: steps, what is told and saved in between, and when."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from edm2.checkpoint import check_options, load_newest_checkpoint, remove_leftovers, write_options
from edm2.config import RUN_CONTROL, TrainingConfig
from edm2.data import Dataset
from edm2.distributed import processes
from edm2.interruption import Interruption
from edm2.loss import denoising_loss
from edm2.network import Precond
from edm2.preview import Preview
from edm2.stats import NonfiniteGuard, StatusLog
from edm2.tensorboard import TensorBoard
from edm2.trainer import Trainer


def train(
    config: TrainingConfig | Mapping[str, Any],
    dataset: Dataset | None = None,
    net: Precond | None = None,
    loss: Callable[..., Tensor] = denoising_loss,
    callback: Callable[[Trainer, dict[str, Any]], None] | None = None,
    held_out: Dataset | None = None,
) -> Trainer:
    """Train until `config.duration`, resuming from the newest checkpoint in `config.outdir` if there is one.

    Leaves `training_options.json`, `stats.jsonl`, network snapshots, grids of their samples and training states in `outdir`,
    and where TensorBoard is installed its log. Run under `torchrun`, the batch is shared among the processes. UserError for
    bad input, before anything is written. `dataset` and `held_out` take the place of the files that `config.data` and
    `config.held_out` name, `net` that of the preset's network, with its weights, `loss` that of `denoising_loss`, with its
    signature. `callback` sees every line of statistics in every process. After SIGTERM, SIGINT or `config.max_time` it
    finishes its step, saves a training state and returns, with the reason in `interrupted`: the same call resumes it.
    """
    begun = time.monotonic()
    config = config if isinstance(config, TrainingConfig) else TrainingConfig(**config)
    config, outdir = config.resolved(), Path(config.outdir)
    with processes() as procs:
        check_options(outdir, asdict(config), RUN_CONTROL)
        trainer = Trainer(config, procs, dataset, net, loss, held_out)
        preview = Preview(config, trainer.encoder, procs)
        state = load_newest_checkpoint(outdir)
        procs.barrier()  # whoever was longer at it
        trainer.start(state)
        if procs.rank == 0:
            write_options(outdir, asdict(config))
            remove_leftovers(outdir)
        status = StatusLog(outdir, procs, trainer.nimg, config.duration, trainer.elapsed, trainer.flops)
        guard = NonfiniteGuard(config.max_nonfinite, procs.device)
        with Interruption(procs, config.max_time, begun) as interruption, TensorBoard(outdir, trainer.nimg, procs) as board:
            while trainer.nimg < config.duration and trainer.interrupted is None:
                status.step(trainer.step(), trainer.optimizer.nonfinite, config.batch)
                guard.step(trainer.optimizer.nonfinite, trainer.nimg)
                if trainer.due(config.status):
                    stats = status.tick(trainer.nimg, trainer.lr, trainer.diagnosis())
                    board.write(stats, trainer.nimg)
                    if callback is not None:
                        callback(trainer, stats)
                trainer.interrupted = interruption.asked() if trainer.nimg < config.duration else None
                saving = time.time()
                if trainer.due(config.snapshot):
                    snapshots = trainer.save_snapshots(outdir)
                    if snapshots:
                        board.show(preview.draw(snapshots[-1]), trainer.nimg)
                if trainer.due(config.checkpoint) or trainer.interrupted:
                    trainer.save_state(outdir, status.elapsed)
                if trainer.due(config.snapshot) or trainer.due(config.checkpoint):
                    procs.barrier()  # for the first process, who wrote: GPUs have minutes, hosts a day
                status.pause(saving)
        status.close()
        trainer.finish()
        procs.barrier()
    return trainer
