"""The group of commands behind `python -m edm2`."""

import click

from edm2.cli.calibrate import calibrate_run
from edm2.cli.commands import Group
from edm2.cli.info import info
from edm2.cli.latents import dataset
from edm2.cli.metrics import metrics
from edm2.cli.network import export_network, import_networks
from edm2.cli.phema import phema
from edm2.cli.plot import plot
from edm2.cli.sweep import sweep
from edm2.version import __version__


@click.group(cls=Group)
@click.version_option(__version__)
def main() -> None:
    """What there is for EDM2 besides training (python train.py) and sampling (python sample.py): datasets, networks of others,
    averages of the weights, pictures, measurements."""


main.add_command(calibrate_run)
main.add_command(dataset)
main.add_command(export_network)
main.add_command(import_networks)
main.add_command(info)
main.add_command(metrics)
main.add_command(phema)
main.add_command(plot)
main.add_command(sweep)
