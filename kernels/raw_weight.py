"""A raw weight and how it is prepared, in one word for all who prepare many."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference import NO_FACTORS, Factors


class RawWeight(NamedTuple):
    """A raw fp32 weight `[Cout, Cin, k, k]` or `[Cout, Cin]`, and how it is prepared: see `kernels.mp_weight`.

    `padded`: with rows of zeros up to a multiple of 8, so that a kernel writes what it convolves as it is.
    """

    weight: Tensor
    dtype: torch.dtype
    gain: Tensor | None = None
    heads: int = 0
    up: bool = False
    factors: Factors = NO_FACTORS
    padded: bool = False
