"""Where a signal may raise: only where Python alone is underway.

An exception in a function that C++ has called may end the process, become another exception, or be dropped with a line
on stderr. A handler cannot see C++ below it, but it sees the frames of Python: torch's own, apart from those that are
plain Python from end to end, and those with names by which C++ and the collector call. While there are such frames, a
thread has the handler look again every few milliseconds. The trainer's handlers use this, and those that stand in for
Python's own while `aottrain.compile` compiles.
"""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from aottrain.errors import HANGUP, Interrupted

_LOOK_S = 0.005
_AGAIN_S = 0.05  # after it has been raised: whether somebody has dropped it
_LAST_WORDS_S = 2.0
_TORCH = str(Path(torch.__file__).parent) + os.sep
# Of torch: Python that Python calls. What lies in neither of them waits until it has returned.
_PLAIN = (
    "nn/", "optim/", "amp/", "utils/_contextlib.py", "utils/_pytree.py", "utils/data/", "fx/", "_compile.py",
    "_dynamo/", "_inductor/", "_functorch/aot_autograd.py", "_functorch/_aot_autograd/", "_functorch/partitioners.py",
    "random.py", "cuda/", "profiler/", "distributed/", "__init__.py",
)  # fmt: skip
_NOT_PLAIN = ("fx/experimental/", "distributed/autograd/", "cuda/graphs.py")
_TRACERS = frozenset(("make_fx", "wrapped", "trace", "_trace_inner", "dispatch_trace", "inner"))
_CALLED_FROM_BELOW = frozenset(("__torch_dispatch__", "__torch_function__", "__del__"))
_STARTS_A_PROCESS = frozenset(("__init__", "_execute_child"))  # of Popen: nobody knows the child before
LOOK = getattr(signal, "SIGURG", signal.SIGINT)
"""By which a thread has the handler look again. Not SIGINT where there is another: a look that was asked for while one
began was taken for a second Ctrl-C."""
LastWords = Callable[[Interrupted], object]
Handler = Callable[[int, "FrameType | None"], None]


