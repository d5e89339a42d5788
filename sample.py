"""Generate images with an EDM2 network. On several GPUs: `torchrun --standalone --nproc_per_node=8 sample.py …`."""

import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from tqdm import tqdm

from edm2.backends import full_precision
from edm2.cli.common import Command, Float, ImageCount, Interval, IntList
from edm2.distributed import Processes, processes
from edm2.errors import UserError
from edm2.files import sha256
from edm2.generate import ImageGenerator
from edm2.guidance import Unlabelled
from edm2.latents import Encoder, LatentEncoder, RGBEncoder
from edm2.network import Precond
from edm2.pictures import Writers, tile, write_png
from edm2.published import Published, published_files
from edm2.sampler import Heun
from edm2.samples import Sample, SampleFolder
from edm2.snapshot import Snapshot, load_snapshot
from edm2.vae import load_vae

NETWORKS = os.environ.get("EDM2_NETWORKS", "~/.cache/edm2")


@click.command(cls=Command)
@click.option("--net", metavar="FILE", help="Network snapshot.")
@click.option("--gnet", metavar="FILE", help="Guide network snapshot.  [none, or NET itself if trained with --label-dropout]")
@click.option("--preset", metavar="NAME", help="A published choice of --net, --gnet and --guidance, e.g. edm2-img512-s-guid-fid.")
@click.option("--networks", metavar="DIR", default=NETWORKS, show_default=True, help="Where a preset finds its networks.")
@click.option("--guidance", type=Float(), help="Guidance strength; 1 = off.  [1, or the preset's]")
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
@click.option("--vae", metavar="DIR|NAME", help="VAE that decodes latents: a folder, or a name on the hub.  [the snapshot's]")
@click.option("--latents", is_flag=True, help="Write VAE latents as .npy files instead of decoding them.")
@click.option("--overwrite", is_flag=True, help="Also make the images that are there already.")
@click.option("--grid", metavar="PNG", type=click.Path(path_type=Path), help="Also write all images as one grid.")
@click.option("--columns", metavar="INT", type=click.IntRange(min=1), default=10, show_default=True, help="Width of the grid in images.")
@click.option("--scale", metavar="INT", type=click.IntRange(min=1), default=1, show_default=True, help="Enlarge the pixels of the grid.")
def main(
    net: str | None, gnet: str | None, preset: str | None, networks: str, guidance: float | None,
    outdir: Path, subdirs: bool, seeds: list[int], class_idx: list[int] | None, batch: int, fast: bool, vae: str | None,
    latents: bool, overwrite: bool, grid: Path | None, columns: int, scale: int, **options: Any,
) -> None:  # fmt: skip
    """Generate images: `{seed:06d}.png` in OUTDIR. Those that are there already, made with the same networks and options, stay."""
    full_precision()
    files = choose_files(preset, Path(networks).expanduser(), net, gnet, guidance)
    check_options(batch, options)
    heun = Heun(guidance=files.guidance, **options)
    with processes() as procs:
        snapshot = load_snapshot(files.net, procs.device)
        guide = None if files.guidance == 1 else load_guide(snapshot, files.gnet, procs.device)
        check_guide(snapshot.net, guide, files)
        encoder = choose_encoder(snapshot, files.net, vae, latents, fast, procs.device)
        if grid and not encoder.makes_pixels:
            raise UserError("--grid needs pixels: leave --latents out")
        generate = ImageGenerator(snapshot.net, guide, encoder, fast)
        generate.check_classes(class_idx)
        folder = SampleFolder(outdir, subdirs, encoder, recipe(files, guide, heun, encoder, vae, fast))
        samples = [Sample(seed, class_idx and class_idx[i % len(class_idx)]) for i, seed in enumerate(seeds)]
        make(generate, folder, samples, heun, batch, overwrite, procs)
        if grid and procs.rank == 0:
            write_png(grid, tile(folder.images(seeds), columns, scale))


