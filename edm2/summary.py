"""What a network costs, without running it: parameters, multiply-adds, memory. On PyTorch's meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from edm2.layers import MPConv
from edm2.loss import denoising_loss
from edm2.network import Precond

BYTES_PER_PARAMETER = 4 * 4  # fp32 weight, gradient, two Adam moments
AVERAGES = 2


def parameter_count(make_net: Callable[[], Precond]) -> int:
    """All trainable numbers, the uncertainty head included."""
    with torch.device("meta"):
        return sum(p.numel() for p in make_net().parameters())


def shared_memory(make_net: Callable[[], Precond], averages: int = AVERAGES) -> int:
    """Bytes of Adam's moments and the averages, which `--shard` spreads over the processes."""
    return parameter_count(make_net) * 4 * (2 + averages)


def multiply_adds(make_net: Callable[[], Precond]) -> int:
    """Multiply-adds of convolutions, linear layers and attention for one image (what papers often call FLOPs).

    By their definition: a convolution behind an up-sampling counts 9 taps for each pixel, of which its op computes 4.
    """
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        net = make_net()
        for module in net.modules():
            if isinstance(module, MPConv):
                module.up = False
        net(_image(net, 1), torch.ones(1))
    return counter.get_total_flops() // 2


def training_memory(make_net: Callable[[], Precond], images: int, averages: int = AVERAGES) -> tuple[int, int]:
    """Estimated bytes for (weights, gradients, optimizer and averages; activations saved for the backward).

    `images` are held at a time (a micro batch). The activations are those of this implementation in eager mode, with
    the compute dtype of a GPU; temporary buffers come on top.
    """
    with torch.device("meta"):
        net = make_net().train()
        net.dtype = torch.float16 if net.use_fp16 else torch.float32
        fixed, two = _loss_bytes(net, 1), _loss_bytes(net, 2)
    state = parameter_count(make_net) * (BYTES_PER_PARAMETER + 4 * averages)
    return state, fixed + (two - fixed) * (images - 1)


def _image(net: Precond, n: int) -> Tensor:
    return torch.zeros(n, net.img_channels, net.img_resolution, net.img_resolution)


def _loss_bytes(net: Precond, n: int) -> int:
    """Bytes that autograd keeps for one loss on n images."""
    with saved_bytes(net) as saved:
        denoising_loss(net, _image(net, n), torch.ones(n), _image(net, n))
    return saved()


@contextmanager
def saved_bytes(net: nn.Module) -> Iterator[Callable[[], int]]:
    """Within it, autograd's saved tensors are counted; the result gives their bytes.

    Activations only: each storage counts once, those of the network's parameters and of the weights prepared from them
    for a whole step (`edm2.weights`) not at all.
    """
    own = {x.untyped_storage()._cdata for x in (*net.parameters(), *_prepared_weights(net))}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield lambda: sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in own)


def _prepared_weights(net: nn.Module) -> Iterator[Tensor]:
    for module in net.modules():
        for weight in (getattr(module, name, None) for name in ("prepared", "prepared_modulation")):
            if weight is not None:
                yield weight.value
