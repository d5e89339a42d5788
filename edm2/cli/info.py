"""`python -m edm2 info`: what a file or folder holds."""

import json
from collections.abc import Iterator
from typing import Any

import click

from edm2.cli.dataset import shortened
from edm2.errors import UserError
from edm2.info import describe
from edm2.networks import network_file


@click.command(short_help="Tell what a file or folder holds: network, run, dataset, ….")
@click.argument("source", metavar="FILE|DIR|URL")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(source: str, as_json: bool) -> None:
    """Tell what a snapshot, an official pickle, a training state, a run's folder or a dataset holds."""
    facts = describe(network_file(source))
    try:
        click.echo(json.dumps(facts, indent=4, default=str) if as_json else "\n".join(_lines(facts)))
    except RecursionError as e:
        raise UserError(f"{source} has a header that is nested too deeply") from e


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield _printable(name)
            yield from (f"    {_printable(inner):<20} {_text(x)}" for inner, x in value.items())
        else:
            yield f"{_printable(name):<24} {_text(shortened(value) if name == 'classes' and isinstance(value, list) else value)}"


def _text(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, default=str)
    return f"{value:,}" if type(value) is int and value >= 10000 else _printable(str(value))


def _printable(text: str) -> str:
    """The words are the file's own, and may mean something to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
