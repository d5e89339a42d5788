"""Every op as PyTorch's dispatcher and the ledger see it, on the calls that the cases of `test_ops` make."""

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import kernels
from kernels.jit import launch, recording
from kernels.registration import OPS
from tests.op_cases import CASES

pytestmark = pytest.mark.filterwarnings(r"ignore:.*a raw weight of:kernels.FallbackWarning")


class Calls(TorchDispatchMode):
    """The arguments of each call of an op of this project, by name."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, list[tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "edm2":
            self.found.setdefault(func.overloadpacket.__name__, []).append(tree_map_only(Tensor, torch.clone, args))
        return func(*args, **(kwargs or {}))


@cache
def calls(device: str = "cpu") -> dict[str, list[tuple]]:
    with Calls() as recorded:
        for case in CASES.values():
            case.run(kernels, case.inputs(torch.float32, device))
    return recorded.found


def form(x):
    """What calls share that differ in numbers alone."""
    if isinstance(x, Tensor):
        return x.dtype, *(n == 1 for n in x.shape)
    if isinstance(x, (list, tuple)):
        return tuple(map(form, x))
    return x if x is None or isinstance(x, (bool, str, torch.dtype)) else type(x)


def test_every_op_is_called_by_a_case():
    assert calls().keys() == OPS.keys()


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, device):
    """All kinds of test: schema, autograd registration, fake tensors, and AOT dispatch with symbolic sizes; a call of each form."""
    differentiable = not name.endswith("_backward")
    for args in {form(args): args for args in calls(device)[name]}.values():
        args = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(differentiable), args)
        torch.library.opcheck(getattr(torch.ops.edm2, name).default, args)


def test_bytes_of_tensors_in_tables():
    """What is updated is read and written."""
    x, reached, updated = (torch.zeros(n) for n in (2, 30, 400))
    launches = []
    with recording(launches.append):
        launch(None, (1,), x, x, 5, reached=[reached, updated], updated=[updated])
        launch(None, (0,), x)
    assert [y.bytes for y in launches] == [4 * (2 + 30 + 400 + 400)]
