"""`python -m edm2 import` and `export`: networks of the official release, and folders for a model hub."""


import click
import torch

from edm2.cli.parameters import Float
from edm2.cli.planned import tell, where
from edm2.download import is_url, place
from edm2.errors import UserError
from edm2.files import make_folder, user_path
from edm2.model_folder import export
from edm2.networks import CACHE, convert, converted_file, file_at_hand, is_pickle, network_file, open_snapshot
from edm2.official import LICENCE
from edm2.published import PUBLISHED, address


@click.command("import", short_help="Convert networks of the official release.")
@click.argument("source", metavar="FILE|URL|PRESET")
@click.option("--out", metavar="DIR", default=CACHE, show_default=True, help="Where to write the snapshots.")
@click.option("--sha256", metavar="HEX", help="Checksum that the file must have.")
@click.option("-n", "--dry-run", is_flag=True, help="Tell which files would be downloaded and written, then exit.")
def import_networks(source: str, out: str, sha256: str | None, dry_run: bool) -> None:
    """Convert a network of the official release to a snapshot of this project: a pickle, its address, or the networks of a
    published preset, e.g. edm2-img512-s-guid-fid. Nothing in the pickle is executed."""
    folder = user_path(out)
    row = PUBLISHED.get(source)
    if row is not None and sha256 is not None:
        raise UserError("--sha256 is that of one file: give its address instead of a preset")
    sources = [source] if row is None else [address(name) for name in (row.net, row.gnet) if name]
    for each in sources:
        if row is None and not is_url(each) and not user_path(each).exists():
            raise UserError(f"{each} is no file, no address and no preset; presets are {', '.join(list(PUBLISHED)[:3])}, …")
        path = file_at_hand(each, folder) if dry_run else network_file(each, folder, sha256)
        if path is not None and not is_pickle(path):
            raise UserError(f"{path} is no pickle of the official release")
        if dry_run:
            tell({"network": where(each, folder), "snapshot": str(converted_file(path or place(each, folder), folder))})
        else:
            click.echo(f"wrote {convert(path, make_folder(folder))}")
    click.echo(f"Note: {LICENCE}.")


@click.command("export", short_help="Write a folder for a model hub: network, guide and model card.")
@click.option("--net", metavar="FILE|URL", required=True, help="Network: a snapshot of this project, or a pickle of the official release.")
@click.option("--gnet", metavar="FILE|URL", help="Its guide.")
@click.option("--guidance", type=Float(), default=1, show_default=True, help="Strength to sample with.")
@click.option("--out", metavar="DIR", required=True, help="Where to write the folder.")
@click.option("--license", "licence", metavar="ID", help="Of the network, as hubs spell it, e.g. apache-2.0.")
@click.option("--dtype", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True, help="Of the stored parameters.")
def export_network(net: str, gnet: str | None, guidance: float, out: str, licence: str | None, dtype: str) -> None:
    """Write a folder that a model hub can hold: the network, its guide, JSON and a model card. `EDM2Pipeline.from_pretrained`
    reads it."""
    if (gnet is None) != (guidance == 1):
        raise UserError("--gnet and --guidance go together: a guide and its strength, which is not 1")
    guide = None if gnet is None else open_snapshot(gnet)
    folder = export(
        user_path(out), open_snapshot(net), guide, guidance, licence, torch.float16 if dtype == "fp16" else torch.float32
    )
    click.echo(f"wrote {folder}")
