"""Calls of every op of `kernels`, and how they are run and compared. Needs nothing but PyTorch and pytest."""

from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.jit import INTERPRET
from kernels.reference import Factors
from kernels.registration import on_triton
from tests.conftest import relative_error
from tests.tolerances import limit

HALF = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]  # the interpreter's bf16 does not round
DTYPES = [torch.float64, torch.float32, *HALF]
BAD = [float("nan"), float("inf"), -float("inf")]


@dataclass
class Case:
    """A call of the op: shapes of the inputs and keyword arguments. `scale` multiplies one input, by index; others are `positive`."""

    op: str
    shapes: list[tuple[int, ...]]
    kwargs: dict = field(default_factory=dict)
    scale: dict[int, float] = field(default_factory=dict)
    positive: tuple[int, ...] = ()

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Fresh leaves. A prepared weight (the shapes of three axes) gets unit-norm rows."""
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        for i, x in enumerate(values):
            if x.ndim == 3:
                x /= max(x.shape[0] * x.shape[2], 1) ** 0.5
            x *= self.scale.get(i, 1)
            if i in self.positive:
                x.abs_().add_(0.1)
        return [x.to(device, dtype).requires_grad_() for x in values]

    def run(self, module: ModuleType, inputs: list[Tensor], bad: tuple[int, int, float] | None = None) -> list[Tensor]:
        """The outputs, then the gradients of all inputs for fixed random gradients of the outputs.

        `bad` (output, position, value) replaces one element of these.
        """
        outputs = self.outputs(module, inputs)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y).contiguous() for y in outputs]
        if bad:
            output, position, value = bad
            grads[output].view(-1)[position] = value
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, inputs, grads)]

    def outputs(self, module: ModuleType, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        kwargs = self.kwargs
        if self.op in ("mp_weight", "precondition_input"):
            kwargs = {"dtype": inputs[0].dtype, **kwargs}
        y = getattr(module, self.op)(*inputs, **kwargs)
        return y if isinstance(y, tuple) else (y,)

    def check(self, module: ModuleType, inputs: list[Tensor]) -> None:
        """Outputs and gradients are as near to the reference as the tolerances ask."""
        self.compare(self.run(module, inputs), inputs)

    def compare(self, actual: list[Tensor], inputs: list[Tensor], bad: tuple[int, int, float] | None = None) -> None:
        """The same of results of `run`: NaN and each infinity where the reference has them, the rest as near as asked.

        The kernels of convolutions multiply the zeros around an image too: an infinite weight and, where boxes do not fill
        an image, an infinite pixel at its border make NaN of elements that the reference does not reach. Through a NaN the
        clip lets no gradient pass: gradients of an output with more of them are asked for NaN only.
        """
        dtype = inputs[0].dtype
        own = self.run(reference, inputs, bad)
        exact = own
        if dtype not in (torch.float32, torch.float64):
            exact = self.run(reference, [x.detach().float().requires_grad_() for x in inputs], bad)
        outputs = len(own) - len(inputs)
        stopped = "clip" in self.kwargs and any(a[b.isfinite()].isnan().any() for a, b in zip(actual[:outputs], own))
        for i, (a, b, truth) in enumerate(zip(actual, own, exact, strict=True)):
            assert (a.dtype, a.device) == (b.dtype, b.device) == (dtype, inputs[0].device)
            finite = b.isfinite()
            if self.is_convolution and on_triton(a.device.type):
                assert not a.isfinite()[~finite].any()
                finite = a.isfinite()
                if stopped and i >= outputs:
                    continue
            else:
                torch.testing.assert_close(a[~finite], b[~finite], rtol=0, atol=0, equal_nan=True)
            a, b, truth = a[finite], b[finite], truth[finite]
            error, allowed = relative_error(a, truth), limit(dtype, relative_error(b, truth))
            assert error < allowed, f"result {i}: error {error:.3g}, limit {allowed:.3g}"

    @property
    def is_convolution(self) -> bool:
        return self.op.startswith(("attention", "conv", "residual"))

    @property
    def kernel_dtype(self) -> torch.dtype:
        """One that the op's kernels take, the most precise."""
        return torch.float16 if self.is_convolution else torch.float32


