"""What a report's pictures show, found when somebody looks: most programs are compiled and never drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from aottrain.explain.records import Diagram


class Pictures(Sequence[Diagram]):
    """The diagrams of a program, made when one of them is first read; from then on the program is not kept for them."""

    def __init__(self, make: Callable[[], Iterable[Diagram]]):
        self._make: Callable[[], Iterable[Diagram]] | None = make
        self._made: tuple[Diagram, ...] = ()

    def _all(self) -> tuple[Diagram, ...]:
        if self._make is not None:
            self._made, self._make = tuple(self._make()), None
        return self._made

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Diagram]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Diagram: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Diagram, ...]: ...
    def __getitem__(self, index: int | slice) -> Diagram | tuple[Diagram, ...]:
        return self._all()[index]

    def __reduce__(self) -> Any:
        """Copied, or sent to another process, as what they show."""
        return tuple, (self._all(),)

    def __repr__(self) -> str:
        return "<Pictures: not drawn yet>" if self._make is not None else f"<Pictures: {len(self._made)}>"
