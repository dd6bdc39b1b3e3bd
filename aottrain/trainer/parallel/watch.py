"""What one process meets alone: a batch that it has no program for, while the others go on with one that they have.

It would wait for them where programs are compared, and they for it in a collective, each until the timeout. So a
process that meets a new kind of batch says so in the store before it compiles, and a thread of each other one, which
looks there twice a second, answers that its process has gone on. Steps that meet nothing new ask nobody anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from aottrain.errors import ParallelError
from aottrain.toolchain.threads import Thread

_LOOKS_S = 0.5  # of the thread
_WAITS_S = 0.02  # of a process that has met something new, between two looks


_of_this_process: list[Watch] = []  # one at most; in no object that a program is traced with, for its thread changes it


@contextmanager
def watching(store: Any, rank: int, size: int, timeout: timedelta) -> Iterator[None]:
    """Inside, the other processes hear where this one is. store: which all have; threads may share it."""
    watch = Watch(store, rank, size, timeout)
    _of_this_process.append(watch)
    try:
        yield
    finally:
        _of_this_process.remove(watch)
        watch.close()


def meet(kind: str, is_new: bool) -> None:
    """The next batch of this process. See `Watch.meet`."""
    for watch in _of_this_process:
        watch.meet(kind, is_new)


class Watch:
    """Of one process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.passed: tuple[int, str] = (0, "")
        """How many batches have been met, and of what kind the last one was."""
        self.answered = 0
        self._ended = threading.Event()
        self._thread = Thread(target=self._look, name="aottrain watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def meet(self, kind: str, is_new: bool) -> None:
        """The next batch. ParallelError: it is new here, and another process meets another one, or none that is new."""
        number = self.passed[0] + 1
        if is_new:
            self.store.set(f"met/{number}/{self.rank}", kind)
            self.store.set("met", str(number))
            until_s = time.monotonic() + self.timeout.total_seconds()
            for other in range(self.size):
                self._wait_for(other, number, kind, until_s)
            self.answered = number
        self.passed = number, kind

    def _wait_for(self, other: int, number: int, kind: str, until_s: float) -> None:
        met, gone = f"met/{number}/{other}", f"gone/{number}/{other}"
        while time.monotonic() < until_s:
            if self.store.check([met]):
                if (theirs := self.store.get(met).decode()) == kind:
                    return
                raise ParallelError(f"{self._here(kind)}, and process {other} one of {theirs}")
            if self.store.check([gone]):
                theirs = self.store.get(gone).decode()
                raise ParallelError(f"{self._here(kind)}, and process {other} goes on with {theirs}")
            time.sleep(_WAITS_S)
        raise ParallelError(f"{self._here(kind)}; process {other} does not answer in time")

    def _here(self, kind: str) -> str:
        return f"process {self.rank} meets a first batch of {kind}"

    def _look(self) -> None:
        with suppress(Exception):  # the store has gone: so has the run
            while not self._ended.wait(_LOOKS_S):
                number = int(self.store.get("met")) if self.store.check(["met"]) else 0
                passed, kind = self.passed
                if self.answered < number <= passed:
                    self.answered = number
                    self.store.set(f"gone/{number}/{self.rank}", kind)
