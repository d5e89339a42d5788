"""The ledger: launches, FLOPs, bytes and saved bytes of a step, counted on fake tensors. No GPU needed.

Every operator that PyTorch dispatches and that is not a mere view counts as one launch, its inputs as read once and its
outputs as written once. This project's ops count by what they start: the Triton kernels that a GPU would launch, told by
`kernels.jit.recording`, and the library's operators. FLOPs are those of convolutions and matrix products (2 per
multiply-add). Saved bytes are what autograd keeps from the forward for the backward, parameters apart, each storage once.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import edm2
from bench.baseline import Baseline, BaselineOptimizer, UnpreparedWeights
from bench.case import data_size
from edm2.optimizer import EDM2Optimizer
from edm2.weights import StepWeights
from kernels.jit import Launch
from kernels.tracing import OnGPU

CLASSES = {
    "convolution": "convolution convolution_backward conv wgrad",
    "matrix product": "matmul mm addmm bmm baddbmm addmm_ linear",
    "attention": "_safe_softmax _softmax _softmax_backward_data _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_attention_math "
    "cosine_attention cosine_attention_dq cosine_attention_dkv",
    "reduction": "linalg_vector_norm sum mean count_nonzero sum_parts sum_rows",
    "copy": "_to_copy copy_ clone cat stack fill_ zeros zeros_like ones_like new_zeros slice_backward "
    "select_backward index upsample_nearest2d upsample_nearest2d_backward avg_pool2d avg_pool2d_backward",
    "optimizer": "adam _fused_adam_ lerp_ _foreach_lerp_ _foreach_mul_ _foreach_add_ _foreach_div_ nan_to_num",
}
OP_CLASS = {op: name for name, ops in CLASSES.items() for op in ops.split()}
NO_LAUNCH = set("detach _unsafe_view device promote_types empty empty_like new_empty new_empty_strided lift_fresh".split())


@dataclass
class Entry:
    """A sum over launches, and the bytes that autograd keeps for their backward."""

    launches: int = 0
    flops: int = 0
    bytes: int = 0
    saved: int = 0

    def add(self, other: "Entry") -> None:
        self.launches += other.launches
        self.flops += other.flops
        self.bytes += other.bytes
        self.saved += other.saved


@dataclass
class Ledger:
    """What one evaluation or training step does."""

    candidate: str
    preset: str
    batch: int
    phase: str
    classes: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))

    @property
    def total(self) -> Entry:
        total = Entry()
        for entry in self.classes.values():
            total.add(entry)
        return total

    def floor(self, tflops: float, tbps: float) -> float:
        """Seconds that the machine needs at least: per class, the larger of arithmetic and traffic."""
        return sum(max(e.flops / (tflops * 1e12), e.bytes / (tbps * 1e12)) for e in self.classes.values())

    def to_json(self) -> dict:
        facts = {name: getattr(self, name) for name in ("candidate", "preset", "batch", "phase")}
        return {**facts, "classes": {k: asdict(v) for k, v in self.classes.items()}, "total": asdict(self.total)}


class Recorder(OnGPU):
    """Adds every dispatched operator to a ledger."""

    def __init__(self, classes: dict[str, Entry]):
        super().__init__(self._launched)
        self.classes = classes

    def library(self, func, args: tuple, kwargs: dict) -> Any:
        name = func.overloadpacket.__name__
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if func.namespace == "prim" or func.is_view or name in NO_LAUNCH or _is_empty(out):
            return out
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        entry = Entry(1, flops, sum(_bytes(x) for x in (args, kwargs, out)))
        self.classes[OP_CLASS.get(name, "pointwise")].add(entry)
        return out

    def _launched(self, launch: Launch) -> None:
        name = launch.kernel.__name__.removesuffix("_kernel").removesuffix("_backward")
        self.classes[OP_CLASS.get(name, "pointwise")].add(Entry(1, launch.flops, launch.bytes))


def _is_composite(func) -> bool:
    """Is it only made of other operators, without code of its own? Autograd would have taken it apart."""
    keys, has = torch._C.DispatchKey, torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and has(func.name(), keys.CompositeImplicitAutograd) and not has(func.name(), keys.CPU)


def _bytes(tree) -> int:
    """Size of the elements of all tensors in a nested structure; an expanded tensor counts what it stores."""
    return sum(_stored(x) for x in tree_leaves(tree) if isinstance(x, Tensor))


def _stored(x: Tensor) -> int:
    return math.prod(n for n, stride in zip(x.shape, x.stride()) if stride) * x.element_size()


def _is_empty(out) -> bool:
    tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    return bool(tensors) and all(x.numel() == 0 for x in tensors)


CANDIDATES: dict[str, tuple[Callable[[edm2.Precond], nn.Module], type, type]] = {
    "eager": (Baseline, BaselineOptimizer, UnpreparedWeights),
    "eager, channels-last": (lambda net: Baseline(net, fast=True), BaselineOptimizer, UnpreparedWeights),
    "this project": (lambda net: net, EDM2Optimizer, StepWeights),
}


def count(candidate: str, preset: str, batch: int, phase: str) -> Ledger:
    """The ledger of one evaluation (`phase="eval"`) or training step (`"train"`) in fp16."""
    ledger = Ledger(candidate, preset, batch, phase)
    for kind, saved in _trace(candidate, preset, batch, phase, Recorder(ledger.classes)).items():
        ledger.classes[kind].saved = saved
    return ledger


def launches_of(candidate: str, preset: str, batch: int, phase: str, capability: int = 90) -> list[Launch]:
    """The Triton kernels that the same starts on a GPU of an architecture, in order."""
    launches: list[Launch] = []
    _trace(candidate, preset, batch, phase, OnGPU(launches.append, capability))
    return launches


def _trace(candidate: str, preset: str, batch: int, phase: str, mode: OnGPU) -> dict[str, int]:
    """Run an evaluation or a step under `mode`; returns the saved bytes by class of op."""
    wrap, optimizer_type, weights_type = CANDIDATES[candidate]
    with fake_network(preset) as net:
        model = wrap(net)
        inputs = inputs_for(net, batch)
        weights = weights_type(net)
        if phase == "eval":
            with torch.no_grad(), weights.prepared(), mode:
                model.eval()(inputs["images"], inputs["sigma"], inputs["labels"])
            return {}
        optimizer = optimizer_type(net, weights=weights)
        make_state(net, optimizer)
        model.train()
        with mode:
            with weights.prepared():
                loss = edm2.denoising_loss(model, **inputs).sum()
                saved = _saved_bytes(loss, net)
                loss.backward()
            weights.project()
            optimizer.step(0.01, 2 * batch, batch)
        return saved


def _saved_bytes(loss: Tensor, net: nn.Module) -> dict[str, int]:
    """Bytes that the nodes of autograd's graph keep, parameters apart, each storage with the first that keeps it."""
    counted, saved = {p.untyped_storage()._cdata for p in net.parameters()}, defaultdict(int)
    for node in sorted(_nodes(loss.grad_fn), key=lambda node: node._sequence_nr()):
        for x in _kept(node):
            storage = x.untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                saved[_class_of(node.name())] += storage.nbytes()
    return saved


