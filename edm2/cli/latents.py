"""`python -m edm2 dataset encode` and `decode`."""

from collections.abc import Callable
from pathlib import Path

import click

from edm2.backends import full_precision
from edm2.cli.dataset import dataset, refuse_existing, resumable_bar
from edm2.cli.parameters import PixelRange
from edm2.data import latent_facts
from edm2.distributed import Processes, processes
from edm2.encoding import decode_dataset, encode_dataset
from edm2.errors import UserError
from edm2.image_files import ImageFiles
from edm2.latents import VAE, VAE_SHA256, LatentEncoder
from edm2.vae import VAEEncoder, load_vae, load_vae_to_encode

BATCH = click.option("--batch", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help="Images at a time.")
FAST = click.option("--fast", is_flag=True, help="Let an image's last bits depend on the batch it is in, where that is quicker.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace an existing file.")
SOURCE = click.argument("source", type=click.Path(path_type=Path))
DEST = click.argument("dest", metavar="DEST.zip", type=click.Path(dir_okay=False, path_type=Path))


@dataset.command(short_help="Make VAE latents of images.")
@SOURCE
@DEST
@click.option("--vae", metavar="DIR|NAME", help=f"VAE: a folder, or a name on the hub.  [default: {VAE}]")
@click.option("--vae-name", metavar="NAME",
              help="What it is called, if --vae is a folder.  [default: the official name if it is that, else the folder's]")  # fmt: skip
@click.option("--pixel-range", type=PixelRange(), default="0,1", show_default=True,
              help="What the VAE is fed with: 0,1 as in the official release, or -1,1, as it was trained.")  # fmt: skip
@BATCH
@FAST
@OVERWRITE
def encode(
    source: Path, dest: Path, vae: str | None, vae_name: str | None, pixel_range: tuple[int, int], batch: int, fast: bool, overwrite: bool
) -> None:
    """Turn a dataset of RGB images into one of VAE latents: the means and standard deviations of each image's.

    dataset.json tells of the VAE, of --pixel-range and of the latents' mean and standard deviation by channel; training reads that.
    After an interruption the same command goes on where it was. On several GPUs: torchrun --standalone --nproc_per_node=8 -m edm2
    dataset encode ...
    """
    refuse_existing(dest, overwrite)
    files = ImageFiles(source)
    name = vae_name or (VAE if vae is None else Path(vae).resolve().name if Path(vae).is_dir() else vae)
    with processes() as procs:
        encoder = one_first(procs, lambda: load_vae_to_encode(name, pixel_range, vae, procs.device, fast))
        encoder.latents.vae = name = proper_name(name, vae_name, encoder.sha256)
        with resumable_bar(len(files.names), procs.rank == 0) as bar:
            encode_dataset(files, dest, encoder, batch, procs, bar.update)
        if procs.rank == 0:
            click.echo(f"wrote {dest}: latents of {len(files.names)} images by {name}")


@dataset.command(short_help="Make images of VAE latents.")
@SOURCE
@DEST
@click.option("--vae", metavar="DIR|NAME", help="VAE: a folder, or a name on the hub.  [default: the dataset's, if it is the official one]")
@BATCH
@FAST
@OVERWRITE
def decode(source: Path, dest: Path, vae: str | None, batch: int, fast: bool, overwrite: bool) -> None:
    """Turn a dataset of VAE latents back into one of images, by the latents' means: what the VAE keeps of the originals.

    After an interruption the same command goes on where it was, also under torchrun.
    """
    refuse_existing(dest, overwrite)
    files = ImageFiles(source)
    facts = latent_facts(files)
    encoder = LatentEncoder() if facts is None else LatentEncoder.of(facts)
    with processes() as procs:
        loaded = one_first(procs, lambda: load_vae(encoder, vae, procs.device, fast))
        with resumable_bar(len(files.names), procs.rank == 0) as bar:
            decode_dataset(files, dest, loaded, batch, procs, bar.update)
        if procs.rank == 0:
            click.echo(f"wrote {dest}: {len(files.names)} images")


def proper_name(name: str, given: str | None, checksum: str | None) -> str:
    """That of the official VAE if it is that, whatever its folder is called. UserError if it is given and is not."""
    if checksum != VAE_SHA256 and given == VAE:
        raise UserError(f"--vae-name: this is not {VAE}: the SHA-256 of its weights is {checksum}, and not {VAE_SHA256}")
    return VAE if checksum == VAE_SHA256 and given is None else name


def one_first(procs: Processes, load: Callable[[], VAEEncoder]) -> VAEEncoder:
    """What `load` returns, in all processes; what it downloads, the first one does."""
    full_precision()
    if procs.rank > 0:
        procs.barrier()
    loaded = load()
    if procs.rank == 0:
        procs.barrier()
    return loaded
