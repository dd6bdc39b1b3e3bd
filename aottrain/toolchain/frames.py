"""Room for the frames of Python's functions, taken before memory is short.

Python 3.11 and newer keep frames in pieces of 16 KiB, and ask the system for another as calls go deeper. Where it has
none, 3.11 lets go of the called function once too often: it is freed while others use it, and what takes its place in
memory is called instead of it. Newer versions raise MemoryError, at a call that needs hardly any.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Words of a frame. Pieces are powers of two: of the one for this frame, a MiB, half is left for those above it, which
# is some 1,500 frames. Hardly a page of the frame itself is touched.
_WORDS = 65_000
_within = threading.local()


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    sys._getframe()  # the object that a traceback needs of this frame, which is as large
    return function(*args, **kwargs)


if sys.version_info >= (3, 11):
    _call.__code__ = _call.__code__.replace(co_stacksize=_WORDS)


def roomy(function: _Function) -> _Function:
    """The function, with room for the frames of what it calls. MemoryError: there is no room, and nothing has run."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(_within, "room", False):
            return function(*args, **kwargs)
        _within.room = True
        try:
            return _call(*(function, args, kwargs))  # a call with a star is the one that 3.11 undoes as it should
        finally:
            _within.room = False

    return run  # type: ignore[return-value]
