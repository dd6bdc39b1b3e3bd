"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """signum: the signal that asked for the end; None while nobody has."""

    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 128 + its number; 0 if none did."""
        return 0 if self.signum is None else 128 + self.signum


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Catches SIGINT and SIGTERM inside the block and restores their handlers after it.

    Python delivers signals to the main thread only; in any other thread nothing is caught.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.signum is not None:
            raise KeyboardInterrupt
        stop.signum = signum

    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
