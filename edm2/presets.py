"""One row per published training configuration (Karras et al. 2024, Table 6), plus `digits`."""

from dataclasses import dataclass, field
from typing import Any

from edm2.errors import check_name
from edm2.network import Precond

Ki, Mi = 2**10, 2**20


@dataclass(frozen=True)
class Preset:
    """What a training run needs beyond its data. Counts are in images, `decay` in batches."""

    channels: int
    lr: float
    decay: float
    duration: int
    P_mean: float
    P_std: float
    dropout: float = 0.0
    batch: int = 2048
    rampup_Mimg: float = 10.0
    status: int = 128 * Ki
    snapshot: int = 8 * Mi
    checkpoint: int = 128 * Mi
    network: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of UNet


def _img512(channels: int, lr: float, duration: int = 2048 * Mi, dropout: float = 0.0) -> Preset:
    return Preset(channels, lr, 70000, duration, P_mean=-0.4, P_std=1.0, dropout=dropout)


def _img64(channels: int, lr: float, duration: int = 1024 * Mi, dropout: float = 0.0) -> Preset:
    return Preset(channels, lr, 35000, duration, P_mean=-0.8, P_std=1.6, dropout=dropout)


PRESETS: dict[str, Preset] = {
    "edm2-img512-xxs": _img512(64, 0.0170),
    "edm2-img512-xs": _img512(128, 0.0120),
    "edm2-img512-s": _img512(192, 0.0100),
    "edm2-img512-m": _img512(256, 0.0090, dropout=0.10),
    "edm2-img512-l": _img512(320, 0.0080, 1792 * Mi, dropout=0.10),
    "edm2-img512-xl": _img512(384, 0.0070, 1280 * Mi, dropout=0.10),
    "edm2-img512-xxl": _img512(448, 0.0065, 896 * Mi, dropout=0.10),
    "edm2-img64-xs": _img64(128, 0.0120),
    "edm2-img64-s": _img64(192, 0.0100),
    "edm2-img64-m": _img64(256, 0.0090, 2048 * Mi, dropout=0.10),
    "edm2-img64-l": _img64(320, 0.0080, dropout=0.10),
    "edm2-img64-xl": _img64(384, 0.0070, 640 * Mi, dropout=0.10),
    "digits": Preset(
        channels=32, lr=0.02, decay=1000, duration=900 * 128, P_mean=-0.8, P_std=1.4, batch=128, rampup_Mimg=0.01,
        status=25 * 128, snapshot=150 * 128, checkpoint=450 * 128,
        network=dict(channel_mult=(1, 2), num_blocks=2, attn_resolutions=(4,), channels_per_head=32),
    ),
}  # fmt: skip


def get_preset(name: str) -> Preset:
    """The row called `name`; UserError with the nearest names if there is none."""
    check_name("preset", name, PRESETS)
    return PRESETS[name]


def build(preset: str, img_resolution: int, img_channels: int, label_dim: int, **overrides: Any) -> Precond:
    """A freshly initialised network of a preset.

    `overrides` are keyword arguments of `Precond` or of the U-Net and win over the preset's, e.g. `dropout=0.1`.
    """
    row = get_preset(preset)
    kwargs = {"model_channels": row.channels, "dropout": row.dropout, **row.network, **overrides}
    return Precond(img_resolution, img_channels, label_dim, **kwargs)
