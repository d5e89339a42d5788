"""All weights of a network: prepared for a step, and the gradients of prepared weights projected onto the raw."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config

import edm2
from bench.baseline import Baseline
from bench.case import REFERENCE, Candidates, Case
from bench.ledger import fake_network
from bench.models import compile_for, compile_name, make_network
from edm2.layers import MPConv
from edm2.weights import StepWeights
from kernels import reference
from kernels.eager import up_weight_backward
from kernels.jit import Launch
from kernels.reference import NO_FACTORS
from kernels.tracing import OnGPU
from kernels.weight import PreparedWeight


class Layer(NamedTuple):
    """A layer, its gain (None for 1) and the type that its weight is prepared in."""

    module: MPConv
    gain: Tensor | None
    dtype: torch.dtype


def weights_case(preset: str, backward: bool, needs_gpu: bool = True) -> Case:
    """PyTorch takes one weight after the other; this project all together. Compared are views of one form."""

    def build(device: torch.device) -> Candidates:
        net = make_network(preset, device)
        plain, layers = Baseline(net, fast=True), layers_of(net)
        scales = [_scale(layer) for layer in layers]

        def prepare() -> list[Tensor]:
            return [plain.weight(layer.module, scale, layer.dtype) for layer, scale in zip(layers, scales)]

        def exact() -> list[Tensor]:
            return [reference.mp_weight(m.weight, gain, torch.float32, m.heads, m.up, m.factors) for m, gain, _ in layers]

        compiled = compile_for(device, prepare)
        if not backward:
            own = torch.no_grad()(lambda: [_comparable(w, layer.module) for w, layer in zip(exact(), layers)])
            functions = {"eager": prepare, compile_name(device): compiled}
            return {REFERENCE: own, **{name: _plain_forward(f, layers) for name, f in functions.items()}, "edm2": _forward(net)}
        # A part along the weight, which the projection takes out, keeps the gains' gradients away from 0.
        gradients = [torch.randn_like(y) + 10 * y for y in torch.no_grad()(exact)()]
        return {
            REFERENCE: _plain_backward(exact, layers, lambda: gradients),
            "eager": _plain_backward(prepare, layers, lambda: _as_plain(gradients, layers, plain)),
            compile_name(device): _plain_backward(compiled, layers, lambda: _as_plain(gradients, layers, plain)),
            "edm2": _backward(net, gradients),
        }

    name = f"kernels/weights/{'project' if backward else 'prepare'}/{preset}"
    moved = float(traffic(preset, backward))
    return Case(name, build, bytes=moved, facts={"preset": preset}, tolerance=5e-3, needs_gpu=needs_gpu, compiles=True)


def layers_of(net: edm2.Precond) -> list[Layer]:
    gains = {net.unet.out_conv: net.unet.out_gain} | {block.emb_linear: block.emb_gain for block in net.unet.blocks()}
    compute = net.compute_dtype(net.unet.out_gain.device)
    modules = [module for module in net.modules() if isinstance(module, MPConv)]
    return [Layer(m, gains.get(m), compute if m.weight.ndim == 4 else torch.float32) for m in modules]


def _scale(layer: Layer) -> Tensor | float:
    """What multiplies a plain weight: a gain, or else constant factors."""
    factors, w = layer.module.factors, layer.module.weight
    if layer.gain is not None or factors == NO_FACTORS:
        return 1 if layer.gain is None else layer.gain
    return factors.columns(w.detach())[:, None, None] if factors.split else factors.right


def _parameters(layers: list[Layer]) -> list[Tensor]:
    return [x for module, gain, _ in layers for x in (module.weight, gain) if x is not None]


def _forward(net: edm2.Precond) -> Callable[[], list[Tensor]]:
    weights, layers = StepWeights(net), layers_of(net)

    def run() -> list[Tensor]:
        with weights.prepared():
            values = [value for value, _ in _prepared(net)]
        return [_comparable(value, layer.module) for value, layer in zip(values, layers)]

    return run


def _backward(net: edm2.Precond, gradients: list[Tensor]) -> Callable[[], list[Tensor]]:
    weights, parameters = StepWeights(net), _parameters(layers_of(net))
    with weights.prepared():
        _give_gradients(net, gradients)

    def run() -> list[Tensor]:
        weights.project()
        return [x.grad for x in parameters]

    return run


def _prepared(net: edm2.Precond) -> list[PreparedWeight]:
    """Those of each layer, the blocks' modulations being parts of one; within `StepWeights.prepared`."""
    together, sizes = net.unet.prepared_modulation, [len(block.emb_linear.weight) for block in net.unet.blocks()]
    parts = zip(*(x.detach().split(sizes, dim=1) for x in together))
    return [PreparedWeight(*next(parts)) if m.prepared is None else m.prepared for m, *_ in layers_of(net)]


