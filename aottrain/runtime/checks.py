"""Errors that depend on values: where eager raises one, so does each call of a compiled program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("require_false(Tensor flag, str message) -> ()")
_current = threading.local()


def _require_false(flag: Tensor, message: str) -> None:
    if flag.item():
        raise ValueError(message)


_library.impl("require_false", _require_false, "CompositeExplicitAutograd")


@torch.library.register_fake("aottrain::require_false")
def _(flag: Tensor, message: str) -> None: ...


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
