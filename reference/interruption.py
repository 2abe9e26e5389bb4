"""Signals that end a run where it can go on from, not where it stands."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED = 75  # exit status: stopped when asked, saved, to be resumed (EX_TEMPFAIL of sysexits.h)


class Interruption:
    """Whether one of `SIGNALS` has come, and which."""

    def __init__(self) -> None:
        self.name: str | None = None

    def has_come(self) -> bool:
        """True after the first signal."""
        return self.name is not None


@contextmanager
def signals_asked_to_wait() -> Iterator[Interruption]:
    """Inside the block the first SIGTERM or SIGINT is only noted; a second one ends the process.

    The second one has the system's own action, so that it also ends a computation that does not
    come back to Python; a shell reports status 128 + its number: 143 or 130. Handlers from before
    are back after the block. Raises ValueError outside of the main thread, as `signal` does.
    """
    interruption = Interruption()

    def note(number: int, frame: FrameType | None) -> None:
        interruption.name = signal.Signals(number).name
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    before = {each: signal.signal(each, note) for each in SIGNALS}
    try:
        yield interruption
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
