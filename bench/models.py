"""Blocks, training steps, evaluations and optimizers: this project against what PyTorch makes of the same network."""

import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import edm2
from bench.baseline import Baseline, BaselineOptimizer
from bench.case import Candidates, Case, data_size
from edm2.summary import multiply_adds


def block_case(preset: str, batch: int, level: int = 0, needs_gpu: bool = True) -> Case:
    """Forward and backward of one encoder block (the last of its level) on given activations."""
    resolution = data_size(preset)[0] >> level

    def build(device: torch.device) -> Candidates:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        net = _network(preset, device).train()
        block = [b for name, b in net.unet.enc.items() if name.startswith(f"{resolution}x{resolution}_block")][-1]
        channels, emb_channels = block.conv_res1.weight.shape[0], block.emb_linear.weight.shape[1]
        x = torch.randn(batch, channels, resolution, resolution, device=device, dtype=dtype)
        emb = torch.randn(batch, emb_channels, device=device)

        def run(forward: Callable, x: Tensor, back: Callable) -> Callable[[], Tensor]:
            x = x.requires_grad_()

            def step() -> Tensor:
                net.zero_grad()
                x.grad = None
                y = forward(x, emb)
                y.backward(torch.ones_like(y))
                return back(x.grad)

            return step

        plain, fast = Baseline(net), Baseline(net, fast=True)
        compiled = torch.compile(lambda x, emb: fast.block(block, x, emb), fullgraph=True, backend=backend(device))
        last = x.contiguous(memory_format=torch.channels_last)
        nhwc = x.permute(0, 2, 3, 1).contiguous()
        return {
            "eager": run(lambda x, emb: plain.block(block, x, emb), x.clone(), lambda g: g),
            "eager channels-last": run(lambda x, emb: fast.block(block, x, emb), last.clone(), lambda g: g),
            compile_name(device): run(compiled, last.clone(), lambda g: g),
            "edm2": run(block, nhwc, lambda g: g.permute(0, 3, 1, 2)),
        }

    facts = {"preset": preset, "batch": batch, "resolution": resolution}
    return Case(f"block/{preset}/{resolution}x{resolution}/n{batch}", build, images=batch, facts=facts, needs_gpu=needs_gpu)


def train_case(preset: str, batch: int, needs_gpu: bool = True) -> Case:
    """Forward, loss, backward and optimizer of a training step; the reference is the published form."""

    def build(device: torch.device) -> Candidates:
        inputs = _inputs(preset, batch, device)
        return {
            "eager": _Step(preset, device, inputs, Baseline, BaselineOptimizer),
            "eager channels-last": _Step(preset, device, inputs, lambda net: Baseline(net, fast=True), BaselineOptimizer),
            compile_name(device): _Step(preset, device, inputs, _compiled, BaselineOptimizer),
            "edm2": _Step(preset, device, inputs, lambda net: net, edm2.EDM2Optimizer),
        }

    flops = 6.0 * _macs(preset) * batch
    facts = {"preset": preset, "batch": batch}
    return Case(f"train/{preset}/n{batch}", build, flops, images=batch, facts=facts, needs_gpu=needs_gpu, flush=False)


def compiled_case(preset: str, batch: int, mode: str) -> Case:
    """A training step under a slower-compiling mode of `torch.compile`, a case of its own: minutes of compilation."""

    def build(device: torch.device) -> Candidates:
        inputs = _inputs(preset, batch, device)
        return {
            "eager channels-last": _Step(preset, device, inputs, lambda net: Baseline(net, fast=True), BaselineOptimizer),
            f"compile {mode}": _Step(preset, device, inputs, lambda net: _compiled(net, mode), BaselineOptimizer),
        }

    facts = {"preset": preset, "batch": batch, "mode": mode}
    flops = 6.0 * _macs(preset) * batch
    return Case(f"train/{preset}/n{batch}/{mode}", build, flops, images=batch, facts=facts, flush=False)


def sample_case(preset: str, batch: int, needs_gpu: bool = True) -> Case:
    """One evaluation of the network, as a sampler makes it."""

    def build(device: torch.device) -> Candidates:
        net, inputs = _network(preset, device).eval().requires_grad_(False), _inputs(preset, batch, device)
        models = {"eager": Baseline(net), "eager channels-last": Baseline(net, fast=True), "edm2": net}
        models[compile_name(device)] = _compiled(net)
        arguments = inputs["images"], inputs["sigma"], inputs["labels"]
        return {name: torch.no_grad()(lambda model=model: model(*arguments)) for name, model in models.items()}

    flops = 2.0 * _macs(preset) * batch
    facts = {"preset": preset, "batch": batch}
    return Case(f"sample/{preset}/n{batch}", build, flops, images=batch, facts=facts, needs_gpu=needs_gpu, flush=False)


