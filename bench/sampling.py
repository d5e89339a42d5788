"""Sampling: an evaluation, a guided one, a whole trajectory, and on to pixels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import edm2
from bench.baseline import Baseline
from bench.case import REFERENCE, Candidates, Case, data_size
from bench.models import compile_name, compiled_baseline, macs, make_inputs, make_network
from edm2.denoisers import Denoiser, Plain, choose
from edm2.latents import LatentEncoder, RGBEncoder
from edm2.sampler import Heun
from edm2.vae import VAEEncoder, autoencoder_kl
from kernels import batch_invariance

INVARIANT = "edm2 batch-invariant"  # the same bits in any batch, as images are generated
WITHOUT_GRAPHS = "edm2 without graphs"
SIGMA = 0.5  # any: what an evaluation takes does not depend on it
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

    heun = Heun(max(1, steps), guidance=GUIDANCE if guided else 1)

    def build(device: torch.device) -> Candidates:
        decode = decoder(preset, device) if decoded else None
        nets = [make_network(p, device).eval().requires_grad_(False) for p in ((preset, guide_of(preset)) if guided else (preset,))]
        inputs = make_inputs(preset, batch, device)

        def plain(wrap: Callable[[edm2.Precond], Callable]) -> Callable[[], Tensor]:
            return _runner(Plain(*map(wrap, nets)), heun, inputs, steps, decode)

        def own(fast: bool, **how: bool) -> Callable[[], Tensor]:
            invariantly = batch_invariance(not fast)
            return invariantly(_runner(choose(*nets, fast=fast, **how), heun, inputs, steps, decode))

        fast_baseline = plain(partial(Baseline, fast=True))
        compiled = plain(lambda net: _with_tensor_sigma(compiled_baseline(net, mode)))
        if mode is not None:
            return {"eager channels-last": fast_baseline, compile_name(device, mode): compiled}
        candidates = {"eager": plain(Baseline), "eager channels-last": fast_baseline, compile_name(device): compiled}
        candidates |= {"edm2": own(fast=True), INVARIANT: own(fast=False)}
        return candidates | ({WITHOUT_GRAPHS: own(fast=True, graphs=False)} if device.type == "cuda" else {})

    evaluations = max(1, 2 * steps - 1)
    flops = 2.0 * batch * evaluations * (macs(preset) + (macs(guide_of(preset)) if guided else 0))
    kinds = {"guided": guided, "decoded" if decoded else "trajectory": steps > 0, mode: mode is not None}
    name = "/".join([f"sample/{preset}/n{batch}", *(kind for kind, wanted in kinds.items() if wanted)])
    facts: dict[str, Any] = {"preset": preset, "batch": batch, "evaluations": evaluations}
    facts |= {"guide": guide_of(preset)} if guided else {}
    facts |= {"mode": mode} if mode else {}
    warmup = 0 if steps else 3  # the trajectory that is checked has warmed everything up
    return Case(name, build, flops, 0.0, batch, facts, needs_gpu=needs_gpu, flush=False, warmup=warmup, compiles=not steps)


def difference_case(preset: str, batch: int, steps: int, needs_gpu: bool = True) -> Case:
    """How far trajectories in half precision end from those of the plain network in fp32: its errors, not its times."""
    heun = Heun(steps)

    def build(device: torch.device) -> Candidates:
        inputs = make_inputs(preset, batch, device)
        exact, half = make_network(preset, device).eval(), make_network(preset, device).eval()
        exact.dtype, half.dtype = torch.float32, torch.float16
        denoisers = {REFERENCE: Plain(Baseline(exact)), "eager": Plain(Baseline(half)), "edm2": choose(half, fast=True)}
        return {name: _runner(denoiser, heun, inputs, steps, None) for name, denoiser in denoisers.items()}

    facts = {"preset": preset, "batch": batch, "evaluations": 2 * steps - 1}
    return Case(
        f"difference/{preset}/n{batch}", build, images=batch, facts=facts, needs_gpu=needs_gpu, flush=False, warmup=0, dtype="float16"
    )


def guide_of(preset: str) -> str:
    """The smallest network of the same data that was published as a guide; the digits guide themselves."""
    return preset if preset == "digits" else f"{preset.rsplit('-', 1)[0]}-xs"


@torch.no_grad()
def _runner(denoiser: Denoiser, heun: Heun, inputs: dict[str, Tensor], steps: int, decode: Callable | None) -> Callable[[], Tensor]:
    """Denoises images at the noise level `SIGMA`, or goes all `steps` of a trajectory.

    Ends of trajectories are held to the tolerance of a single evaluation: with random weights trajectories do not diverge
    (EDM2-XXS, 8 steps, and the digits, 32 steps: fp16 ends 4e-4 off fp32), and an error of any evaluation shows in them.
    """
    labels, n = inputs["labels"], len(inputs["images"])
    guidance = heun.guidance if heun.guidance != 1 else None
    denoise = denoiser.along([(SIGMA, guidance is not None)], labels, n)

    @torch.no_grad()
    def run() -> Tensor:
        if not steps:
            return denoise(inputs["images"], SIGMA, guidance)
        along = denoiser.along(heun.evaluations(), labels, n)
        x = heun.integrate(along, 2 * inputs["noise"], torch.float32, torch.randn_like)
        return x if decode is None else decode(x)

    return run


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
