"""Optional dependencies: imported where they are needed, and asked for where they are missing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edm2.errors import UserError


class MissingExtra(UserError, ImportError):
    """An optional dependency is not there, or cannot be imported."""


@contextmanager
def optional_imports(need: str, extra: str) -> Iterator[None]:
    """Within, packages are imported that the extra `extra` installs. Where that fails, MissingExtra begins with `need`, and says how to
    get them.

    Hugging Face's make a RuntimeError of an ImportError further down. Where their distribution `kernels` is installed too,
    transformers would import its names from our package of that name, which is therefore hidden.
    """
    ours = sys.modules.get("kernels")
    sys.modules["kernels"] = None
    try:
        yield
    except (ImportError, RuntimeError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[-1][:200]
        raise MissingExtra(f"{need} ({reason}): pip install 'edm2-triton[{extra}]'") from e
    finally:
        sys.modules.pop("kernels")
        if ours is not None:
            sys.modules["kernels"] = ours
