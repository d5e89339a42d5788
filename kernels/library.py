"""Convolutions by PyTorch's library: cuDNN and cuBLAS, oneDNN on a CPU.

`kernels.eager` convolves by them, and kernels do where the table of tiles says so: in fp32, and in training where they win.
Not in sampling, fp32 apart: the library chooses its algorithm by the batch, so that an image would depend on its neighbours.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def convolution(x: Tensor, w: Tensor, transposed: bool = False) -> Tensor:
    """u `[N, H, W, C]` of x `[N, H, W, K]` and w `[9 or 1, C, K]`; transposed, x's gradient for u's.

    With a w of 16 taps (see `reference.up_weight`), u is `[N, 2H, 2W, C]`.
    """
    if w.shape[0] == 1:
        return x @ (w[0] if transposed else w[0].T)
    up = w.shape[0] == 16
    if x.numel() == 0:
        (n, height, width, _), channels = x.shape, w.shape[2 if transposed else 1]
        size = (height // 2, width // 2) if up and transposed else (2 * height, 2 * width) if up else (height, width)
        return x.new_empty(n, *size, channels)
    u = aten.convolution(x.permute(0, 3, 1, 2), _kernel(w), None, *_form(up), transposed != up, [0, 0], 1)
    return u.permute(0, 2, 3, 1).contiguous()


def weight_gradient(g: Tensor, x: Tensor, taps: int) -> Tensor:
    """dw `[taps, C, K]` in the type of g `[N, H, W, C]`; x `[N, H, W, K]`. With 16 taps g is `[N, 2H, 2W, C]`."""
    if taps == 1:
        return (g.flatten(0, 2).T @ x.flatten(0, 2))[None]
    up, like = taps == 16, g.new_empty(taps, g.shape[3], x.shape[3])
    if x.numel() == 0:
        return like.zero_()
    g, x = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)
    _, dw, _ = aten.convolution_backward(g, x, _kernel(like), None, *_form(up), up, [0, 0], 1, [False, True, False])
    return _taps(dw) if up else dw.flatten(2).permute(2, 0, 1)


def _form(up: bool) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation. Four 2×2 phases of x are one 4×4 convolution of stride 2, transposed."""
    return [2, 2] if up else [1, 1], [1, 1], [1, 1]


def _kernel(w: Tensor) -> Tensor:
    """`[C, K, 3, 3]` of 9 taps; `[K, C, 4, 4]` of 16, as transposed convolutions have it: 3 − 2·tap − phase each way."""
    if w.shape[0] == 9:
        return w.permute(1, 2, 0).unflatten(2, (3, 3))
    phases_taps = w.flip(0).unflatten(0, (2, 2, 2, 2))  # of rows, of columns
    return phases_taps.permute(5, 4, 2, 0, 3, 1).flatten(4, 5).flatten(2, 3)


def _taps(kernel: Tensor) -> Tensor:
    """The inverse: `[K, C, 4, 4]` → `[16, C, K]`."""
    taps_phases = kernel.unflatten(3, (2, 2)).unflatten(2, (2, 2))
    return taps_phases.permute(3, 5, 2, 4, 1, 0).flatten(0, 3).flip(0)
