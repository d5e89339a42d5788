"""Commands and groups of them whose errors are one line."""

import time
import warnings
from pathlib import Path
from typing import Any

import click

from edm2.distributed import is_first
from edm2.errors import UserError

LATER = 5.0  # seconds
PACKAGE = Path(__file__).parents[1]
SCRIPTS = PACKAGE.with_name("train.py"), PACKAGE.with_name("sample.py")


class _OneLineErrors:
    """Prints a UserError as `Error: …`, exit code 1, without a traceback; so it does what the system refuses of a file. What all processes
    meet is printed once; see `_wait`. Warnings of this project are printed as `Note: …`."""

    def invoke(self, ctx: click.Context) -> Any:
        warnings.formatwarning = _formatted
        try:
            return super().invoke(ctx)
        except UserError as e:
            _wait()
            raise click.ClickException(" ".join(str(e).split())) from e
        except OSError as e:
            _wait()
            if e.filename is None:
                raise
            raise click.ClickException(f"{e.filename}: {e.strerror}") from e
        except (click.Abort, click.exceptions.Exit):
            raise
        except (click.ClickException, RuntimeError):  # this, perhaps, of the connection to one that met an error and ended
            _wait()
            raise


def _formatted(message: Warning | str, category: type[Warning], filename: str, *where: Any) -> str:
    own = Path(filename).is_relative_to(PACKAGE) or Path(filename) in SCRIPTS
    return f"Note: {message}\n" if own and category is UserWarning else _format(message, category, filename, *where)


_format = warnings.formatwarning


def _wait() -> None:
    """In all processes but the first. If that has met the error, too, it ends, and `torchrun` ends the others while they wait; if they
    alone know of it, or nobody ends them, they tell it then: nothing is lost."""
    if not is_first():
        time.sleep(LATER)


class Command(_OneLineErrors, click.Command):
    pass


class Group(_OneLineErrors, click.Group):
    pass
