"""`python -m edm2 import`: networks of the official release as snapshots of this project."""

from pathlib import Path

import click

from edm2.download import is_url
from edm2.errors import UserError
from edm2.files import make_folder
from edm2.networks import CACHE, convert, is_pickle, network_file
from edm2.official import LICENCE
from edm2.published import PUBLISHED, address


@click.command("import")
@click.argument("source", metavar="FILE|URL|PRESET")
@click.option("--out", metavar="DIR", default=CACHE, show_default=True, help="Where to write the snapshots.")
@click.option("--sha256", metavar="HEX", help="What the file must have.")
def import_networks(source: str, out: str, sha256: str | None) -> None:
    """Convert a network of the official release to a snapshot of this project: a pickle, its address, or the networks of a
    published preset, e.g. edm2-img512-s-guid-fid. Nothing in the pickle is executed."""
    folder = make_folder(Path(out).expanduser())
    row = PUBLISHED.get(source)
    if row is not None and sha256 is not None:
        raise UserError("--sha256 is that of one file: give its address instead of a preset")
    sources = [source] if row is None else [address(name) for name in (row.net, row.gnet) if name]
    for each in sources:
        if row is None and not is_url(each) and not Path(each).expanduser().exists():
            raise UserError(f"{each} is no file, no address and no preset; presets are {', '.join(list(PUBLISHED)[:3])}, …")
        path = network_file(each, folder, sha256)
        if not is_pickle(path):
            raise UserError(f"{path} is no pickle of the official release")
        click.echo(f"wrote {convert(path, folder)}")
    click.echo(f"Note: {LICENCE}.")
