"""The one exception for mistakes that the user can mend."""

import difflib
from collections.abc import Collection


class UserError(ValueError):
    """Bad input, told in one line: what is wrong and what to do. Command lines print it without a traceback."""


class Unfinished(UserError):
    """One that the user can do nothing about but give the command again, which goes on where it was."""


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """UserError with the nearest names if `name` is not among the known."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        advice = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known)}"
        raise UserError(f"unknown {what} '{name}'; {advice}")
