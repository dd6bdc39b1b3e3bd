"""Numbers that follow from the sizes of a call before its kernels start: of programs, and of what each of them does.

For fixed sizes they are numbers of the text. For sizes that each call has its own of they are symbols of the text,
whose values the launch works out and passes on, as it does sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.open_sizes import facts_of, size_names
from aottrain.ir.kernels.open_sizes import numbered as with_numbered_sizes
from aottrain.ir.sizes.polynomials import PREFIX, Polynomial, SizeFacts, is_open, likely, same

# Of a symbol that is none of a graph: names of values begin with no digit.
_OWN = "0"


class Derived:
    """Those of one kernel."""

    def __init__(self, kernel: KernelIR):
        facts = facts_of(kernel)
        # Closed: what is asked of these numbers must be right in every call, for there would be no guard.
        self._facts = facts and SizeFacts(dict(facts.hints), dict(facts.ranges), closed=True)
        self.sizes = size_names(kernel)
        self.lines: list[str] = []
        """Python text that works them out, in order."""

    def rounded_up(self, name: str, value: Any, by: Any) -> Any:
        """value / by, rounded up. name: of the number, where it is a symbol."""
        if same(by, 1):
            return value
        if not is_open(value, by):
            return -(-value // by)
        return self._named(name, f"-(-{value} // {by})", -(-likely(value) // likely(by)))

    def share(self, tiles: Any, others: Any, most: int, least: int) -> Any:
        """How many of the tiles a program takes one after the other, so that there are about `most` programs of all
        these tiles, each with `others` more beside it, and a program has `least` of them where there are as many."""
        if not is_open(tiles, others):
            return max(-(-tiles * others // most), min(tiles, least))
        count = max(-(-likely(tiles) * likely(others) // most), min(likely(tiles), least))
        return self._named("each", f"max(-(-{tiles} * {others} // {most}), min({tiles}, {least}))", count)

    def numbered(self, text: str) -> str:
        """A module's text with names of its own for sizes and for these numbers, the same in every program."""
        return re.sub(rf"\b{PREFIX}{_OWN}(\w+)\b", r"\1", with_numbered_sizes(text, self.sizes))

    def used(self, lines: Sequence[str]) -> list[str]:
        """The symbols in a function's text, which are its arguments."""
        return sorted({name for line in lines for name in re.findall(rf"\b{PREFIX}\w+\b", line)})

    def _named(self, name: str, text: str, hint: int) -> Polynomial:
        facts, own = self._facts, _OWN + name
        assert facts is not None
        facts.hints[own], facts.ranges[own] = hint, (1, None)  # type: ignore[index]
        symbol = facts.symbol(own)
        line = f"{PREFIX}{own} = {text}"
        if line not in self.lines:
            self.lines.append(line)
        return symbol
