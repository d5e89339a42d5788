"""Generate images with an EDM2 network. On several GPUs: `torchrun --standalone --nproc_per_node=8 sample.py …`."""

import math
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tqdm import tqdm

from edm2.backends import full_precision
from edm2.cli.common import Command, Float, ImageCount, Interval, IntList
from edm2.distributed import processes
from edm2.errors import UserError
from edm2.folding import fold
from edm2.generate import Batch, generate_images
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, RGBEncoder
from edm2.network import Precond
from edm2.pictures import Writers, read_png, tile, write_array, write_png
from edm2.snapshot import load_snapshot


@click.command(cls=Command)
@click.option("--net", metavar="FILE", required=True, help="Network snapshot.")
@click.option("--gnet", metavar="FILE", help="Guide network snapshot.  [none, or NET itself if trained with --label-dropout]")
@click.option("--guidance", type=Float(), default=1, show_default=True, help="Guidance strength; 1 = off.")
@click.option("--guidance-interval", type=Interval(), default="0,inf", show_default=True,
              help="Guide where LO < sigma <= HI; a bound within 1.5 % of a step's sigma means that one.")  # fmt: skip
@click.option("--outdir", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where to save the images.")
@click.option("--subdirs", is_flag=True, help="A sub-folder for every 1000 seeds.")
@click.option("--seeds", type=IntList(), default="16-19", show_default=True, help="One image per seed, e.g. 1,2,5-10.")
@click.option("--class", "class_idx", type=IntList(), help="Class, or classes to take in turn.  [default: random]")
@click.option("--batch", type=ImageCount(), default=32, show_default=True, help="Images at a time.")
@click.option("--steps", "num_steps", metavar="INT", type=click.IntRange(min=1), default=32, show_default=True, help="Sampling steps.")
@click.option("--sigma_min", type=Float(above=0), default=0.002, show_default=True, help="Lowest noise level.")
@click.option("--sigma_max", type=Float(above=0), default=80, show_default=True, help="Highest noise level.")
@click.option("--rho", type=Float(above=0), default=7, show_default=True, help="Time step exponent.")
@click.option("--S_churn", "S_churn", type=Float(0), default=0, show_default=True, help="Stochasticity strength.")
@click.option("--S_min", "S_min", type=Float(0), default=0, show_default=True, help="Its lowest noise level.")
@click.option("--S_max", "S_max", type=Float(0, infinite=True), default=math.inf, show_default=True, help="Its highest noise level.")
@click.option("--S_noise", "S_noise", type=Float(), default=1, show_default=True, help="Its noise inflation.")
@click.option("--fast", is_flag=True, help="Let an image's last bits depend on the batch it is in, where that is quicker.")
@click.option("--grid", metavar="PNG", type=click.Path(path_type=Path), help="Also write all images as one grid.")
@click.option("--columns", metavar="INT", type=click.IntRange(min=1), default=10, show_default=True, help="Width of the grid in images.")
@click.option("--scale", metavar="INT", type=click.IntRange(min=1), default=1, show_default=True, help="Enlarge the pixels of the grid.")
def main(
    net: str, gnet: str | None, outdir: Path, subdirs: bool, seeds: list[int], class_idx: list[int] | None, batch: int,
    grid: Path | None, columns: int, scale: int, **options: Any,
) -> None:  # fmt: skip
    """Generate images: `{seed:06d}.png` in OUTDIR. A latent network gives `.npy` files of VAE latents."""
    full_precision()
    with processes() as procs:
        main_net, guide, encoder = networks(net, gnet, procs.device)
        check(main_net, guide, batch=batch, **options)
        if grid and not encoder.makes_pixels:
            raise UserError(f"--grid: {net} makes VAE latents, not pixels")
        mine = slice(procs.rank, None, procs.world_size)
        classes = class_idx and [class_idx[i % len(class_idx)] for i in range(len(seeds))][mine]
        parts = generate_images(main_net, seeds[mine], guide, classes, encoder, max_batch_size=batch, **options)
        with Writers() as writers, tqdm(total=len(seeds[mine]), unit="img", disable=True if procs.rank else None) as bar:
            for part in parts:
                save(part, outdir, subdirs, encoder, writers)
                bar.update(len(part.seeds))
        procs.barrier()
        if grid and procs.rank == 0:
            images = [read_png(file_of(seed, outdir, subdirs, "png")) for seed in seeds]
            write_png(grid, tile(np.stack(images), columns, scale))


def networks(net: str, gnet: str | None, device: torch.device) -> tuple[Precond, Precond | Unlabelled | None, Encoder]:
    """Folded: the network, its guide (itself, if it was trained without some labels, where no other is given), its encoder."""
    snapshot = load_snapshot(net, device)
    folded = fold(snapshot.net)
    if gnet:
        guide = fold(load_snapshot(gnet, device).net)
    else:
        guide = Unlabelled(folded) if snapshot.meta.get("label_dropout") else None
    return folded, guide, snapshot.encoder or RGBEncoder()


def check(net, guide, *, batch: int, guidance: float, sigma_min: float, sigma_max: float, **_: Any) -> None:
    """UserError for options that contradict each other or the networks."""
    if batch < 1:
        raise UserError("--batch must be at least 1")
    if sigma_min >= sigma_max:
        raise UserError(f"--sigma_min {sigma_min} must be below --sigma_max {sigma_max}")
    if guidance != 1 and guide is None:
        raise UserError(f"--guidance {guidance} needs a guide network: give --gnet (only one trained with --label-dropout guides itself)")
    if not isinstance(guide, Precond):
        return
    if (guide.img_channels, guide.img_resolution) != (net.img_channels, net.img_resolution):
        raise UserError("--gnet makes images of another size than --net")
    if guide.label_dim not in (0, net.label_dim):
        raise UserError(f"--gnet knows {guide.label_dim} classes, --net {net.label_dim}")


def save(part: Batch, outdir: Path, subdirs: bool, encoder: Encoder, writers: Writers) -> None:
    """One file per image: PNG, or the VAE's latents where no decoder is at hand."""
    latents = encoder.decode(part.latents).cpu().numpy() if part.images is None else None
    for i, seed in enumerate(part.seeds):
        if latents is None:
            writers.write(write_png, file_of(seed, outdir, subdirs, "png"), part.images[i])
        else:
            writers.write(write_array, file_of(seed, outdir, subdirs, "npy"), latents[i])


def file_of(seed: int, outdir: Path, subdirs: bool, ending: str) -> Path:
    folder = outdir / f"{seed // 1000 * 1000:06d}" if subdirs else outdir
    return folder / f"{seed:06d}.{ending}"


if __name__ == "__main__":
    main()
