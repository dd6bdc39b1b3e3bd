"""Errors that depend on values: where eager raises one, so does each call of a compiled program."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("require_false(Tensor flag, str message, str error='ValueError') -> ()")
# Reads a value, so that what makes it is run; and the value itself, not to be had before these tangents are.
_library.define("anchor(Tensor value) -> ()")
_library.define("held_back(Tensor(a) value, Tensor[] tangents) -> Tensor(a)")
_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "AssertionError": AssertionError}
_current = threading.local()


def _require_false(flag: Tensor, message: str, error: str = "ValueError") -> None:
    if flag.item():
        raise _ERRORS[error](message)


def _anchor(value: Tensor) -> None: ...


def _held_back(value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
    return value.view_as(value)


_library.impl("require_false", _require_false, "CompositeExplicitAutograd")
_library.impl("anchor", _anchor, "CompositeExplicitAutograd")
_library.impl("held_back", _held_back, "CompositeExplicitAutograd")


@register_fake(_library, "require_false")
def _(flag: Tensor, message: str, error: str = "ValueError") -> None: ...


@register_fake(_library, "anchor")
def _(value: Tensor) -> None: ...


@register_fake(_library, "held_back")
def _(value: Tensor, tangents: Sequence[Tensor]) -> Tensor:
    return value.view_as(value)


def checked_truth(flag: Tensor, value: bool) -> bool:
    """The value, with a check in the program that it is the flag's truth: where it is not the call runs eagerly."""
    wrong = flag == 0 if value else flag != 0
    torch.ops.aottrain.require_false(wrong, "a value at which the program does nothing but raise an error")
    return value


@contextmanager
def values_checked(message: str) -> Iterator[None]:
    """While tracing a function of torch's that asks for a value only to raise a ValueError with this message if it is
    true: the program checks it, and the trace goes on."""
    _current.message = message
    try:
        yield
    finally:
        _current.message = None


def checked_value(flag: Tensor) -> bool | None:
    """False, with a check in the program, inside `values_checked`; else None."""
    message = getattr(_current, "message", None)
    if message is None:
        return None
    torch.ops.aottrain.require_false(flag, message)
    return False
