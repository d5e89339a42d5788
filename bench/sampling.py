"""Sampling: an evaluation, a guided one, a whole trajectory, and on to pixels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import edm2
from bench.baseline import Baseline
from bench.case import Candidates, Case, data_size
from bench.models import compile_name, compiled_baseline, macs, make_inputs, make_network
from edm2.chunks import InChunks
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.vae import VAEEncoder, autoencoder_kl
from kernels import batch_invariance

INVARIANT = "edm2 batch-invariant"  # the same bits in any batch, as images are generated
GUIDANCE = 1.4  # published for EDM2-S with EDM2-XS; any but 1 takes the same time


def sample_case(
    preset: str,
    batch: int,
    *,
    guided: bool = False,
    steps: int = 0,
    decoded: bool = False,
    mode: str | None = None,
    needs_gpu: bool = True,
) -> Case:
    """One evaluation of the network as a sampler makes it; with `steps`, a whole trajectory of Heun steps.

    `guided` evaluates the guide too; `decoded` goes on to uint8 pixels on the host. `mode`: a mode of torch.compile,
    against channels-last alone.
    """

    def build(device: torch.device) -> Candidates:
        decode = decoder(preset, device) if decoded else None
        presets = (preset, guide_of(preset)) if guided else (preset,)
        nets = [make_network(p, device).eval().requires_grad_(False) for p in presets]
        inputs = make_inputs(preset, batch, device)

        def candidate(wrap: Callable[[edm2.Precond], Callable]) -> Callable[[], Tensor]:
            models = [wrap(net) for net in nets]
            return torch.no_grad()(lambda: _sample(models, inputs, steps, decode))

        def invariant(net: edm2.Precond) -> Callable:
            folded = edm2.fold(net)
            return batch_invariance()(InChunks(folded) if device.type == "cpu" else folded)

        def compiled(net: edm2.Precond) -> Callable:
            return _with_tensor_sigma(compiled_baseline(net, mode))

        wraps = {"eager": Baseline, "eager channels-last": lambda net: Baseline(net, fast=True)}
        wraps |= {compile_name(device, mode): compiled, "edm2": edm2.fold, INVARIANT: invariant}
        if mode is not None:
            wraps = {name: wraps[name] for name in ("eager channels-last", compile_name(device, mode))}
        return {name: candidate(wrap) for name, wrap in wraps.items()}

    evaluations = max(1, 2 * steps - 1)
    flops = 2.0 * batch * evaluations * (macs(preset) + (macs(guide_of(preset)) if guided else 0))
    kinds = {"guided": guided, "decoded" if decoded else "trajectory": steps > 0, mode: mode is not None}
    name = "/".join([f"sample/{preset}/n{batch}", *(kind for kind, wanted in kinds.items() if wanted)])
    facts: dict[str, Any] = {"preset": preset, "batch": batch, "evaluations": evaluations}
    facts |= {"guide": guide_of(preset)} if guided else {}
    facts |= {"mode": mode} if mode else {}
    warmup = 0 if steps else 3  # the trajectory that is checked has warmed everything up
    return Case(name, build, flops, 0.0, batch, facts, needs_gpu=needs_gpu, flush=False, warmup=warmup, compiles=not steps)


def guide_of(preset: str) -> str:
    """The smallest network of the same data that was published as a guide; the digits guide themselves."""
    return preset if preset == "digits" else f"{preset.rsplit('-', 1)[0]}-xs"


def _sample(models: list[Callable], inputs: dict[str, Tensor], steps: int, decode: Callable | None) -> Tensor:
    """A denoised image, or the end of a trajectory.

    Ends are held to the tolerance of a single evaluation: with random weights trajectories do not diverge (EDM2-XXS,
    8 steps, and the digits, 32 steps: fp16 ends 4e-4 off fp32), and an error of any evaluation shows in them.
    """
    if steps:
        guidance = GUIDANCE if len(models) > 1 else 1
        x = edm2.edm_sampler(models[0], 2 * inputs["noise"], inputs["labels"], *models[1:], num_steps=steps, guidance=guidance)
    else:
        x, *guide = (model(inputs["images"], inputs["sigma"], inputs["labels"]) for model in models)
        x = guide[0].lerp(x, GUIDANCE) if guide else x
    return x if decode is None else decode(x)


def _with_tensor_sigma(model: Callable) -> Callable:
    """The noise level as a tensor: for each number, torch.compile would compile anew."""

    def call(x: Tensor, sigma: Tensor | float, labels: Tensor) -> Tensor:
        sigma = sigma if isinstance(sigma, Tensor) else torch.full((len(x),), sigma, device=x.device)
        return model(x, sigma, labels)

    return call


def decoder(preset: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From samples to uint8 `[N, H, W, C]` on the host; UserError where latents need diffusers, which is not there.

    The VAE has the architecture of `sd-vae-ft-mse` and random weights: they are enough for a speed. All candidates decode
    as images are generated, with the same bits in any batch.
    """
    encoder = RGBEncoder() if data_size(preset)[1] != 4 else _random_vae(device)
    return lambda x: encoder.decode(x).permute(0, 2, 3, 1).cpu()


def _random_vae(device: torch.device) -> VAEEncoder:
    kind = autoencoder_kl()
    torch.manual_seed(0)
    with device:
        vae = kind(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, sample_size=256,
        )  # fmt: skip
    return VAEEncoder(LatentEncoder(), vae)
