"""An account of the ops that did not run where `kernels.coverage` says: nothing falls back silently."""

import warnings


class FallbackWarning(UserWarning):
    """An op ran by another implementation than the one it is registered with."""


_noted: list[tuple[str, str]] = []


def note(op: str, reason: str) -> None:
    """Record that `op` fell back; warns (FallbackWarning) the first time for each op and reason."""
    if (op, reason) not in _noted:
        _noted.append((op, reason))
        warnings.warn(f"{op} fell back: {reason}", FallbackWarning, stacklevel=3)


def fallbacks() -> dict[str, str]:
    """Op → reason of every fallback since `clear_fallbacks`; of several reasons the last."""
    return dict(_noted)


def clear_fallbacks() -> None:
    """Forget what was noted, and warn anew."""
    _noted.clear()
