"""Whose an object is: the user's, or torch's and Python's own, which no program changes; and what no guard sees."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.errors import UnsupportedError

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


def refuse_scripted(module: nn.Module) -> None:
    """Raises UnsupportedError for a module whose attributes are TorchScript's, not Python's."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError("a module is one of TorchScript, whose state no guard holds")


def check_reachable(reachable: Collection[int], captured: Iterable[Tensor]) -> None:
    """Raises UnsupportedError where a captured tensor came from a place that is not guarded. reachable: identities."""
    for tensor in captured:
        if id(tensor) not in reachable:
            raise UnsupportedError(f"tensor {tuple(tensor.shape)} is read from a place that cannot be guarded")
