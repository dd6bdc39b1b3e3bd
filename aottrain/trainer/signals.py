"""Ctrl-C and SIGTERM: while steps are taken they end the run after the step at hand, with a checkpoint, and a second
one at once; before that, while it is built and compiled, the first one does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from aottrain.trainer.console import say_at_once

STOPPING = "stopping after this step; again to stop now"


class Interrupted(KeyboardInterrupt):
    """A signal ended what ran, where it was. The exit code is that of a process that the signal ended: 128 + signum."""

    def __init__(self, signum: int):
        super().__init__(f"by {signal.Signals(signum).name}")
        self.signum = signum


@dataclass
class Stop:
    """Whether the run is to end."""

    signum: int | None = None
    """The signal that asked for it; None while nobody has."""

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 128 + its number; 0 if none did."""
        return 0 if self.signum is None else 128 + self.signum


@contextmanager
def graceful_stop() -> Iterator[Stop]:
    """Catches SIGINT and SIGTERM inside the block: the first is answered at once and remembered, a second raises
    Interrupted."""
    stop = Stop()

    def handle(signum: int, frame: FrameType | None) -> None:
        if stop.signum is not None:
            raise Interrupted(signum)
        stop.signum = signum
        say_at_once(STOPPING)

    with _handled_by(handle):
        yield stop


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise Interrupted, so that what is underway is ended and written down."""

    def handle(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    with _handled_by(handle):
        yield


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Restores the handlers after it. Python delivers signals to the main thread only: elsewhere nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
