"""Blocks, training steps and optimizers: this project against what PyTorch makes of the same network."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import edm2
from bench.baseline import Baseline, BaselineOptimizer, UnpreparedWeights, mp_cat
from bench.case import OWN_COMPILED, OWN_GRAPH, Candidates, Case, data_size
from bench.ledger import fake_network, make_state
from edm2.data import ImageDataset, batches
from edm2.diagnostics import NoiseLevels
from edm2.distributed import Processes
from edm2.latents import Encoder, encoder_for
from edm2.step import Round, TrainingStep
from edm2.summary import multiply_adds
from edm2.weights import StepWeights
from kernels.jit import Launch
from kernels.tracing import OnGPU


def block_case(preset: str, batch: int, level: int = 0, flavor: str = "enc", needs_gpu: bool = True) -> Case:
    """Forward and backward of the last block of a level, from given activations and a given gradient.

    A decoder block also joins a skip. Compared are the gradients of activations and weights.
    """
    resolution = data_size(preset)[0] >> level

    def build(device: torch.device) -> Candidates:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        net = make_network(preset, device).train()
        blocks = getattr(net.unet, flavor).items()
        block = [block for name, block in blocks if name.startswith(f"{resolution}x{resolution}_block")][-1]
        channels, emb_channels = block.conv_res1.weight.shape[0], block.emb_linear.weight.shape[1]
        skip_channels = block.conv_res0.weight.shape[1] - channels if flavor == "dec" else 0
        shapes = [(batch, c, resolution, resolution) for c in (channels, channels, skip_channels) if c]
        g, *sources = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        emb = torch.randn(batch, emb_channels, device=device)

        def run(forward: Callable[..., Tensor], form: Callable[[Tensor], Tensor], back: Callable = lambda dx: dx) -> Callable:
            inputs = [form(x).clone().requires_grad_() for x in sources]
            gradient, weights = form(g), [p for p in block.parameters() if p.ndim]

            def step() -> list[Tensor]:
                found = torch.autograd.grad(forward(*inputs), [*inputs, *weights, block.emb_gain], gradient)
                return [*map(back, found[: len(inputs)]), *found[len(inputs) : -1]]  # a gain's is a sum that may cancel

            return step

        def plain(fast: bool) -> Callable[..., Tensor]:
            network = Baseline(net, fast)
            return lambda x, *skip: network.block(block, mp_cat(x, *skip, block.concat_balance) if skip else x, emb)

        def own(x: Tensor, *skip: Tensor) -> Tensor:
            return block(x, block.modulation(emb).to(x.dtype), *skip)

        last = partial(Tensor.contiguous, memory_format=torch.channels_last)
        return {
            "eager": run(plain(False), Tensor.contiguous),
            "eager channels-last": run(plain(True), last),
            compile_name(device): run(compile_for(device, plain(True)), last),
            "edm2": run(own, lambda x: x.permute(0, 2, 3, 1).contiguous(), lambda dx: dx.permute(0, 3, 1, 2)),
        }

    facts = {"preset": preset, "batch": batch, "resolution": resolution, "flavor": flavor}
    name = f"block/{preset}/{'' if flavor == 'enc' else flavor + '-'}{resolution}x{resolution}/n{batch}"
    return Case(name, build, images=batch, facts=facts, needs_gpu=needs_gpu, compiles=True)


def train_case(preset: str, batch: int, needs_gpu: bool = True) -> Case:
    """Forward, loss, backward and optimizer of a training step; the reference is the published form."""

    def build(device: torch.device) -> Candidates:
        inputs = make_inputs(preset, batch, device)
        own = partial(_Step, preset, device, inputs, lambda net: net, edm2.EDM2Optimizer, StepWeights)
        return {
            "eager": _Step(preset, device, inputs, Baseline, BaselineOptimizer),
            "eager channels-last": _Step(preset, device, inputs, lambda net: Baseline(net, fast=True), BaselineOptimizer),
            compile_name(device): _Step(preset, device, inputs, compiled_baseline, BaselineOptimizer),
            "edm2": own(),
            own_compile_name(device): own(loss=compile_for(device, edm2.denoising_loss)),
            **({OWN_GRAPH: _GraphedStep(preset, device, inputs)} if device.type == "cuda" else {}),
        }

    flops = 6.0 * macs(preset) * batch
    facts = {"preset": preset, "batch": batch}
    name = f"train/{preset}/n{batch}"
    return Case(name, build, flops, images=batch, facts=facts, needs_gpu=needs_gpu, flush=False, compiles=True)


def compiled_case(preset: str, batch: int, mode: str) -> Case:
    """A training step under a slower-compiling mode of `torch.compile`, a case of its own: minutes of compilation."""

    def build(device: torch.device) -> Candidates:
        inputs = make_inputs(preset, batch, device)
        return {
            "eager channels-last": _Step(preset, device, inputs, lambda net: Baseline(net, fast=True), BaselineOptimizer),
            compile_name(device, mode): _Step(preset, device, inputs, lambda net: compiled_baseline(net, mode), BaselineOptimizer),
        }

    facts = {"preset": preset, "batch": batch, "mode": mode}
    flops = 6.0 * macs(preset) * batch
    warm = mode != "max-autotune"  # it chooses by timing, and must have the GPU to itself
    return Case(f"train/{preset}/n{batch}/{mode}", build, flops, images=batch, facts=facts, flush=False, compiles=warm)


def optimizer_case(preset: str, needs_gpu: bool = True) -> Case:
    """The optimizer alone; bytes are those of this project's launch, which prepares the next forward's weights too.

    Compared are weights and an average.
    """

    def build(device: torch.device) -> Candidates:
        def stepper(optimizer_type: type, weights_type: type = UnpreparedWeights) -> Callable[[], Any]:
            net = make_network(preset, device)
            optimizer = optimizer_type(net, weights=weights_type(net))
            generator = torch.Generator(device).manual_seed(0)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device=device)

            def step() -> list[Tensor]:
                optimizer.step(0.01, 2**20, 2048)
                return [*net.parameters(), *optimizer.emas[0.05]]

            return step

        return {"eager": stepper(BaselineOptimizer), "edm2": stepper(edm2.EDM2Optimizer, StepWeights)}

    with torch.device("meta"):
        parameters = sum(p.numel() for p in edm2.build(preset, *data_size(preset)).parameters())
    facts = {"preset": preset, "parameters": parameters}
    moved = float(optimizer_bytes(preset))
    return Case(f"optimizer/{preset}", build, bytes=moved, facts=facts, tolerance=1e-4, needs_gpu=needs_gpu, dtype="float32")


@lru_cache
def optimizer_bytes(preset: str) -> int:
    """What the launches of one step among many move."""
    launches: list[Launch] = []
    with fake_network(preset) as net:
        optimizer = edm2.EDM2Optimizer(net, weights=StepWeights(net))
        make_state(net, optimizer)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        with OnGPU(launches.append):
            optimizer.step(0.01, 2, 1)
    return sum(launch.bytes for launch in launches)


@lru_cache
def macs(preset: str) -> int:
    return multiply_adds(lambda: edm2.build(preset, *data_size(preset)))


def make_network(preset: str, device: torch.device) -> edm2.Precond:
    """The same weights each time, gains non-zero."""
    torch.manual_seed(0)
    with device:
        net = edm2.build(preset, *data_size(preset))
    for name, p in net.named_parameters():
        if name.endswith("gain"):
            torch.nn.init.constant_(p, 0.5)
    edm2.force_weight_norm_(net)
    return net


def make_inputs(preset: str, batch: int, device: torch.device) -> dict[str, Tensor]:
    resolution, channels, classes = data_size(preset)
    generator = torch.Generator(device).manual_seed(0)
    images, noise = torch.randn(2, batch, channels, resolution, resolution, generator=generator, device=device) / 2
    sigma = torch.rand(batch, generator=generator, device=device) + 0.1
    labels = F.one_hot(torch.arange(batch, device=device) % classes, classes).float()
    return {"images": images, "sigma": sigma, "noise": noise, "labels": labels}


def compiled_baseline(net: edm2.Precond, mode: str | None = None) -> Callable:
    """`torch.compile` of the baseline in its best layout."""
    return compile_for(next(net.parameters()).device, Baseline(net, fast=True), mode)


def compile_for(device: torch.device, function: Callable, mode: str | None = None) -> Callable:
    """`torch.compile` for fixed sizes; without a GPU only the tracing, so that a rehearsal needs no C++ compiler."""
    on_gpu = device.type == "cuda"
    backend, mode = ("inductor", mode) if on_gpu else ("aot_eager", None)
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, mode=mode)


def compile_name(device: torch.device, mode: str | None = None) -> str:
    """The name of a compiled candidate; on a CPU it is no baseline."""
    name = "compile" if device.type == "cuda" else "traced, not compiled"
    return name if mode is None else f"{name} {mode}"


def own_compile_name(device: torch.device) -> str:
    return OWN_COMPILED if device.type == "cuda" else f"edm2 {compile_name(device)}"


class _GraphedStep:
    """A training step as one CUDA graph; returns the loss per image."""

    def __init__(self, preset: str, device: torch.device, inputs: dict[str, Tensor]):
        self._make, self._inputs, self._step = partial(self._build, preset, device), inputs, None

    def __call__(self) -> Tensor:
        inputs = self._inputs
        self._step = self._step or self._make()
        sigma = inputs["sigma"].reshape(-1, 1, 1, 1)
        self._step([Round(inputs["images"], inputs["labels"], sigma, inputs["noise"] / sigma, None, None)], 1e-4, 2**20, len(sigma))
        return self._losses

    def _build(self, preset: str, device: torch.device) -> TrainingStep:
        net = make_network(preset, device).train()
        weights, levels = StepWeights(net), NoiseLevels(Processes(0, 1, device))
        optimizer, n = edm2.EDM2Optimizer(net, weights=weights), len(self._inputs["images"])
        return TrainingStep(net, self._loss, _Unencoded(), weights, optimizer, levels, 1 / n, net.sigma_data, graph=True)

    def _loss(self, *arguments: Any) -> Tensor:
        loss = edm2.denoising_loss(*arguments)
        self._losses = loss.detach().mean(dim=(1, 2, 3))
        return loss


class _Unencoded:
    def encode(self, x: Tensor, normal: None) -> Tensor:
        return x


@lru_cache(maxsize=1)
def data_stream(preset: str, batch: int) -> tuple[Iterator[tuple[Tensor, Tensor]], Encoder]:
    """The training loop's own stream of batches, of `batch` random images that it keeps decoded in memory."""
    resolution, channels, classes = data_size(preset)
    random = np.random.RandomState(0)
    with TemporaryDirectory() as folder:
        names = [f"{i}.npy" for i in range(batch)]
        for name in names:
            if channels == 4:  # latents: means and standard deviations
                image = random.rand(8, resolution, resolution).astype(np.float32)
            else:
                image = random.randint(0, 256, (channels, resolution, resolution)).astype(np.uint8)
            np.save(Path(folder) / name, image)
        labels = [[name, classes - 1 - i % classes] for i, name in enumerate(names)]
        (Path(folder) / "dataset.json").write_text(json.dumps({"labels": labels}))
        dataset = ImageDataset(folder)
        encoder, _ = encoder_for(dataset.image_shape[0], dataset.dtype)
        return batches(dataset, 0, 0, batch), encoder


