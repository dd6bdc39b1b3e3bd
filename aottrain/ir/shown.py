"""What a notebook shows of a value. How it is drawn is handed down by the package, for presentation stands above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_renderer: list[Callable[[Any], str]] = []


def set_value_renderer(render: Callable[[Any], str]) -> None:
    """What draws a `Shown` value as HTML, to stand within another page."""
    _renderer[:] = [render]


class Shown:
    """A value of which a notebook shows more than its text."""

    def _repr_html_(self) -> str | None:
        return _renderer[0](self) if _renderer else None
