"""Which arguments of `Precond` a file may hold: what is read of one decides how much is computed and allocated."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def check_arguments(config: Mapping[str, Any]) -> None:
    """ValueError that names the argument, unless all are known and of their kind."""
    for name, value in config.items():
        if name not in ARGUMENTS or not ARGUMENTS[name](value):
            raise ValueError(f"its argument {str(name)[:40]} is none of such a network")


def _integer(least: int, most: int) -> Callable[[Any], bool]:
    return lambda x: type(x) is int and least <= x <= most


def _real(above: float, below: float) -> Callable[[Any], bool]:
    return lambda x: type(x) in (int, float) and above < x < below


def _several(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) in (list, tuple) and len(x) <= 8 and all(map(each, x))


def _or_none(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or each(x)


def _is_filter(x: Any) -> bool:
    """Of an even number of taps, with a sum to divide by."""
    return _several(_real(-1e3, 1e3))(x) and len(x) > 0 and len(x) % 2 == 0 and math.fsum(x) != 0


ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "img_resolution": _integer(1, 2**13), "img_channels": _integer(1, 2**10), "label_dim": _integer(0, 2**20),
    "model_channels": _integer(1, 2**14), "num_blocks": _integer(1, 2**5), "logvar_channels": _integer(1, 2**14),
    "channels_per_head": _integer(1, 2**14), "channel_mult": _several(_real(0, 65)), "attn_resolutions": _several(_integer(1, 2**13)),
    "channel_mult_noise": _or_none(_real(0, 65)), "channel_mult_emb": _or_none(_real(0, 65)),
    "use_fp16": lambda x: type(x) is bool, "sigma_data": _real(0, 1e6), "dropout": _real(-1e-9, 1),
    "label_balance": _real(0, 1), "concat_balance": _real(0, 1), "res_balance": _real(0, 1), "attn_balance": _real(0, 1),
    "clip_act": _or_none(_real(0, 1e9)), "resample_filter": _is_filter,
}  # fmt: skip
