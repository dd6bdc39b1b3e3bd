"""What is found of nodes once, while their graphs stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeVar

from torch import fx

from aottrain.ir.sizes.polynomials import SizeFacts, SizeValues, current_facts, current_values

T = TypeVar("T")


class _Known(threading.local):
    """In this thread: for each function, and what open sizes are while it is asked, its results by node; None where
    graphs may change."""

    by_function: dict[tuple[Callable[..., object], SizeFacts | SizeValues | None], dict[fx.Node, object]] | None = None


_known = _Known()


@contextmanager
def unchanged() -> Iterator[None]:
    """Inside, no graph that was asked about changes: what `once` marks is found once for each node. At the end, of the
    outermost one, it is forgotten."""
    if _known.by_function is not None:
        yield
        return
    _known.by_function = {}
    try:
        yield
    finally:
        _known.by_function = None


def once(function: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """The function of a node, called once for each inside `unchanged`. Nobody may change what it gives."""

    @wraps(function)
    def of(node: fx.Node) -> T:
        by_function = _known.by_function
        if by_function is None:
            return function(node)
        place = function, current_facts() or current_values()
        try:
            return by_function[place][node]  # type: ignore[return-value]
        except KeyError:
            pass
        found = function(node)
        by_function.setdefault(place, {})[node] = found
        return found

    return of
