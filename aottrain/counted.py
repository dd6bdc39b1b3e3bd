"""Work that is counted while it is done: what does it tells how far it is, what shows it listens.

Here, below all else, so that the compiler can count without knowing who looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, "int | None"], None]
_listeners: list[Listener] = []


@contextmanager
def counts_told(listener: Listener) -> Iterator[None]:
    """Inside, `listener` hears (what, how many are done, of how many), of every thread; None: how many is not known."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(what: str, done: int, total: int | None = None) -> None:
    for listener in tuple(_listeners):
        listener(what, done, total)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items; each counts as done when the next one is asked for."""
    for done, item in enumerate(items):
        tell(what, done, len(items))
        yield item
    tell(what, len(items), len(items))
