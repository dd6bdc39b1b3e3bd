"""Whose an object is: the user's, or torch's and Python's own, which no program changes; and what no guard sees."""

from __future__ import annotations

import io
import logging
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.errors import UnsupportedError
from aottrain.ir.values import PLAIN_TYPES

# What the code of a program does with these is refused while it is traced; they lead to all else in the process.
_OPAQUE = (io.IOBase, logging.Filterer, logging.Manager)
_SET_BY_USERS = ("torch.optim.", "torch.distributions.", "torch.amp.grad_scaler.")
# Whose objects hold nothing of a program's own; of the last few they say how classes and functions were defined.
_NOT_LOOKED_INTO = {"torch", "builtins", "numpy", "collections", "functools", "weakref", "dataclasses", "inspect",
                    "types", "typing"}  # fmt: skip
# Compiled programs and their guards, which change with each that is made.
_OF_PROGRAMS = ("aottrain.compiler.", "aottrain.guards.", "aottrain.runtime.")
# What a class says of how it was defined, which leads to hundreds of such objects in a library of dataclasses.
DEFINITION = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__",
              "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__", "__abstractmethods__",
              "_abc_impl"}  # fmt: skip
_NOT_USERS = {"torch", "numpy", *sys.stdlib_module_names}


def is_users(value: Any) -> bool:
    """Whether an object is the user's, and not torch's or Python's own. Of Python's own, what holds other objects is
    the user's: instances of its classes, and its modules, whose constants can be replaced."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, types.ModuleType):
        module = value.__name__
    package = str(module).partition(".")[0]
    if isinstance(value, (type, types.FunctionType)):
        return is_users_package(package)
    if str(module).startswith(_OF_PROGRAMS):
        return False
    return package not in _NOT_LOOKED_INTO or isinstance(value, types.SimpleNamespace)


def is_users_package(package: str) -> bool:
    return package not in _NOT_USERS


def is_librarys(module: types.ModuleType) -> bool:
    """Whether it is one of Python's own, of torch or of NumPy, which keep notes of their own in themselves."""
    return not is_users_package(module.__name__.partition(".")[0])


def is_plain(value: Any) -> bool:
    """Whether it is compared by what it is equal to: without attributes of its own, as members of enums have."""
    return isinstance(value, PLAIN_TYPES) and not getattr(value, "__dict__", None)


def is_opaque(value: Any) -> bool:
    """Whether nothing more is looked for in it. A weak proxy stands for what it leads to, whatever it is asked."""
    return type(value) in weakref.ProxyTypes or isinstance(value, _OPAQUE) or value is sys.modules or is_plain(value)


def slots_of(cls: type) -> Iterator[str]:
    """The names of a class's slots and of its bases', as attributes; that for weak references guards themselves use."""
    for kind in cls.__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def is_torchs(value: Any) -> bool:
    """Whether it is an object of torch's whose attributes anyone may set, and which a program may ask for them: an
    optimizer, a scheduler or a distribution. Others keep notes of their own there, as autocast and custom operators."""
    kind = type(value)
    return f"{kind.__module__}.".startswith(_SET_BY_USERS) and not issubclass(kind, (nn.Module, type))


def refuse_scripted(module: nn.Module) -> None:
    """Raises UnsupportedError for a module whose attributes are TorchScript's, not Python's."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError("a module is one of TorchScript, whose state no guard holds")


def check_reachable(reachable: Collection[int], captured: Iterable[Tensor]) -> None:
    """Raises UnsupportedError where a captured tensor came from a place that is not guarded. reachable: identities."""
    for tensor in captured:
        if id(tensor) not in reachable:
            raise UnsupportedError(f"tensor {tuple(tensor.shape)} is read from a place that cannot be guarded")
