"""Train an EDM2 network. On several GPUs: `torchrun --standalone --nproc_per_node=8 train.py …`."""

import os
import sys
from dataclasses import asdict
from typing import Any

import click

from edm2 import summary
from edm2.cli.commands import Command
from edm2.cli.parameters import Duration, Float, ImageCount, PixelRange, Seed
from edm2.config import PRECISIONS, TrainingConfig
from edm2.distributed import is_first
from edm2.inputs import open_dataset
from edm2.interruption import RESUME_ME
from edm2.latents import LatentEncoder
from edm2.network import Precond
from edm2.training import train

PUBLISHED_SIZE = 64  # of the inputs of all published networks, pixels or latents


@click.command(cls=Command)
@click.option("--outdir", metavar="DIR", required=True, help="Where to save the results; a run there is resumed.")
@click.option("--data", metavar="ZIP|DIR", required=True, help="Dataset, of images or VAE latents.")
@click.option("--cond", metavar="BOOL", type=bool, default=True, show_default=True, help="Class-conditional? Needs labels.")
@click.option("--preset", metavar="STR", default="edm2-img512-s", show_default=True,
              help="Network and training options, which others override: edm2-img512-…, edm2-img64-…, digits.")  # fmt: skip
@click.option("--duration", type=ImageCount(), help="Training duration in images.")
@click.option("--batch", type=ImageCount(), help="Total batch size.")
@click.option("--channels", metavar="INT", type=click.IntRange(min=1), help="Width of the network: channels of its first level.")
@click.option("--dropout", type=Float(0, max=1, max_open=True), help="Dropout probability.")
@click.option("--label-dropout", type=Float(0, max=1, max_open=True), default=0, show_default=True,
              help="Probability of an image to go without its label; makes a network that can guide itself.")  # fmt: skip
@click.option("--pixel-range", type=PixelRange(),
              help="Range of the pixels that VAE latents were made from.  [default: as the dataset tells, else 0,1]")  # fmt: skip
@click.option("--latent-stats", metavar="published|data|FILE",
              help="What standardises VAE latents: the published statistics of ImageNet, those that the dataset tells, or those "
              "of a network.  [default: published for the official VAE, data for others]")  # fmt: skip
@click.option("--P_mean", "P_mean", type=Float(), help="Mean of ln(sigma), the noise level.")
@click.option("--P_std", "P_std", type=Float(above=0), help="Standard deviation of ln(sigma).")
@click.option("--lr", type=Float(above=0), help="Reference learning rate.")
@click.option("--decay", metavar="BATCHES", type=Float(0),
              help="Batches after which the learning rate decays, as 1/sqrt(batches); 0 = never.")  # fmt: skip
@click.option("--rampup", "rampup_Mimg", type=ImageCount(), callback=lambda _, __, images: None if images is None else images / 1e6,
              help="Images over which the learning rate grows to its full value.")  # fmt: skip
@click.option("--batch-gpu", type=ImageCount(), help="Most images at a time on a GPU; gradients of the others are accumulated.")
@click.option("--fp16", metavar="BOOL", type=bool, default=True, show_default=True, help="Mixed precision on GPUs?")
@click.option("--precision", type=click.Choice(list(PRECISIONS)),
              help="Type of activations on GPUs; bf16 also on a CPU.  [default: as --fp16 says]")  # fmt: skip
@click.option("--compile", type=bool, metavar="BOOL", help="Make one graph of a step by torch.compile?  [default: on GPUs]")
@click.option("--ls", type=Float(above=0), default=1, show_default=True, help="Factor of the loss, for small gradients in fp16.")
@click.option("--bench", metavar="BOOL", type=bool, default=True, show_default=True, help="Let cuDNN choose its algorithms by their time?")
@click.option("--status", type=ImageCount(), help="Interval of status lines; 0 = never.  [default: 128Ki, or the preset's]")
@click.option("--snapshot", type=ImageCount(), help="Interval of network snapshots; 0 = never.  [default: 8Mi, or the preset's]")
@click.option("--checkpoint", type=ImageCount(),
              help="Interval of training states, from which a run resumes; 0 = never.  [default: 128Mi, or the preset's]")  # fmt: skip
