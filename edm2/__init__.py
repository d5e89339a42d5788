"""EDM2 diffusion models: networks, training, post-hoc EMA and sampling."""

from edm2 import phema
from edm2.config import TrainingConfig
from edm2.errors import UserError
from edm2.generate import generate_images
from edm2.loss import EDM2Loss, denoising_loss
from edm2.network import Precond, force_weight_norm_
from edm2.optimizer import EDM2Optimizer, learning_rate_schedule
from edm2.presets import PRESETS, build
from edm2.sampler import edm_sampler
from edm2.snapshot import load_snapshot, save_snapshot
from edm2.training import train
from edm2.version import __version__

__all__ = [
    "EDM2Loss",
    "EDM2Optimizer",
    "PRESETS",
    "Precond",
    "TrainingConfig",
    "UserError",
    "__version__",
    "build",
    "denoising_loss",
    "edm_sampler",
    "force_weight_norm_",
    "generate_images",
    "learning_rate_schedule",
    "load_snapshot",
    "phema",
    "save_snapshot",
    "train",
]
