"""What the Options of recipes check, each mistake as "field=value: what is allowed"."""

from __future__ import annotations

import math
from typing import Any


def whole_numbers(options: Any, *names: str, least: int = 1) -> list[str]:
    """Of these fields those that are no whole number of at least `least`."""
    values = ((name, getattr(options, name)) for name in names)
    return [
        f"{name}={value!r}: must be a whole number of at least {least}"
        for name, value in values
        if isinstance(value, bool) or not isinstance(value, int) or value < least
    ]


def rates(options: Any, *names: str) -> list[str]:
    """Of these fields those that are no probability below 1."""
    values = ((name, getattr(options, name)) for name in names)
    return [f"{name}={value!r}: must be at least 0 and below 1" for name, value in values if not _is_in(value, 0, 1)]


def amounts(options: Any, *names: str) -> list[str]:
    """Of these fields those that are no finite number of at least 0."""
    values = ((name, getattr(options, name)) for name in names)
    return [
        f"{name}={value!r}: must be a finite number of at least 0"
        for name, value in values
        if not _is_in(value, 0, math.inf)
    ]


def divides(options: Any, name: str, whole: str) -> list[str]:
    """Whether one field, a whole number, divides another."""
    part, value = getattr(options, name), getattr(options, whole)
    return [] if value % part == 0 else [f"{name}={part}: must divide {whole}={value}"]


def _is_in(value: Any, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and low <= value < high


def checked(options: Any) -> Any:
    """The options; ValueError lists every mistake in them."""
    mistakes = options.check()
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return options
