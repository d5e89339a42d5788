"""The ops of the EDM2 network: each has one meaning, stated in `kernels.reference`.

`kernels.reference` is plain autograd and says what is meant; `kernels.eager` is the same with derivatives written by
hand, faster and lighter, and is what these names are. Activations are `[N, H, W, C]`; prepared weights
`[taps, Cout, Cin]`. This package knows nothing of diffusion.
"""

from kernels.eager import (
    cat_silu,
    conv,
    conv_cat_sum,
    conv_silu,
    conv_sum,
    cosine_attention,
    down_pixel_norm_silu,
    linear,
    mp_cat,
    mp_silu,
    mp_sum,
    mp_weight,
    normalize,
    pixel_norm_silu,
    resample,
)

__all__ = [
    "coverage",
    "cat_silu",
    "conv",
    "conv_cat_sum",
    "conv_silu",
    "conv_sum",
    "cosine_attention",
    "down_pixel_norm_silu",
    "linear",
    "mp_cat",
    "mp_silu",
    "mp_sum",
    "mp_weight",
    "normalize",
    "pixel_norm_silu",
    "resample",
]


def coverage() -> dict[str, str]:
    """Which implementation serves each op: "eager" (derivatives by hand) or "reference" (plain autograd)."""
    return {name: globals()[name].__module__.removeprefix("kernels.") for name in __all__ if name != "coverage"}
