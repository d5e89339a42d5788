"""The ops of the EDM2 network. Activations are `[N, H, W, C]`; prepared weights `[taps, Cout, Cin]`.

Each op has one meaning, stated by plain autograd in `kernels.reference`, and is one node `edm2::name` of PyTorch's
dispatcher, so that `torch.compile(fullgraph=True)` takes it whole: CUDA tensors go to Triton kernels, CPU tensors to
`kernels.eager` (to Triton under `TRITON_INTERPRET=1`). Where Triton is not installed, the ops are the reference. This
package knows nothing of training and sampling.
"""

from importlib.util import find_spec

from kernels.fallback import FallbackWarning, clear_fallbacks, fallbacks
from kernels.invariance import batch_invariance

if find_spec("triton"):
    from kernels.attention import cosine_attention
    from kernels.branches import (
        attention_branch,
        residual_branch_cat,
        residual_branch_norm,
        residual_branch_norm_fork,
        residual_branch_silu,
        residual_branch_up,
    )
    from kernels.conv import conv, conv_cat_sum, conv_silu, conv_silu_up, conv_sum
    from kernels.fork import fork
    from kernels.fourier import mp_fourier
    from kernels.linear import linear
    from kernels.loss import uncertainty_loss
    from kernels.pixel_norm import down_pixel_norm_silu, pixel_norm_silu
    from kernels.pointwise import cat_silu, mp_silu, mp_sum, resample
    from kernels.precondition import precondition_input, precondition_output
    from kernels.weight import mp_weight
else:
    from kernels.reference import (
        attention_branch,
        cat_silu,
        conv,
        conv_cat_sum,
        conv_silu,
        conv_silu_up,
        conv_sum,
        cosine_attention,
        down_pixel_norm_silu,
        fork,
        linear,
        mp_fourier,
        mp_silu,
        mp_sum,
        mp_weight,
        pixel_norm_silu,
        precondition_input,
        precondition_output,
        resample,
        residual_branch_cat,
        residual_branch_norm,
        residual_branch_norm_fork,
        residual_branch_silu,
        residual_branch_up,
        uncertainty_loss,
    )

__all__ = [
    "FallbackWarning",
    "attention_branch",
    "batch_invariance",
    "cat_silu",
    "clear_fallbacks",
    "conv",
    "conv_cat_sum",
    "conv_silu",
    "conv_silu_up",
    "conv_sum",
    "cosine_attention",
    "coverage",
    "down_pixel_norm_silu",
    "fork",
    "fallbacks",
    "linear",
    "mp_fourier",
    "mp_silu",
    "mp_sum",
    "mp_weight",
    "pixel_norm_silu",
    "precondition_input",
    "precondition_output",
    "resample",
    "residual_branch_cat",
    "residual_branch_norm",
    "residual_branch_norm_fork",
    "residual_branch_silu",
    "residual_branch_up",
    "uncertainty_loss",
]
OPS = [name for name in __all__ if name not in ("FallbackWarning", "batch_invariance", "clear_fallbacks", "coverage", "fallbacks")]


def coverage(device: str = "cuda") -> dict[str, str]:
    """Which implementation serves each op on a type of device: "triton", "eager" or (without Triton) "reference"."""
    return {name: _backend(name, device) for name in OPS}


def _backend(name: str, device: str) -> str:
    if not find_spec("triton"):
        return "reference"
    from kernels import registration

    name = name.removeprefix("down_").removesuffix("_fork")
    op = registration.OPS.get(name) or registration.OPS.get(f"{name}_backward")  # a fork has no other
    return "triton" if op and op.triton and registration.on_triton(device) else "eager"
