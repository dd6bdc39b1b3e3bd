"""Where each value is used for the last time, of steps in the order in which they run."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def last_uses(touched: Iterable[Iterable[Value]]) -> dict[Value, int]:
    """For each value the position of the last step that touches it. touched: what each step reads or makes."""
    return {value: position for position, values in enumerate(touched) for value in values}


def freed_after(last: Mapping[Value, int], kept: Container[Value]) -> dict[int, list[Value]]:
    """By position the values that no later step touches. kept: values that live on."""
    freed: dict[int, list[Value]] = {}
    for value, position in last.items():
        if value not in kept:
            freed.setdefault(position, []).append(value)
    return freed