CASES = {
    "mp_weight 3x3": Case("mp_weight", [(6, 40, 3, 3)]),
    "mp_weight long rows": Case("mp_weight", [(2, 240, 3, 3)]),
    "mp_weight short rows": Case("mp_weight", [(3, 2)]),
    "mp_weight 1x1 gain": Case("mp_weight", [(8, 40, 1, 1), ()]),
    "mp_weight linear gain": Case("mp_weight", [(5, 7), (1,)]),
    "mp_weight heads": Case("mp_weight", [(2 * 2 * 3, 8, 1, 1)], {"heads": 2}),
    "mp_weight up": Case("mp_weight", [(5, 40, 3, 3)], {"up": True}),
    "mp_weight up gain": Case("mp_weight", [(3, 7, 3, 3), ()], {"up": True}),
    "mp_weight factors": Case("mp_weight", [(6, 40, 3, 3)], {"factors": Factors(13, 0.5, 2.0)}),
    "mp_weight 1x1 gain factors": Case("mp_weight", [(8, 40, 1, 1), ()], {"factors": Factors(24, 1.5, -0.25)}),
    "mp_weight heads factor": Case("mp_weight", [(2 * 2 * 3, 7, 1, 1)], {"heads": 2, "factors": Factors(right=0.4)}),
    "mp_weight up factors": Case("mp_weight", [(5, 24, 3, 3)], {"up": True, "factors": Factors(3, 0.7, 1.3)}),
    "mp_weight small": Case("mp_weight", [(5, 8, 3, 3)], {}, {0: 1e-4}),
    "linear": Case("linear", [(5, 8), (1, 40, 8)]),
    "linear scaled": Case("linear", [(3, 8), (1, 5, 8)], {"scale": 3.0, "shift": 1.0}),
    "precondition_input": Case("precondition_input", [(3, 4, 5, 3), (3,)], {"sigma_data": 0.5}, positive=(1,)),
    "precondition_input wide": Case("precondition_input", [(2, 9, 20, 16), (2,)], {"sigma_data": 0.7}, positive=(1,)),
    "precondition_output": Case("precondition_output", [(3, 5, 3, 8), (3, 4, 5, 3), (3,)], {"sigma_data": 0.5}, positive=(2,)),
    "precondition_output wide": Case("precondition_output", [(2, 20, 16, 9), (2, 9, 20, 16), (2,)], {"sigma_data": 0.7}, positive=(2,)),
    "uncertainty_loss": Case("uncertainty_loss", [(3, 4, 5, 3), (3, 4, 5, 3), (3,), (3,)], {"sigma_data": 0.5}, positive=(2,)),
    "uncertainty_loss long": Case(
        "uncertainty_loss", [(2, 3, 37, 40), (2, 3, 37, 40), (2,), (2,)], {"sigma_data": 0.7}, {0: 0.1, 1: 0.1}, (2,)
    ),
    "conv 3x3": Case("conv", [(2, 5, 3, 8), (9, 40, 8)]),
    "conv one channel": Case("conv", [(1, 5, 3, 1), (9, 1, 1)]),
    "conv more channels": Case("conv", [(2, 4, 3, 24), (9, 8, 13)]),
    "conv 1x1": Case("conv", [(1, 3, 5, 40), (1, 8, 40)]),
    "conv_silu": Case("conv_silu", [(3, 5, 3, 8), (9, 40, 8), (3, 40)]),
    "conv_silu one image": Case("conv_silu", [(1, 1, 1, 8), (1, 8, 8), (1, 8)]),
    "conv_silu_up": Case("conv_silu_up", [(2, 5, 3, 16), (16, 24, 16), (2, 24)]),
    "conv_silu_up one image": Case("conv_silu_up", [(1, 1, 1, 8), (16, 8, 8), (1, 8)]),
    "mp_fourier": Case("mp_fourier", [(3,), (40,), (40,)]),
    "mp_fourier long": Case("mp_fourier", [(2,), (300,), (300,)], {}, {1: 6.0}),
    "mp_silu": Case("mp_silu", [(3, 5, 3, 8)]),
    "mp_silu vector": Case("mp_silu", [(3, 40)], {}, {0: 20}),
    "mp_sum": Case("mp_sum", [(3, 8), (3, 8)], {"t": 0.3, "clip": 0.5}),
    "cat_silu": Case("cat_silu", [(2, 3, 5, 8), (2, 3, 5, 40)], {"t": 0.4}),
    "cat_silu equal": Case("cat_silu", [(1, 3, 3, 40), (1, 3, 3, 40)], {"t": 0.5}),
    "pixel_norm_silu": Case("pixel_norm_silu", [(2, 3, 5, 40)]),
    "pixel_norm_silu small": Case("pixel_norm_silu", [(2, 3, 5, 40)], {}, {0: 1e-4}),
    "down_pixel_norm_silu": Case("down_pixel_norm_silu", [(1, 6, 10, 8)]),
    "conv_sum": Case("conv_sum", [(2, 5, 3, 8), (9, 40, 8), (2, 5, 3, 40)], {"t": 0.3}),
    "conv_sum clip": Case("conv_sum", [(1, 5, 3, 8), (9, 40, 8), (1, 5, 3, 40)], {"t": 0.3, "clip": 0.5}),
    "conv_sum 1x1": Case("conv_sum", [(2, 3, 5, 40), (1, 8, 40), (2, 3, 5, 8)], {"t": 0.5, "clip": 0.5}),
    "conv_cat_sum": Case(
        "conv_cat_sum", [(2, 5, 3, 40), (9, 8, 40), (2, 5, 3, 8), (2, 5, 3, 40), (1, 8, 48)]
    ),
    "conv_cat_sum clip": Case(
        "conv_cat_sum",
        [(1, 3, 3, 8), (9, 40, 8), (1, 3, 3, 8), (1, 3, 3, 8), (1, 40, 16)],
        {"clip": 0.5},
    ),
    "fork": Case("fork", [(2, 3, 5, 8)], {"clip": 0.5}),
    "fork one": Case("fork", [(3, 5)], {"clip": 0.5, "readers": 1}),
    "fork three": Case("fork", [(3, 5)], {"clip": 0.5, "readers": 3}),
    "residual_branch_norm": Case("residual_branch_norm", [(2, 5, 3, 8), (9, 40, 8), (2, 40), (9, 8, 40)], {"t": 0.3}),
    "residual_branch_norm_fork": Case(
        "residual_branch_norm_fork", [(2, 5, 3, 8), (9, 40, 8), (2, 40), (9, 8, 40)], {"t": 0.3, "clip_x": 0.9}
    ),
    "residual_branch_norm_fork down": Case(
        "residual_branch_norm_fork", [(3, 4, 8, 16), (9, 24, 16), (3, 24), (1, 16, 24)], {"t": 0.4, "clip": 0.5, "down": True}
    ),
    "residual_branch_norm_fork down clip": Case(
        "residual_branch_norm_fork", [(1, 4, 2, 16), (1, 8, 16), (1, 8), (1, 16, 8)], {"t": 0.4, "down": True, "clip_x": 0.8}
    ),
    "residual_branch_norm down clip": Case(
        "residual_branch_norm", [(3, 4, 8, 16), (9, 24, 16), (3, 24), (1, 16, 24)], {"t": 0.4, "clip": 0.5, "down": True}
    ),
    "residual_branch_cat": Case(
        "residual_branch_cat",
        [(1, 3, 5, 8), (1, 3, 5, 16), (9, 16, 24), (1, 16), (9, 40, 16), (1, 40, 24)],
        {"cat_t": 0.4, "clip": 0.5, "clip_a": 0.7},
    ),
    "residual_branch_cat no clip": Case(
        "residual_branch_cat",
        [(2, 4, 4, 16), (2, 4, 4, 8), (1, 8, 24), (2, 8), (1, 16, 8), (1, 16, 24)],
        {"cat_t": 0.5},
    ),
    "residual_branch_silu": Case("residual_branch_silu", [(2, 5, 3, 16), (9, 8, 16), (2, 8), (9, 16, 8)], {"t": 0.3}),
    "residual_branch_silu clip": Case(
        "residual_branch_silu", [(2, 5, 7, 8), (1, 24, 8), (2, 24), (9, 8, 24)], {"t": 0.3, "clip": 0.5, "clip_x": 0.7}
    ),
    "residual_branch_up": Case("residual_branch_up", [(2, 5, 3, 16), (16, 8, 16), (2, 8), (9, 16, 8)], {"t": 0.3}),
    "residual_branch_up clip": Case(
        "residual_branch_up", [(5, 4, 4, 8), (16, 72, 8), (5, 72), (9, 8, 72)], {"t": 0.3, "clip": 0.5, "clip_x": 0.7}
    ),
    "residual_branch_up 1x1": Case("residual_branch_up", [(1, 3, 7, 24), (16, 16, 24), (1, 16), (1, 24, 16)], {"t": 0.4, "clip": 1.0}),
    "attention_branch": Case("attention_branch", [(2, 3, 5, 16), (1, 48, 16), (1, 16, 16)], {"heads": 2, "t": 0.3}),
    "attention_branch clip": Case(
        "attention_branch", [(1, 2, 3, 40), (1, 120, 40), (1, 40, 40)], {"heads": 1, "t": 0.3, "clip": 0.5}
    ),
    "cosine_attention": Case("cosine_attention", [(2, 3, 5, 2 * 3 * 40)], {"heads": 2}),
    "cosine_attention two tokens": Case("cosine_attention", [(1, 1, 2, 2 * 3 * 8)], {"heads": 2}),
    "resample up": Case("resample", [(2, 3, 5, 8)], {"mode": "up"}),
    "resample up one channel": Case("resample", [(1, 3, 5, 1)], {"filter": [1, 1], "mode": "up"}),
    "resample down": Case("resample", [(2, 4, 6, 8)], {"mode": "down"}),
    "resample long": Case("resample", [(2, 4, 6, 8)], {"filter": (1, 3, 3, 1), "mode": "up"}),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Guarded:
    """Makes tensors that lie between NaNs."""

    def __init__(self):
        self.memory: list[Tensor] = []

    def empty(self, *shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = torch.Size(shape[0] if shape and not isinstance(shape[0], int) else shape)
        self.memory.append(torch.full([shape.numel() + 128], torch.nan, dtype=dtype, device=device))
        return self.memory[-1][64:-64].view(shape)

    def patch(self, monkeypatch) -> None:
        """What the launchers allocate comes from here."""

        def new_empty(x: Tensor, *shape, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
            return self.empty(*shape, dtype=dtype or x.dtype, device=device or x.device)

        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x, **options: new_empty(x, x.shape, **options))
        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def intact(self) -> bool:
        return all(x[:64].isnan().all() and x[-64:].isnan().all() for x in self.memory)