class _Step:
    """A training step; returns the loss per image. `parts` times its phases."""

    def __init__(
        self, preset: str, device: torch.device, inputs: dict[str, Tensor], wrap: Callable, optimizer_type: type,
        weights_type: type = UnpreparedWeights, loss: Callable[..., Tensor] = edm2.denoising_loss,
    ):  # fmt: skip
        self.device, self.inputs, self._loss = device, inputs, loss
        self._types = wrap, optimizer_type, weights_type
        self._preset, self._state, self._round = preset, None, ExitStack()

    def __call__(self) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        self.step()
        return loss.detach().mean(dim=(1, 2, 3))

    def forward(self) -> Tensor:
        if self._state is None:  # built at the first call, so that candidates do not share the memory
            self._state = self._build(make_network(self._preset, self.device).train())
        model, optimizer, weights = self._state
        optimizer.zero_grad()
        self._round.enter_context(weights.prepared())
        return self._loss(model, **self.inputs)

    def _build(self, net: edm2.Precond) -> tuple:
        wrap, optimizer_type, weights_type = self._types
        weights = weights_type(net)
        return wrap(net), optimizer_type(net, weights=weights), weights

    def backward(self, loss: Tensor) -> None:
        (loss.sum() / len(loss)).backward()
        self._round.close()
        self._state[2].project()

    def step(self) -> None:
        self._state[1].step(1e-4, 2**20, len(self.inputs["images"]))

    def fetch(self) -> Tensor:
        stream, encoder = data_stream(self._preset, len(self.inputs["images"]))
        images, _ = (x.to(self.device, non_blocking=True) for x in next(stream))
        return encoder.encode(images, self.inputs["noise"] if encoder.draws_noise else None)

    def parts(self, runs: int = 5) -> dict[str, float]:
        """Median seconds of each phase, the device waited for in between; `data` fetches, moves and encodes a batch."""
        times: dict[str, list[float]] = {"data": [], "forward": [], "backward": [], "optimizer": []}

        def timed(name: str, run: Callable, *args: Any) -> Any:
            start = time.perf_counter()
            result = run(*args)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
            return result

        for _ in range(runs):
            timed("data", self.fetch)
            timed("backward", self.backward, timed("forward", self.forward))
            timed("optimizer", self.step)
        return {name: median(values) for name, values in times.items()}
