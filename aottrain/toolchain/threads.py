"""Threads whose start is not waited for without an end.

`threading.Thread.start` waits until the thread has begun. One that finds no memory for its first frames ends before
that, and says so to nobody: then who started it waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

_BEGIN_S = 10.0
_ONCE_MORE_S = 2.0  # for a process that was stopped meanwhile
_LOOK_S = 1.0
_Given, _Made = TypeVar("_Given"), TypeVar("_Made")


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        if not super().wait(_BEGIN_S) and not super().wait(_ONCE_MORE_S):
            raise MemoryError(f"a thread has not begun within {_BEGIN_S:g} s")
        return True


class Thread(threading.Thread):
    """As threading's. `start` raises MemoryError where it has not begun after some seconds."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self._started = _Begun()


class Pool:
    """Calls of one function by a few threads, which end when nothing is left to call. `futures`: one for each of
    `given`, in their order."""

    def __init__(self, make: Callable[[_Given], _Made], given: Sequence[_Given]):
        self.futures: list[Future[_Made]] = [Future() for _ in given]
        self._make, self._left = make, deque(zip(self.futures, given, strict=True))
        self._threads: list[Thread] = []

    def start(self, num_threads: int) -> None:
        """Raises MemoryError, or RuntimeError of threading's, where not a single one begins."""
        for _ in range(min(num_threads, len(self.futures))):
            thread = Thread(target=self._run, name="aottrain pool", daemon=True)
            try:
                thread.start()
            except (MemoryError, RuntimeError):
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    @property
    def lives(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def wait(self) -> set[Future[Any]]:
        """Until some have ended, for a second at the most: these. MemoryError: some never will, all threads ended."""
        lives = self.lives
        ended = {future for future in self.futures if future.done()}
        if not lives and len(ended) < len(self.futures):
            raise MemoryError("the threads of a pool have ended before their work")
        pending = [future for future in self.futures if future not in ended]
        return ended | (wait(pending, _LOOK_S, "FIRST_COMPLETED").done if pending else set())

    def _run(self) -> None:
        with suppress(IndexError):  # nothing is left
            while True:
                future, given = self._left.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = self._make(given)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
