"""What a program moves in memory, as its report has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aottrain.ir.units import format_bytes


class Traffic:
    """Bytes that a program's kernels and library calls read and write, and the least that any program for it needs.

    They are counted when somebody first asks for one of them, which takes a moment.
    """

    def __init__(self, count: Callable[[], tuple[int, int]]):
        self._count: Callable[[], tuple[int, int]] | None = count
        self._counted = 0, 0

    def _both(self) -> tuple[int, int]:
        if self._count is not None:
            self._counted, self._count = self._count(), None
        return self._counted

    @property
    def moved(self) -> int:
        return self._both()[0]

    @property
    def least(self) -> int:
        """Each needed input once, each result once: `aottrain/compiler/traffic.py` says it in full."""
        return self._both()[1]

    @property
    def ratio(self) -> float:
        return self.moved / max(self.least, 1)

    def __reduce__(self) -> Any:
        """Copied, or sent to another process, as its numbers."""
        return _counted_traffic, self._both()

    def __repr__(self) -> str:
        return f"<Traffic: {format_bytes(self.moved)} moved, at least {format_bytes(self.least)}>"


def _counted_traffic(moved: int, least: int) -> Traffic:
    return Traffic(lambda: (moved, least))