def _give_gradients(net: edm2.Precond, gradients: list[Tensor]) -> None:
    """To the prepared weights; within `StepWeights.prepared`."""
    modulations = []
    for (module, *_), gradient in zip(layers_of(net), gradients):
        if module.prepared is None:
            modulations.append(gradient)
        else:
            rows = module.prepared.master.shape[1] - gradient.shape[1]  # of zeros, after those of the last weight
            module.prepared.master.grad = F.pad(gradient, (0, 0, 0, rows)).contiguous()
    net.unet.prepared_modulation.master.grad = torch.cat(modulations, dim=1)


def _plain_forward(function: Callable[[], list[Tensor]], layers: list[Layer]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        with torch.no_grad():
            return [_as_prepared(w, layer.module) for w, layer in zip(function(), layers)]

    return run


def _plain_backward(
    function: Callable[[], list[Tensor]], layers: list[Layer], gradients: Callable[[], list[Tensor]]
) -> Callable[[], list[Tensor]]:
    """The backward alone, of a graph that is made and kept at the first run."""
    kept: list[list[Tensor]] = []

    def run() -> list[Tensor]:
        if not kept:
            with functorch_config.patch(donated_buffer=False):  # compiled code would reuse the graph's memory
                kept.extend([function(), gradients()])
        return list(torch.autograd.grad(kept[0], _parameters(layers), kept[1], retain_graph=True))

    return run


def _comparable(w: Tensor, module: MPConv) -> Tensor:
    """A view of a prepared weight `[taps, Cout, Cin]`, of qkv `[taps, heads, 3, D, Cin]`; of sums of taps those of the corners."""
    w = w[:, : len(module.weight)]
    if module.up:
        return w[::5].unflatten(0, (2, 2))
    return w.unflatten(1, (module.heads, 3, -1)) if module.heads else w


def _as_prepared(w: Tensor, module: MPConv) -> Tensor:
    """The same view of a plain weight `[Cout, Cin, k, k]` or `[Cout, Cin]`."""
    w = w.flatten(2).permute(2, 0, 1) if w.ndim == 4 else w[None]
    if module.up:
        return w.unflatten(0, (3, 3))[::2, ::2]
    return w.unflatten(1, (module.heads, -1, 3)).transpose(2, 3) if module.heads else w


def _as_plain(gradients: list[Tensor], layers: list[Layer], plain: Baseline) -> list[Tensor]:
    """Gradients of prepared weights in the form, layout and type of the plain weights."""
    found = []
    for g, (module, _, dtype) in zip(gradients, layers):
        if module.heads:
            g = g.unflatten(1, (module.heads, 3, -1)).transpose(2, 3).flatten(1, 3)
        if module.up:
            g = up_weight_backward(g)
        g = g.permute(1, 2, 0).reshape(module.weight.shape).to(dtype)
        found.append(g.contiguous(memory_format=plain.format) if g.ndim == 4 else g.contiguous())
    return found


@lru_cache
def traffic(preset: str, backward: bool) -> int:
    """Bytes of the launches."""
    launches: list[Launch] = []
    with fake_network(preset) as net:
        weights = StepWeights(net)
        with OnGPU(launches.append):
            with weights.prepared():
                _give_gradients(net, [torch.empty(value.shape) for value, _ in _prepared(net)])
            if backward:
                launches.clear()
                weights.project()
    return sum(launch.bytes for launch in launches)