def _nodes(last: Node) -> set[Node]:
    found, left = {last}, [last]
    while left:
        new = {node for node, _ in left.pop().next_functions if node is not None} - found
        found |= new
        left += new
    return found


def _kept(node: Node) -> list[Tensor]:
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [x for x in tree_leaves([values, getattr(node, "saved_tensors", ())]) if isinstance(x, Tensor)]


def _class_of(node: str) -> str:
    """Of nodes like `BmmBackward0` and `GeneratedBackwardFor_edm2_conv_sum_defaultBackward`."""
    if own := re.search("_edm2_(.+)_default", node):
        return "convolution" if own[1].startswith("conv") else OP_CLASS.get(own[1], "pointwise")
    name = re.sub("(?<!^)(?=[A-Z])", "_", node.partition("Backward")[0]).lower()
    return OP_CLASS.get(name) or OP_CLASS.get(f"_{name}", "pointwise")


def make_state(net: nn.Module, optimizer) -> None:
    """The first step of an optimizer makes its state; a step among many finds it."""
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with OnGPU(lambda launch: None):
        optimizer.step(0.01, 2, 1)
    for p in net.parameters():
        p.grad = None


@contextmanager
def fake_network(preset: str) -> Iterator[edm2.Precond]:
    """A network of a preset with its data's size, fp16, without memory."""
    with FakeTensorMode():
        yield edm2.build(preset, *data_size(preset), dtype=torch.float16)


def inputs_for(net: edm2.Precond, batch: int) -> dict[str, Tensor]:
    """Arguments of `denoising_loss`."""
    images = torch.zeros(batch, net.img_channels, net.img_resolution, net.img_resolution)
    labels = torch.zeros(batch, net.label_dim) if net.label_dim else None
    return {"images": images, "sigma": torch.ones(batch), "noise": images, "labels": labels}


def table(ledger: Ledger, tflops: float, tbps: float) -> str:
    """The ledger as text, largest traffic first."""
    rows = sorted(ledger.classes.items(), key=lambda item: -item[1].bytes)
    lines = [f"{ledger.candidate}, {ledger.preset}, batch {ledger.batch}, {ledger.phase}"]
    lines.append(f"{'':16}{'launches':>10}{'TFLOP':>10}{'GB':>10}{'saved GB':>10}")
    for name, e in [*rows, ("total", ledger.total)]:
        lines.append(f"{name:16}{e.launches:>10,}{e.flops / 1e12:>10.2f}{e.bytes / 1e9:>10.1f}{e.saved / 1e9:>10.2f}")
    floor = ledger.floor(tflops, tbps) * 1e3
    lines.append(f"floor at {tflops:.0f} TFLOP/s and {tbps} TB/s: {floor:.1f} ms")
    if saved := ledger.total.saved:
        lines.append(f"saved for the backward: {saved / ledger.batch / 1e6:.1f} MB per image")
    return "\n".join(lines)
