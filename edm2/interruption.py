"""Ending a run before its time, at the end of a step, with everything saved."""

import signal
import threading
import time
from types import FrameType

from edm2.distributed import Processes

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: the exit code of a run that saved itself to be resumed
SIGNALS = signal.SIGTERM, signal.SIGINT
LATE = 1  # below the number of either


class Interruption:
    """Within it, a first SIGTERM or SIGINT is remembered instead of ending the process; so is that `seconds` since
    `begun` (as of `time.monotonic`; default: now) are over.

    A second signal of the same kind does what it did before. `asked` is the reason to stop, or None: the same in all
    processes, whichever of them got a signal. Outside of the main thread, which alone gets signals, only time counts.
    """

    def __init__(self, procs: Processes, seconds: float | None = None, begun: float | None = None):
        begun = time.monotonic() if begun is None else begun
        self.procs, self.deadline = procs, None if seconds is None else begun + seconds
        self._signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> str | None:
        """Every process must call it, after the same step: they wait for each other, none for a GPU."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        number = self.procs.highest(self._signal or late * LATE)
        return None if not number else "--max-time" if number == LATE else signal.Signals(number).name

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._before[number])
