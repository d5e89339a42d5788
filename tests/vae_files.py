"""A tiny VAE of diffusers' own kind, with random weights."""

import torch

from edm2.vae import autoencoder_kl

WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_tiny(folder, latent_channels: int = 4):
    """Three levels, so that sides shrink by 4; attention in the middle, as in the real one."""
    torch.manual_seed(0)
    vae = autoencoder_kl()(
        block_out_channels=(8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=latent_channels, norm_num_groups=4,
    )  # fmt: skip
    with torch.no_grad():  # pixels on both sides of either range, latents that vary
        vae.decoder.conv_out.weight *= 3
        vae.encoder.conv_out.weight *= 3
    vae.save_pretrained(folder)
    return folder


def plain(saved):
    """What a user of diffusers would call."""
    return autoencoder_kl().from_pretrained(saved, low_cpu_mem_usage=False).requires_grad_(False)
