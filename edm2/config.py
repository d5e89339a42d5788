"""What a training run is told: a preset, its data, and what differs from the preset."""

from dataclasses import asdict, dataclass, replace

import torch

from edm2.errors import UserError
from edm2.network import Precond
from edm2.presets import build, get_preset

PRECISIONS = {"fp16": None, "bf16": torch.bfloat16, "fp32": None}  # the type of a network on every device
RUN_CONTROL = (
    "outdir", "duration", "batch_gpu", "status", "snapshot", "snapshot_dtype", "checkpoint", "workers", "bench", "max_nonfinite",
    "keep", "max_time", "compile", "shard", "cuda_graph",
    "held_out", "samples", "vae",
)  # fmt: skip
"""Options that may change when a run is resumed: they steer it, but do not change what a step computes."""


@dataclass(frozen=True)
class TrainingConfig:
    """Options of a run, named as on the command line of `train.py`. None means: as the preset says.

    Counts (duration, batch, status, snapshot, checkpoint) are in images, `decay` in batches; an interval of 0 means never.
    `init` is a snapshot to start from; `snapshot_dtype` is "fp16" or "fp32"; after `max_nonfinite` steps in a row with
    non-finite gradients (0: never) the run stops. `label_dropout` is the share of images that go without their label.
    `precision` is what activations are computed in: "bf16" everywhere, "fp16" and "fp32" as `fp16` says (on GPUs; a CPU
    takes fp32). `compile`: by torch.compile; None means on GPUs. `shard`: Adam's moments and the averages are spread over the
    processes. `cuda_graph`: on one GPU, each step is one CUDA graph. The loss of the images in
    `held_out` is told too. A grid of `samples` images is made of each snapshot, None: where they are pixels, or there is the
    `vae` that decodes them. Of training states the newest `keep` stay (0: all); after
    `max_time` seconds the run saves itself and stops. `pixel_range`, (0, 1) or (-1, 1), is that of the pixels that a
    dataset of VAE latents was encoded from; None: as the dataset tells, else (0, 1). `latent_stats` says what standardises
    latents: "published" (ImageNet's), "data" (those that the dataset tells), or a snapshot whose they are; None: published for
    the official VAE, data for others.
    """

    outdir: str
    data: str
    cond: bool = True
    preset: str = "edm2-img512-s"
    duration: int | None = None
    batch: int | None = None
    channels: int | None = None
    dropout: float | None = None
    label_dropout: float = 0.0
    pixel_range: tuple[int, int] | None = None
    latent_stats: str | None = None
    P_mean: float | None = None
    P_std: float | None = None
    lr: float | None = None
    decay: float | None = None
    rampup_Mimg: float | None = None
    batch_gpu: int | None = None
    fp16: bool = True
    precision: str | None = None
    ls: float = 1.0
    bench: bool = True
    status: int | None = None
    snapshot: int | None = None
    checkpoint: int | None = None
    seed: int = 0
    mirror: bool = False
    workers: int | None = None
    init: str | None = None
    snapshot_dtype: str = "fp16"
    max_nonfinite: int = 100
    keep: int = 0
    max_time: float | None = None
    compile: bool | None = None
    shard: bool = False
    cuda_graph: bool = False
    held_out: str | None = None
    samples: int | None = None
    vae: str | None = None

    def resolved(self) -> "TrainingConfig":
        """With the preset's values in the place of None. UserError for an unknown preset."""
        row = get_preset(self.preset)
        absent = [name for name, value in asdict(self).items() if value is None and hasattr(row, name)]
        precision = self.precision or ("fp16" if self.fp16 else "fp32")
        return replace(self, precision=precision, fp16=precision != "fp32", **{name: getattr(row, name) for name in absent})

    def check(self, world_size: int) -> None:
        """UserError where the counts do not fit together; for a resolved configuration."""
        if self.batch < 1 or self.batch % world_size:
            raise UserError(f"--batch {self.batch} is not a positive multiple of the {world_size} process(es)")
        share, micro = self.batch // world_size, self.micro_batch(world_size)
        if micro < 1 or share % micro:
            product = f"{world_size} process(es) × {self.batch_gpu} images per GPU"
            raise UserError(f"--batch {self.batch} is not a multiple of {product}; choose another --batch-gpu")
        for name in ("duration", "status", "snapshot", "checkpoint"):
            count = getattr(self, name)
            if count < 0 or count % self.batch:
                raise UserError(f"--{name} {count} is not a multiple of the batch of {self.batch} images")
        if self.label_dropout and not self.cond:
            raise UserError("--label-dropout needs labels: leave --cond as it is")
        if not 0 <= self.label_dropout < 1:
            raise UserError(f"--label-dropout {self.label_dropout} is no probability below 1")
        if self.keep < 0:
            raise UserError(f"--keep {self.keep} is no count of training states")
        if self.samples is not None and self.samples < 0:
            raise UserError(f"--samples {self.samples} is no count of images")
        if self.max_nonfinite < 0:
            raise UserError(f"--max-nonfinite {self.max_nonfinite} is no count of steps")
        if self.precision not in PRECISIONS:
            raise UserError(f"--precision {self.precision} is none of {', '.join(PRECISIONS)}")
        if self.snapshot_dtype not in ("fp16", "fp32"):
            raise UserError(f"--snapshot-dtype {self.snapshot_dtype} is neither fp16 nor fp32")

    def micro_batch(self, world_size: int) -> int:
        """Images that a process holds at a time: its share of the batch, within the limit of `batch_gpu`."""
        share = self.batch // world_size
        return share if self.batch_gpu is None else min(self.batch_gpu, share)

    def build(self, img_resolution: int, img_channels: int, label_dim: int) -> Precond:
        """A fresh network for images of this size. UserError where preset, options and size do not fit."""
        try:
            return build(
                self.preset, img_resolution, img_channels, label_dim,
                model_channels=self.channels, dropout=self.dropout, use_fp16=self.fp16, dtype=PRECISIONS[self.precision],
            )  # fmt: skip
        except ValueError as e:
            size = f"{img_resolution}x{img_resolution} images"
            raise UserError(f"preset {self.preset} with {self.channels} channels cannot take {size}: {e}") from e
