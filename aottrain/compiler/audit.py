"""What the user's Python does beside tensor work while it is traced: what every call must do again is refused before it
happens. Printing, clocks, files, logging and random modules are not seen by any guard."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from aottrain.errors import UnsupportedError

_BUILTINS = {getattr(builtins, name) for name in ("print", "open", "input", "exec", "eval", "globals", "breakpoint")}
_MODULES = {
    "time", "datetime", "_datetime", "_io", "io", "os", "posix", "nt", "logging", "warnings", "_warnings", "random",
    "_random", "secrets", "uuid", "tempfile", "shutil", "pathlib", "subprocess", "socket", "gc", "inspect",
}  # fmt: skip
_TRUSTED = (sys.stdlib_module_names | {"torch", "aottrain"}) - {"__main__"}


@contextmanager
def audited() -> Iterator[None]:
    """Raises UnsupportedError in the user's code where it calls one of those; torch's own code may."""
    before = sys.getprofile()
    sys.setprofile(_check)
    try:
        yield
    finally:
        sys.setprofile(before)


def _check(frame: FrameType, event: str, called: Any) -> None:
    if event == "c_call":
        if _module(frame) not in _TRUSTED and (called in _BUILTINS or _home(called) in _MODULES):
            raise UnsupportedError(f"the program calls {called.__qualname__}, which each call would do again")
    elif event == "call" and frame.f_back is not None:
        module = _module(frame)
        if module in _MODULES and _module(frame.f_back) not in _TRUSTED:
            raise UnsupportedError(f"the program calls {module}.{frame.f_code.co_name}, which each call would do again")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _home(function: Any) -> str:
    """The module of a builtin function, or of the class whose method it is."""
    owner = getattr(function, "__self__", None)
    if owner is None or type(owner).__name__ == "module":
        return str(function.__module__)
    return str((owner if isinstance(owner, type) else type(owner)).__module__)