def make(
    generate: ImageGenerator, folder: SampleFolder, samples: list[Sample], heun: Heun, batch: int, overwrite: bool, procs: Processes
) -> None:
    """This process's share of the samples that are not there yet; says what all came to."""
    mine = samples[procs.rank :: procs.world_size]
    todo = [sample for sample in mine if overwrite or not folder.has(sample)]
    classes = [sample.class_idx for sample in todo] if samples[0].class_idx is not None else None
    start, left = time.perf_counter(), iter(todo)
    hidden = True if procs.rank else None
    with Writers() as writers, tqdm(total=len(mine), initial=len(mine) - len(todo), unit="img", disable=hidden) as bar:
        for part in generate([sample.seed for sample in todo], classes, batch, **asdict(heun)):
            folder.save([next(left) for _ in part.seeds], part, writers)
            bar.update(len(part.seeds))
    made = int(procs.sum(torch.tensor(len(todo), device=procs.device)))  # when all have written theirs
    if procs.rank == 0:
        seconds, there = time.perf_counter() - start, len(samples) - made
        click.echo(f"{made} images in {seconds:.1f} s, {made / seconds:.3g} images/s" + (f"; {there} were there already" if there else ""))


def choose_files(preset: str | None, networks: Path, net: str | None, gnet: str | None, guidance: float | None) -> Published:
    """Files of the network and its guide, and the strength: those given, else the preset's."""
    chosen = Published(None) if preset is None else published_files(preset, networks, net is None, gnet is None)
    given = {"net": net, "gnet": gnet, "guidance": guidance}
    chosen = chosen._replace(**{key: value for key, value in given.items() if value is not None})
    if chosen.net is None:
        raise UserError("give a network: --net, or a published one by --preset")
    return chosen


def load_guide(snapshot: Snapshot, gnet: str | None, device: torch.device) -> nn.Module | None:
    """GNET; else the network itself, if it was trained without some labels."""
    if gnet is not None:
        return load_snapshot(gnet, device).net
    return Unlabelled(snapshot.net) if snapshot.meta.get("label_dropout") else None


def choose_encoder(snapshot: Snapshot, net: str, vae: str | None, latents: bool, fast: bool, device: torch.device) -> Encoder:
    """The snapshot's; of latents with the VAE that decodes them, unless they are what is asked for."""
    encoder = snapshot.encoder or RGBEncoder()
    if isinstance(encoder, LatentEncoder):
        return encoder if latents else load_vae(encoder, vae, device, fast)
    if latents or vae:
        raise UserError(f"{'--latents' if latents else '--vae'}: {net} makes pixels")
    return encoder


def check_options(batch: int, options: dict[str, Any]) -> None:
    """UserError for options that contradict each other."""
    if batch < 1:
        raise UserError("--batch must be at least 1")
    if options["sigma_min"] >= options["sigma_max"]:
        raise UserError(f"--sigma_min {options['sigma_min']} must be below --sigma_max {options['sigma_max']}")


def check_guide(net: Precond, guide: nn.Module | None, files: Published) -> None:
    """UserError for a guide that is missing or does not fit the network."""
    if files.guidance != 1 and guide is None:
        raise UserError(
            f"--guidance {files.guidance} needs a guide network: give --gnet (only one trained with --label-dropout guides itself)"
        )
    if not isinstance(guide, Precond):
        return
    if (guide.img_channels, guide.img_resolution) != (net.img_channels, net.img_resolution):
        raise UserError(f"{files.gnet} makes images of another size than {files.net}")
    if guide.label_dim not in (0, net.label_dim):
        raise UserError(f"{files.gnet} knows {guide.label_dim} classes, {files.net} {net.label_dim}")


def recipe(files: Published, guide: nn.Module | None, heun: Heun, encoder: Encoder, vae: str | None, fast: bool) -> dict[str, Any]:
    """What pixels depend on: the bytes of the networks, and options, but for those that have no effect."""
    facts = asdict(heun)
    if heun.guidance == 1:
        del facts["guidance_interval"]
    guided_by = None if guide is None else "itself without labels" if isinstance(guide, Unlabelled) else sha256(files.gnet)
    return {"net": sha256(files.net), "gnet": guided_by, **facts, "encoder": encoder.config(), "vae": vae, "fast": fast}


if __name__ == "__main__":
    main()