@click.option("--seed", metavar="INT", type=Seed(), default=0, show_default=True, help="Random seed.")
@click.option("--mirror", is_flag=True, help="Also train on the mirror image of each image.")
@click.option("--workers", metavar="INT", type=click.IntRange(min=0),
              help="Processes that read a dataset too large for memory.  [default: 2]")  # fmt: skip
@click.option("--init", metavar="FILE", help="Start from the weights of this network: a snapshot or an official pickle.")
@click.option("--snapshot-dtype", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True, help="Precision of snapshots.")
@click.option("--max-nonfinite", metavar="STEPS", type=click.IntRange(min=0), default=100, show_default=True,
              help="Stop after so many in a row with non-finite gradients; 0 = never.")  # fmt: skip
@click.option("--keep", metavar="INT", type=click.IntRange(min=0), default=0, show_default=True,
              help="Keep so many of the newest training states, delete older ones; 0 = keep all.")  # fmt: skip
@click.option("--held-out", metavar="ZIP|DIR", help="Dataset whose loss is told beside that of training.")
@click.option("--samples", metavar="INT", type=click.IntRange(min=0),
              help="Images in a grid beside each snapshot; 0 = none.  [default: 64]")  # fmt: skip
@click.option("--vae", metavar="DIR|NAME", help="VAE that decodes latents for that grid. Without it, there is no grid of latents.")
@click.option("--shard", is_flag=True, help="Spread Adam's moments and the averages over the processes, which leaves memory for images.")
@click.option("--cuda-graph", is_flag=True, help="Make each step one CUDA graph; on one GPU only.")
@click.option("--max-time", type=Duration(), help="Save and stop after this time, e.g. 11:50:00 or 90m.")
@click.option("-n", "--dry-run", is_flag=True, help="Tell the configuration and its cost, then exit.")
def main(dry_run: bool, **options: Any) -> None:
    """Train an EDM2 network, with the options and defaults of the official release.

    Counts of images accept Ki, Mi and Gi. What is not given comes from the preset. After SIGTERM, SIGINT or --max-time the
    run saves itself and exits with 75: the same command resumes it.
    """
    config = TrainingConfig(**options).resolved()
    if dry_run:
        if is_first():
            print_plan(config)
        return
    trainer = train(config)
    if trainer.interrupted:
        if trainer.procs.rank == 0:
            click.echo(f"{trainer.interrupted}: the run is saved in {config.outdir}, and the same command resumes it", err=True)
        sys.exit(RESUME_ME)


def print_plan(config: TrainingConfig) -> None:
    """The configuration, and what it will cost."""
    config.check(world_size=int(os.environ.get("WORLD_SIZE", "1")))
    dataset, encoder, (channels, height, width) = open_dataset(config)

    def make_net() -> Precond:
        return config.build(height, channels, dataset.label_dim)

    images = config.batch_gpu or config.batch
    state, activations = summary.training_memory(make_net, images)
    for name, value in asdict(config).items():
        click.echo(f"{name:<16} {value}")
    click.echo(f"\ndataset          {len(dataset)} images, {dataset.label_dim} labels")
    click.echo(f"network input    {width}x{height}, {channels} channels")
    if isinstance(encoder, LatentEncoder):
        low, high = encoder.pixel_range
        click.echo(f"latents          of {encoder.vae}, of pixels in [{low}, {high}]")
        click.echo(f"standardised by  mean {list(encoder.raw_mean)}, deviation {list(encoder.raw_std)}")
    if config.preset != "digits" and height != PUBLISHED_SIZE:
        click.echo(f"Note: {config.preset} is for inputs of {PUBLISHED_SIZE}x{PUBLISHED_SIZE}, and these are of {width}x{height}")
    click.echo(f"parameters       {summary.parameter_count(make_net):,}")
    click.echo(f"multiply-adds    {summary.multiply_adds(make_net) / 1e9:.3f} G per image and evaluation")
    click.echo(f"memory, state    {state / 2**30:.2f} GiB per process (weights, gradients, Adam, averages)")
    if config.shard:
        click.echo(f"memory, shared   {summary.shared_memory(make_net) / 2**30:.2f} GiB of these are spread over the processes")
    click.echo(f"memory, images   {activations / 2**30:.2f} GiB for {images} images at a time (estimate)")


if __name__ == "__main__":
    main()