def _say(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def is_plain(frame: FrameType | None) -> bool:
    """Whether this frame and all below it are Python that Python has called, as far as names tell."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CALLED_FROM_BELOW or not _is_plain_place(code.co_filename, code.co_name):
            return False
        frame = frame.f_back
    return True


@cache
def _is_plain_place(filename: str, name: str) -> bool:
    if filename == weakref.__file__:  # calls of weak references: what is raised there is dropped
        return False
    if filename == subprocess.__file__:
        return name not in _STARTS_A_PROCESS
    if not filename.startswith(_TORCH):
        return True
    place = filename[len(_TORCH) :].replace(os.sep, "/")
    if place == "fx/experimental/proxy_tensor.py":  # what stands below all that is traced
        return name in _TRACERS
    return place.startswith(_PLAIN) and not place.startswith(_NOT_PLAIN)


class Ending:
    """Of this process: the signal that is to end what runs, from when it comes until the outermost block is left."""

    def __init__(self) -> None:
        self._asked: Interrupted | None = None
        self._until_s = 0.0
        self._is_raised = False
        self._looks = False
        """Whether the next LOOK is `_watch` that has the handler look."""
        self._has_hung_up = False
        """Whether the terminal's end has been told inside the outermost block."""
        self._depth = 0
        self.say: Callable[[str], object] = _say
        """How a handler says a line; past every buffer."""
        self._last_words: list[LastWords] = []
        self._lock = threading.Lock()  # never taken by a handler, which may interrupt who holds it

    @contextmanager
    def inside(self, last_words: LastWords | None = None) -> Iterator[None]:
        """A block in which handlers use this."""
        self._depth += 1
        words = [] if last_words is None else [last_words]
        self._last_words += words
        try:
            yield
        finally:
            self._depth -= 1
            del self._last_words[len(self._last_words) - len(words) :]

    def leave(self) -> None:
        """At the end of a block, with its handlers still in place. Raises what was asked for and is not underway."""
        asked, is_lost = self._asked, not self._is_raised or not _is_underway()
        if self._depth == 1:
            with self._lock:
                self._asked = None
            self._has_hung_up = False
        if asked is not None and is_lost:
            self._is_raised = True
            raise asked

    @property
    def is_waiting(self) -> bool:
        """Whether a signal has been heard and could not be raised yet."""
        return self._asked is not None and not self._is_raised

    def ask(self, signum: int, frame: FrameType | None, patience_s: float) -> None:
        """In a handler: raise Interrupted, here or where it can be. The process ends where that has not come after so
        many seconds, or a signal comes before."""
        is_second = self._asked is not None and not self._is_raised
        is_here = is_plain(frame)
        if is_second and not is_here:
            self._end_process(signum)
        self._asked, self._is_raised = Interrupted(signum), is_here
        self._until_s = time.monotonic() + patience_s
        _thread.start_new_thread(self._watch, (self._asked,))  # as threading has it, it takes a lock first
        if is_here:
            raise self._asked

    def hangs_up_again(self, signum: int) -> bool:
        """In a handler: whether this is the terminal's end, and was told before or comes beside what ends the block."""
        if signum != HANGUP:
            return False
        is_known, self._has_hung_up = self._has_hung_up or self._asked is not None, True
        return is_known

    def takes_look(self, signum: int, frame: FrameType | None) -> bool:
        """In a handler: whether it was called to look again, and no signal has come. Raises where it can be now."""
        if not self._looks or signum != LOOK:
            return False
        self._looks = False
        if self._asked is not None and is_plain(frame) and not (self._is_raised and _is_underway()):
            self._is_raised = True
            raise self._asked
        return True

    def _watch(self, asked: Interrupted) -> None:
        while self._asked is asked:
            time.sleep(_AGAIN_S if self._is_raised else _LOOK_S)
            with self._lock:
                if self._asked is not asked:
                    return
                if not self._is_raised and time.monotonic() > self._until_s:
                    self._end_process(asked.signum)
                self._looks = True
                _thread.interrupt_main(LOOK)

    def _end_process(self, signum: int) -> None:
        def end(after_s: float) -> None:
            time.sleep(after_s)
            os._exit(128 + signum)

        _thread.start_new_thread(end, (_LAST_WORDS_S,))  # a disk that hangs
        self.say("aottrain: interrupted")
        for words in reversed(self._last_words):
            with suppress(Exception):
                words(Interrupted(signum))
        end(0)


ending = Ending()


@contextmanager
def handled_by(handlers: dict[int, Handler], last_words: LastWords | None = None) -> Iterator[None]:
    """By these, and by one for LOOK where it is a signal of its own; in the main thread. Restores those before."""

    def look(signum: int, frame: FrameType | None) -> None:
        ending.takes_look(signum, frame)

    with ending.inside(last_words):
        own = {LOOK: look, **handlers}
        previous = {signum: signal.signal(signum, handler) for signum, handler in own.items()}
        try:
            yield
        finally:
            try:
                ending.leave()
            finally:
                for signum, handler in previous.items():
                    signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, a Ctrl-C that Python's own handler would raise anywhere is raised where it can be: KeyboardInterrupt, as
    ever, at the latest at the end of the block. A second one before that is raised at once. Nothing changes in other
    threads, or where the program has a handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if not ending.takes_look(signum, frame):
            if ending.is_waiting:
                raise KeyboardInterrupt
            ending.ask(signum, frame, float("inf"))

    with handled_by({signal.SIGINT: handle}):
        yield


def _is_underway() -> bool:
    """Whether an Interrupted is being handled: in an except or finally, or what these call."""
    error, seen = sys.exc_info()[1], set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, Interrupted):
            return True
        seen.add(id(error))
        error = error.__context__
    return False
