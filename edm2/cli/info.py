"""`python -m edm2 info`: what a file or folder holds."""

import json
from typing import Any

import click

from edm2.info import describe
from edm2.networks import network_file


@click.command()
@click.argument("source", metavar="FILE|DIR|URL")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(source: str, as_json: bool) -> None:
    """Tell what a snapshot, an official pickle, a training state, a run's folder or a dataset holds."""
    facts = describe(network_file(source))
    if as_json:
        click.echo(json.dumps(facts, indent=4, default=str))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            click.echo(f"{name}")
            for inner, x in value.items():
                click.echo(f"    {inner:<20} {_text(x)}")
        else:
            click.echo(f"{name:<24} {_text(value)}")


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int and value >= 10000 else json.dumps(value) if isinstance(value, dict | list) else str(value)
