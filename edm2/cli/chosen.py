"""Which networks a command samples from: those given, or a published choice; with their guide and encoder."""

from pathlib import Path

import click
import torch
from torch import nn

from edm2.cli.parameters import Interval
from edm2.distributed import is_first
from edm2.errors import UserError
from edm2.folding import fold
from edm2.guidance import Unlabelled, check_fits
from edm2.latents import Encoder, LatentEncoder, RGBEncoder
from edm2.network import Precond
from edm2.networks import is_pickle, network_file, open_snapshot
from edm2.official import LICENCE
from edm2.published import Published, published_files
from edm2.snapshot import Snapshot
from edm2.vae import load_vae

preset_option = click.option(
    "--preset", metavar="NAME", help="A published choice of --net, --gnet and --guidance, e.g. edm2-img512-s-guid-fid."
)
guidance_interval_option = click.option(
    "--guidance-interval", type=Interval(), default="0,inf", show_default=True,
    help="Guide where LO < sigma <= HI; a bound within 1.5 % of a step's sigma means that one.",
)  # fmt: skip


def choose_files(preset: str | None, networks: Path, net: str | None, gnet: str | None, guidance: float | None) -> Published:
    """`choose_sources`, as files: what is at an address is downloaded to `networks`."""
    chosen = choose_sources(preset, networks, net, gnet, guidance)
    paths = [None if source is None else network_file(source, networks) for source in (chosen.net, chosen.gnet)]
    if any(path is not None and is_pickle(path) for path in paths) and is_first():
        click.echo(f"Note: {LICENCE}.", err=True)
    return chosen._replace(**dict(zip(("net", "gnet"), (None if path is None else str(path) for path in paths))))


def note_unused(gnet: str | None, guided: bool, intervals: bool = False) -> None:
    """Of a guide, or of intervals to guide in, that were given without a strength."""
    if not guided and (gnet is not None or intervals) and is_first():
        click.echo(f"Note: nothing is guided: {'--guidance-interval' if gnet is None else '--gnet'} needs --guidance", err=True)


def choose_sources(preset: str | None, networks: Path, net: str | None, gnet: str | None, guidance: float | None) -> Published:
    """Files or addresses of the network and, where there is guidance, its guide, and the strength: those given, else the preset's."""
    strength = {} if guidance is None else {"guidance": guidance}
    row = Published(None)
    if preset is not None:
        row = published_files(preset, networks, net is None, gnet is None and guidance != 1)
    chosen = row._replace(net=net or row.net, gnet=gnet or row.gnet, **strength)
    if chosen.net is None:
        raise UserError("give a network: --net, or a published one by --preset")
    return chosen if chosen.guidance != 1 else chosen._replace(gnet=None)


def load_networks(files: Published, device: torch.device) -> tuple[Snapshot, nn.Module | None]:
    """Folded: the network, and where there is guidance the guide: GNET, or the network itself if it was trained without some
    labels."""
    snapshot = open_snapshot(files.net, device)
    snapshot.net, guide = fold(snapshot.net), None
    if files.guidance != 1 and files.gnet is not None:
        guide = fold(open_snapshot(files.gnet, device).net)
    elif files.guidance != 1 and snapshot.meta.get("label_dropout"):
        guide = Unlabelled(snapshot.net)
    check_guide(snapshot.net, guide, files)
    return snapshot, guide


def choose_encoder(snapshot: Snapshot, net: str, vae: str | None, latents: bool, fast: bool, device: torch.device) -> Encoder:
    """The snapshot's; of latents with the VAE that decodes them, unless they are what is asked for."""
    if vae and latents:
        raise UserError("--vae decodes latents, --latents does not: give one of them")
    encoder = snapshot.encoder or RGBEncoder()
    if isinstance(encoder, LatentEncoder):
        return encoder if latents else load_vae(encoder, vae, device, fast)
    if latents or vae:
        raise UserError(f"{'--latents' if latents else '--vae'}: {net} makes pixels")
    return encoder


def check_guide(net: Precond, guide: nn.Module | None, files: Published) -> None:
    """UserError for a guide that is missing or does not fit the network."""
    if files.guidance != 1 and guide is None:
        raise UserError(
            f"--guidance {files.guidance} needs a guide network: give --gnet (only one trained with --label-dropout guides itself)"
        )
    if isinstance(guide, Precond):
        check_fits(net.config, guide.config, files.net, files.gnet)
