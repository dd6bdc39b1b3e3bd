"""Whose an object is: the user's, or torch's and Python's own, which no program changes."""

from __future__ import annotations

import sys
import types
from typing import Any

_NOT_USERS = {"torch", "numpy", *sys.stdlib_module_names}


def is_users(value: Any) -> bool:
    """Whether an object is the user's, and not torch's or Python's own. Of Python's own, what holds other objects is
    the user's: instances of its classes, and its modules, whose constants can be replaced."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, types.ModuleType):
        module = value.__name__
    package = str(module).partition(".")[0]
    if isinstance(value, (type, types.FunctionType)):
        return package not in _NOT_USERS
    return package not in ("torch", "builtins", "numpy", "collections", "functools", "weakref")
