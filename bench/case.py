"""What a case is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Candidates = dict[str, Callable[[], Any]]
REFERENCE = "reference"  # a candidate of this name is what the others are compared with, and is not timed
OURS = "edm2"  # the candidate that is this project; its variants' names start so
OWN_GRAPH = "edm2 as one graph"  # this project's training step by `train.py --cuda-graph --compile=False`
OWN_COMPILED = "edm2 compiled"  # this project's training step by torch.compile, as `train.py` has it on a GPU


@dataclass(frozen=True)
class Case:
    """One thing to measure. FLOPs (2 per multiply-add) and bytes (each input and output once) are of one run."""

    name: str
    build: Callable[[torch.device], Candidates]
    flops: float = 0.0
    bytes: float = 0.0
    images: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-2  # relative 2-norm against the reference, fp16
    needs_gpu: bool = True
    flush: bool = True
    warmup: int = 3  # calls before the timed ones, besides the one that is checked
    in_turn: bool = False  # on a GPU too: the candidates share their tensors
    launches: int = 1  # in a row, which may take as many head starts
    compiles: bool = False  # worth compiling ahead, beside other cases
    dtype: str = ""  # of activations; empty: the networks' own, fp16 on a GPU and fp32 elsewhere
    timed: bool = True  # or run once, for what comes out
    limit: float = 0.0  # seconds that a candidate may take in any case, where others may take less

    @property
    def group(self) -> str:
        return self.name.split("/")[0]


def data_size(preset: str) -> tuple[int, int, int]:
    """Resolution, channels and classes of the data that a preset is meant for."""
    return (8, 1, 10) if preset == "digits" else (64, 3 if "img64" in preset else 4, 1000)
