"""Every limit on the error of an op, as a relative 2-norm (`relative_error`).

The rule: in half precision, the error against the reference in fp32 is at most twice that of PyTorch's own computation
in half precision, or half an ulp (a floor of one ulp is what is asked); in fp32 and fp64, a few roundings. A limit wider
than the rule has its reason beside it.
"""

import torch

EXACT = {torch.float64: 1e-10, torch.float32: 2e-6}  # against the reference in the same type
PRODUCT = 1e-6  # a matrix product summed in fp32, against fp64
ALIKE = 1e-4  # two results in half precision of nearly equal fp32 numbers: of a hundred, one may be rounded apart

# All logits −√128: their exponentials, shifted below the overflow of fp16, are subnormal there and 0.7 % apart.
ATTENTION_AT_ITS_BOUND = 5e-3

# A whole network, whose layers amplify each other's roundings: spec §6.3 asks for these, forward and gradients.
NETWORK = {torch.float32: (1e-5, 1e-4), torch.float16: (1e-2, 3e-2)}
SAMPLER = 1e-5  # its trajectories in fp32, end to end


def limit(dtype: torch.dtype, pytorch: float = 0.0) -> float:
    """Of an op in `dtype`; `pytorch` is the error of PyTorch's own computation in that type."""
    return EXACT.get(dtype) or max(2 * pytorch, torch.finfo(dtype).eps / 2)
