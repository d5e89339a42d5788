"""EDM2 diffusion models: networks, training, post-hoc EMA and sampling."""

from importlib import import_module
from typing import Any

from edm2 import phema
from edm2.config import TrainingConfig
from edm2.errors import UserError
from edm2.folding import fold
from edm2.guidance import Unlabelled
from edm2.layers import force_weight_norm_
from edm2.loss import EDM2Loss, denoising_loss
from edm2.network import Precond
from edm2.optimizer import EDM2Optimizer, learning_rate_schedule
from edm2.presets import PRESETS, build
from edm2.sampler import edm_sampler
from edm2.version import __version__

__all__ = [
    "ArrayDataset",
    "EDM2Loss",
    "EDM2Optimizer",
    "ImageGenerator",
    "PRESETS",
    "Precond",
    "TrainingConfig",
    "Unlabelled",
    "UserError",
    "__version__",
    "build",
    "denoising_loss",
    "edm_sampler",
    "fold",
    "force_weight_norm_",
    "generate_images",
    "learning_rate_schedule",
    "load_official_snapshot",
    "load_snapshot",
    "phema",
    "save_snapshot",
    "train",
]

# What works on files is imported when it is asked for: networks, losses and optimizers need no more than PyTorch and NumPy.
_ON_DEMAND = {
    "ArrayDataset": "data",
    "ImageGenerator": "generate",
    "generate_images": "generate",
    "load_official_snapshot": "official",
    "load_snapshot": "snapshot",
    "save_snapshot": "snapshot",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
