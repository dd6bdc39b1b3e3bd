"""Objects that are known, but not kept alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Loser(Protocol):
    """What is to know that something is gone."""

    def lose(self) -> None: ...


class Loss:
    """Called when something is gone that `owner`, which it does not keep alive either, has weak references to."""

    def __init__(self, owner: Loser):
        self._owner = weakref.ref(owner)

    def __call__(self, _: Any, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        owner = self._owner()
        if owner is not None and not is_ending():  # then modules are taken apart, and there are no names left
            owner.lose()


def can_die(value: Any) -> bool:
    """Whether Python has weak references to such objects."""
    return type(value).__weakrefoffset__ != 0
