"""Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed: while steps are taken they end the run after the step at
hand, with a checkpoint, and a second one at once; before that, while it is built and compiled, the first one does.
SIGUSR1 asks for a checkpoint after the step at hand, and the run goes on. Output that nobody reads any more, as after
`| head`, ends a run as SIGTERM does: the signal for it, SIGPIPE, is one that Python ignores.

A SIGHUP never ends a run at once: the kernel, a shell and a session's manager each send what they send at its end.

A handler runs between any two operations of Python, also in what torch's C++ calls: a mode's dispatch, a symbolic
size, an autograd function, the end of a tensor. There an exception ends the process (`std::terminate`), becomes another
one, or is lost. So Interrupted is raised only where Python alone is underway (`ending.py`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from aottrain.errors import HANGUP, ending_signals
from aottrain.toolchain.ending import Handler, LastWords, ending, handled_by
from aottrain.trainer.console import say_at_once, unread

ending.say = say_at_once
STOPPING = "stopping after this step; again to stop now"
NOTHING_TO_SAVE = "SIGUSR1: no step is in progress, so no checkpoint is written"
# Windows has neither.
SAVE = getattr(signal, "SIGUSR1", None)
UNREAD = getattr(signal, "SIGPIPE", None)
PATIENCE_S = 10.0
"""How long the first signal waits for a place at which it can be raised, while a run is built and compiled."""
AT_ONCE_S = 1.0
"""How long the second one does, while steps are taken."""


@dataclass
class Stop:
    """What signals have asked of a run: whether it is to end, or to write a checkpoint.

    Of several processes all must do the same after the same step. What one of them hears waits until they agree, at
    one point of each step: a signal that comes later is of the next one.
    """

    is_agreed: bool = False
    """Whether several processes agree on what has been asked."""
    heard: int | None = None
    """By this process, which the others may not know of yet."""
    is_save_heard: bool = False
    signum: int | None = None
    """The signal that asked for its end; None while nobody has."""
    is_save_asked: bool = False
    """Whether SIGUSR1 has come since `takes_save` was last called."""

    def hear(self, signum: int) -> None:
        self.heard = signum
        if not self.is_agreed:
            self.signum = signum

    def hear_save(self) -> None:
        if self.is_agreed:
            self.is_save_heard = True
        else:
            self.is_save_asked = True

    def takes_heard(self) -> tuple[int, bool]:
        """The number of the signal that this process has heard, 0 for none, and whether it was asked to save, once. A
        handler runs between any two operations: what it sets is cleared only where it has been seen."""
        if asked := self.is_save_heard:
            self.is_save_heard = False
        return self.heard or 0, asked

    def takes_save(self) -> bool:
        """Whether a checkpoint has been asked for; once for each request, of which several in one step are one."""
        asked, self.is_save_asked = self.is_save_asked, False
        return asked

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 128 + its number; 0 if none did."""
        return 0 if self.signum is None else 128 + self.signum


@contextmanager
def graceful_stop(is_agreed: bool = False) -> Iterator[Stop]:
    """Catches SIGINT, SIGTERM and SIGHUP inside the block: the first is answered at once and remembered, a second
    raises Interrupted, unless one of the two is SIGHUP. SIGUSR1 is remembered, too. is_agreed: whether several
    processes agree on what to do."""
    stop = Stop(is_agreed)

    def handle(signum: int, frame: FrameType | None) -> None:
        before = {stop.heard, stop.signum} - {None}
        if before and signum == HANGUP:
            return
        if before - {HANGUP, UNREAD}:
            ending.ask(signum, frame, AT_ONCE_S)
            return
        stop.hear(signum)
        say_at_once(STOPPING)

    def note(signum: int, frame: FrameType | None) -> None:
        stop.hear_save()

    def is_unread() -> None:
        if UNREAD is not None and stop.heard is None and stop.signum is None:  # Ctrl-C ends `| tee`, too
            stop.hear(UNREAD)

    unread.append(is_unread)
    try:
        with _handled_by(handle, note):
            yield stop
    finally:
        unread.remove(is_unread)


@contextmanager
def interruptible(last_words: LastWords | None = None) -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise Interrupted, so that what is underway is ended and written down.
    SIGUSR1, which would end a process that does not expect it, is answered.

    last_words: is called with what would have been raised, in place of that, where for PATIENCE_S no place was met at
    which it can be, or a second signal came before: the process then ends with this signal's exit code.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        ending.ask(signum, frame, PATIENCE_S)

    def answer(signum: int, frame: FrameType | None) -> None:
        say_at_once(NOTHING_TO_SAVE)

    with _handled_by(handle, answer, last_words):
        yield


@contextmanager
def _handled_by(end: Handler, save: Handler, last_words: LastWords | None = None) -> Iterator[None]:
    """Restores the handlers after it. Python delivers signals to the main thread only: elsewhere nothing is caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if not ending.takes_look(signum, frame) and not ending.hangs_up_again(signum):
            end(signum, frame)

    handlers = {**dict.fromkeys(ending_signals(), handle), **({} if SAVE is None else {SAVE: save})}
    with handled_by(handlers, last_words):
        yield
