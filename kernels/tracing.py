"""What this project's ops would do on a GPU, seen without one: for the ledger and for the compile gate."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from kernels.jit import Launch, recording
from kernels.registration import OPS


class OnGPU(TorchDispatchMode):
    """Runs this project's code as a GPU of an architecture would; each launch goes to `launched`. On fake tensors."""

    def __init__(self, launched: Callable[[Launch], None], capability: int = 90):
        super().__init__()
        self._recordings = []  # one for each time that it is entered
        self.launched = launched
        self.capability = capability

    def __enter__(self):
        self._recordings.append(recording(self.launched, self.capability))
        self._recordings[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self._recordings.pop().__exit__(*failure)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace != "edm2":
            return self.library(func, args, kwargs)
        op = OPS[func.overloadpacket.__name__]
        with self:
            return (op.triton or op.eager)(*args, **kwargs)

    def library(self, func, args: tuple, kwargs: dict) -> Any:
        """An operator of PyTorch."""
        return func(*args, **kwargs)
