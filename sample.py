"""Generate images with an EDM2 network."""

import math
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from edm2.backends import full_precision
from edm2.cli.common import Command, Float, ImageCount, Interval, IntList
from edm2.errors import UserError
from edm2.files import make_folder, replacing
from edm2.folding import fold
from edm2.generate import Batch, generate_images
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, RGBEncoder
from edm2.network import Precond
from edm2.snapshot import load_snapshot

GAP = 4  # pixels between the images of a grid


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
    net: str, gnet: str | None, outdir: Path, subdirs: bool, seeds: list[int], batch: int,
    grid: Path | None, columns: int, scale: int, **options: Any,
) -> None:  # fmt: skip
    """Generate images: `{seed:06d}.png` in OUTDIR. A latent network gives `.npy` files of VAE latents."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full_precision()
    main_net, guide, encoder = networks(net, gnet, device)
    check(main_net, guide, batch=batch, **options)
    if grid and not encoder.makes_pixels:
        raise UserError(f"--grid: {net} makes VAE latents, not pixels")
    batches = generate_images(main_net, seeds, guide, encoder=encoder, max_batch_size=batch, **options)
    done: list[np.ndarray] = []
    with tqdm(total=len(seeds), unit="img", disable=None) as bar:
        for part in batches:
            save(part, outdir, subdirs, encoder)
            if grid and part.images is not None:
                done.append(part.images)
            bar.update(len(part.seeds))
    if done:
        write_png(grid, tile(np.concatenate(done), columns, scale))


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


def save(part: Batch, outdir: Path, subdirs: bool, encoder) -> None:
    """One file per image: PNG, or the VAE's latents where no decoder is at hand."""
    for i, seed in enumerate(part.seeds):
        folder = make_folder(outdir / f"{seed // 1000 * 1000:06d}" if subdirs else outdir)
        if part.images is not None:
            write_png(folder / f"{seed:06d}.png", part.images[i])
        else:
            with replacing(folder / f"{seed:06d}.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, encoder.decode(part.latents[i]).cpu().numpy())


def tile(images: np.ndarray, columns: int, scale: int) -> np.ndarray:
    """`[N, H, W, C]` → one picture, row by row, pixels enlarged `scale` times, with `GAP` grey pixels between."""
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    n, h, w, c = images.shape
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + GAP) + GAP, columns * (w + GAP) + GAP, c), 128, np.uint8)
    for i, image in enumerate(images):
        y, x = (GAP + (size + GAP) * k for size, k in zip((h, w), divmod(i, columns)))
        sheet[y : y + h, x : x + w] = image
    return sheet


def write_png(path: Path, image: np.ndarray) -> None:
    """uint8 `[H, W, C]`, grey for one channel."""
    make_folder(path.parent)
    with replacing(path) as temporary:
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(temporary, format="png")


if __name__ == "__main__":
    main()
