"""What the command lines share: one-line errors, and the notations of the official release's options."""

import re
from typing import Any

import click

from edm2.errors import UserError
from edm2.presets import Ki, Mi


class _OneLineErrors:
    """Prints a UserError as `Error: …`, exit code 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as e:
            raise click.ClickException(" ".join(str(e).split())) from e


class Command(_OneLineErrors, click.Command):
    pass


class Group(_OneLineErrors, click.Group):
    pass


class ImageCount(click.ParamType):
    """A count of images: `2048`, `128Ki`, `8Mi`, `1Gi`."""

    name = "NIMG"
    units = {"": 1, "Ki": Ki, "Mi": Mi, "Gi": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)(|Ki|Mi|Gi)", str(value))
        if not match:
            self.fail(f"'{value}' is no count of images; write 2048, 128Ki, 8Mi or 1Gi", param, ctx)
        return int(match[1]) * self.units[match[2]]


class IntList(click.ParamType):
    """Integers and ranges: `1,2,5-10`."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        numbers: list[int] = []
        for part in str(value).split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
            if not match:
                self.fail(f"'{value}' is no list of integers; write 0-63 or 1,2,5-10", param, ctx)
            numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
        return numbers
