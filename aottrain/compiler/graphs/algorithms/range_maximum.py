"""Bytes by instant, of which ranges are raised and whose largest is asked for, in the square root of their number."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 96


class RangeMaximum:
    """values: one for each position. Each block of positions stores its largest value, and a common addend."""

    def __init__(self, values: Sequence[int]):
        self._values = list(values)
        starts = range(0, len(self._values), _BLOCK)
        self._added = [0] * len(starts)
        self._largest = [max(self._values[i : i + _BLOCK]) for i in starts]

    def largest(self, first: int, end: int) -> int:
        """Of the positions from `first` to before `end`; there must be one."""
        values, low, high = self._values, first // _BLOCK, (end - 1) // _BLOCK
        if low == high:
            return max(values[first:end]) + self._added[low]
        at_ends = max(
            max(values[first : (low + 1) * _BLOCK]) + self._added[low],
            max(values[high * _BLOCK : end]) + self._added[high],
        )
        return max(at_ends, *self._largest[low + 1 : high]) if low + 1 < high else at_ends

    def add(self, first: int, end: int, amount: int) -> None:
        """To each position from `first` to before `end`."""
        if first >= end:
            return
        low, high = first // _BLOCK, (end - 1) // _BLOCK
        self._add_within(low, first, min(end, (low + 1) * _BLOCK), amount)
        if high > low:
            for block in range(low + 1, high):
                self._added[block] += amount
                self._largest[block] += amount
            self._add_within(high, high * _BLOCK, end, amount)

    def _add_within(self, block: int, first: int, end: int, amount: int) -> None:
        values = self._values
        values[first:end] = [value + amount for value in values[first:end]]
        self._largest[block] = max(values[block * _BLOCK : (block + 1) * _BLOCK]) + self._added[block]