def optimizer_case(preset: str, needs_gpu: bool = True) -> Case:
    """The optimizer alone: 46 bytes per parameter is the least a step can move."""

    def build(device: torch.device) -> Candidates:
        def stepper(optimizer_type: type) -> Callable[[], Any]:
            net = _network(preset, device)
            optimizer = optimizer_type(net)
            generator = torch.Generator(device).manual_seed(0)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device=device)
            return lambda: optimizer.step(0.01, 2**20, 2048)

        return {"eager": stepper(BaselineOptimizer), "edm2": stepper(edm2.EDM2Optimizer)}

    with torch.device("meta"):
        parameters = sum(p.numel() for p in edm2.build(preset, *data_size(preset)).parameters())
    facts = {"preset": preset, "parameters": parameters}
    return Case(f"optimizer/{preset}", build, bytes=46.0 * parameters, facts=facts, needs_gpu=needs_gpu)


@lru_cache
def _macs(preset: str) -> int:
    return multiply_adds(lambda: edm2.build(preset, *data_size(preset)))


def _network(preset: str, device: torch.device) -> edm2.Precond:
    """The same weights each time, gains non-zero."""
    torch.manual_seed(0)
    with device:
        net = edm2.build(preset, *data_size(preset))
    for name, p in net.named_parameters():
        if name.endswith("gain"):
            torch.nn.init.constant_(p, 0.5)
    edm2.force_weight_norm_(net)
    return net


def _inputs(preset: str, batch: int, device: torch.device) -> dict[str, Tensor]:
    resolution, channels, classes = data_size(preset)
    generator = torch.Generator(device).manual_seed(0)
    images, noise = torch.randn(2, batch, channels, resolution, resolution, generator=generator, device=device) / 2
    sigma = torch.rand(batch, generator=generator, device=device) + 0.1
    labels = F.one_hot(torch.arange(batch, device=device) % classes, classes).float()
    return {"images": images, "sigma": sigma, "noise": noise, "labels": labels}


def _compiled(net: edm2.Precond, mode: str | None = None) -> torch.nn.Module:
    """`torch.compile` of the baseline in its best layout."""
    device = next(net.parameters()).device
    return torch.compile(Baseline(net, fast=True), fullgraph=True, backend=backend(device), mode=mode)


def backend(device: torch.device) -> str:
    """What compiles: without a GPU only the tracing, so that a rehearsal needs no C++ compiler."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def compile_name(device: torch.device) -> str:
    """The name of the compiled candidate; on a CPU it is no baseline."""
    return "compile" if device.type == "cuda" else "traced, not compiled"


class _Step:
    """A training step; returns the loss per image. `parts` times its phases."""

    def __init__(self, preset: str, device: torch.device, inputs: dict[str, Tensor], wrap: Callable, optimizer_type: type):
        self.device, self.inputs = device, inputs
        self._make = lambda net: (wrap(net), optimizer_type(net))
        self._preset, self._state = preset, None

    def __call__(self) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        self.step()
        return loss.detach().mean(dim=(1, 2, 3))

    def forward(self) -> Tensor:
        if self._state is None:  # built at the first call, so that candidates do not share the memory
            self._state = self._make(_network(self._preset, self.device).train())
        model, optimizer = self._state
        optimizer.zero_grad()
        return edm2.denoising_loss(model, **self.inputs)

    def backward(self, loss: Tensor) -> None:
        (loss.sum() / len(loss)).backward()

    def step(self) -> None:
        self._state[1].step(1e-4, 2**20, len(self.inputs["images"]))

    def parts(self, runs: int = 5) -> dict[str, float]:
        """Median seconds of each phase, the device waited for in between."""
        times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

        def timed(name: str, run: Callable, *args: Any) -> Any:
            start = time.perf_counter()
            result = run(*args)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
            return result

        for _ in range(runs):
            timed("backward", self.backward, timed("forward", self.forward))
            timed("optimizer", self.step)
        return {name: median(values) for name, values in times.items()}
