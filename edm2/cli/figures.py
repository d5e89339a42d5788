"""Figures, by matplotlib, an optional dependency."""

from pathlib import Path
from typing import Any

from edm2.errors import UserError
from edm2.extras import optional_imports
from edm2.files import make_folder, replacing


def figure_class() -> Any:
    """Matplotlib's. UserError without it."""
    with optional_imports("plots need matplotlib", "plot"):
        from matplotlib.figure import Figure
    return Figure


def save_figure(figure: Any, out: Path) -> None:
    """Its folder is made. UserError where it cannot be written; what is there then stays."""
    make_folder(out.parent)
    with replacing(out) as temporary:
        try:
            figure.savefig(temporary, format=out.suffix[1:] or "png")
        except ValueError as e:  # for a suffix that it does not know
            raise UserError(f"cannot write {out}: {e}") from e
