"""What the user's Python does beside tensor work while it is traced: what every call must do again is refused before it
happens, and what a value must be is checked by the program. Printing, clocks, files, logging and random modules are not
seen by any guard."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from aottrain.compat import is_wrapped
from aottrain.compat_dispatch import in_backward, profile_again
from aottrain.errors import UnsupportedError
from aottrain.guards.bytecode import truth_without_error
from aottrain.ops.checks import checked_truth

_BUILTINS = {getattr(builtins, name) for name in ("print", "open", "input", "exec", "eval", "globals", "breakpoint")}
_MODULES = {
    "time", "datetime", "_datetime", "_io", "io", "os", "posix", "nt", "logging", "warnings", "_warnings", "random",
    "_random", "secrets", "uuid", "tempfile", "shutil", "pathlib", "subprocess", "socket", "gc",
}  # fmt: skip
# The functions of a module that look at the caller's stack; its others look at their arguments alone.
_STACK = {("inspect", name) for name in ("stack", "trace", "currentframe", "getouterframes", "getinnerframes")}
# What no guard holds of torch's and Python's settings; all of torch.backends, too.
_SETTINGS = {
    "get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision", "is_anomaly_enabled",
    "is_anomaly_check_nan_enabled", "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode",
    "getrecursionlimit",
}  # fmt: skip


@contextmanager
def audited(
    function: Callable[..., Any], module: nn.Module | None, more: Sequence[Callable[..., Any]] = ()
) -> Iterator[None]:
    """Raises UnsupportedError where code of the packages that the target comes from, or more, calls one of those.

    No other code is looked at: torch may print, and an import hook or a progress bar that is stopped midway keeps
    its locks.
    """
    packages = _packages(function, module).union(*(_packages(one, None) for one in more))
    is_users_module: dict[int, bool] = {}  # by the identity of a module's globals, which `modules` keeps alive
    modules: list[Any] = []

    def is_users(frame: FrameType) -> bool:
        """Of a module that is seen for the first time."""
        modules.append(frame.f_globals)
        answer = is_users_module[id(frame.f_globals)] = _package(frame) in packages
        return answer

    def check(frame: FrameType, event: str, called: Any) -> None:
        # Nearly all that runs is torch's: this comes first, and must cost nothing.
        caller = frame if event == "c_call" else frame.f_back if event == "call" else None
        if caller is None:
            return
        answer = is_users_module.get(id(caller.f_globals))
        if not (is_users(caller) if answer is None else answer):
            return
        if event == "c_call":
            if called in _BUILTINS or _module_of(called) in _MODULES or called.__name__ in _SETTINGS:
                raise UnsupportedError(f"the program calls {called.__qualname__}, which each call would do again")
        else:
            package = _package(frame)
            name = frame.f_code.co_name
            if package == "torch" and _is_setting(frame):
                raise UnsupportedError(f"the program reads a setting of torch, {name}")
            if package in _MODULES or (package, name) in _STACK:
                raise UnsupportedError(f"the program calls {package}.{name}, which each call would do again")

    profiler = sys.getprofile()
    if packages:
        sys.setprofile(check)
    try:
        yield
    finally:
        profile_again(profiler)


def presumed_truth(value: Tensor, asking: FrameType) -> bool | None:
    """What the code that asks for a tensor's truth is told, if the other answer leads to an error alone: the program
    checks it. Only in a forward: what a backward raises is not raised by eager instead."""
    if value.numel() != 1 or is_wrapped(value) or in_backward():
        return None
    truth = truth_without_error(asking)
    return None if truth is None else checked_truth(value, truth)


def _is_setting(frame: FrameType) -> bool:
    return frame.f_code.co_name in _SETTINGS or str(frame.f_globals["__name__"]).startswith("torch.backends")


def _packages(function: Any, module: nn.Module | None) -> set[str]:
    while isinstance(function, functools.partial):
        function = function.func
    owners = [function, type(function), getattr(function, "__self__", None)]
    owners += [] if module is None else [type(child) for child in module.modules()]
    packages = {str(getattr(owner, "__module__", "")).partition(".")[0] for owner in owners}
    return packages - {"", "torch", "aottrain", "builtins"}


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _module_of(function: Any) -> str:
    """The module of a builtin function, or of the class whose method it is."""
    owner = getattr(function, "__self__", None)
    if owner is None or type(owner).__name__ == "module":
        return str(function.__module__)
    return str((owner if isinstance(owner, type) else type(owner)).__module__)
