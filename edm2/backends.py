"""Process-wide settings of PyTorch and the C library."""

import ctypes
from contextlib import suppress

import torch
from torch import Tensor

PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312}  # dense fp16 tensor cores, from the data sheets


def peak_flops(device: torch.device) -> float | None:
    """The fp16 peak of a GPU in FLOP/s; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if key in name), None)


def full_precision(benchmark: bool = True) -> None:
    """Full fp32 products and full-precision sums of fp16 ones, as in the paper (appendix D.2).

    `benchmark`: may cuDNN measure which algorithm is quickest?
    """
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a step frees instead of returning it to the system and faulting it in again.

    8,000 page faults fewer per step of the digits preset on two cores.
    """
    with suppress(OSError, AttributeError, TypeError):  # where the C library is another
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: up to this size from the heap, its maximum
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: shrink the heap only beyond this


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """From the host, which goes on without waiting for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
