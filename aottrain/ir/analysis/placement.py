"""Where buffers lie in an arena: each at the lowest offset that nothing alive at the same time has."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Mapping
from typing import TypeVar

from aottrain.errors import VerificationError

Buffer = TypeVar("Buffer", bound=Hashable)


def first_fit(sizes: Mapping[Buffer, int], born: Mapping[Buffer, int], last: Mapping[Buffer, int]) -> dict[Buffer, int]:
    """The offset of each buffer, the largest first. sizes: bytes; born, last: the first and the last call of each."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first and last call
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(sizes, key=lambda buffer: (-sizes[buffer], born[buffer])):
        size, first, final = sizes[buffer], born[buffer], last[buffer]
        offset = 0
        for start, end, other_first, other_last in placed:
            if other_first <= final and first <= other_last:
                if start >= offset + size:
                    break
                offset = max(offset, end)
        offsets[buffer] = offset
        insort(placed, (offset, offset + size, first, final))
    return offsets


def verify_offsets(
    offsets: Mapping[Buffer, int], sizes: Mapping[Buffer, int], born: Mapping[Buffer, int], last: Mapping[Buffer, int]
) -> None:
    """Law 5. Raises VerificationError where two that are alive at once overlap."""
    alive: list[Buffer] = []
    for buffer in sorted(offsets, key=lambda buffer: born[buffer]):
        alive = [other for other in alive if last[other] >= born[buffer]]
        start, end = offsets[buffer], offsets[buffer] + sizes[buffer]
        for other in alive:
            if start < offsets[other] + sizes[other] and offsets[other] < end:
                raise VerificationError(f"{buffer} and {other} are alive at once and overlap in the arena")
        alive.append(buffer)


def extent(offsets: Mapping[Buffer, int], sizes: Mapping[Buffer, int]) -> int:
    """Bytes of the arena that holds them all."""
    return max((offsets[buffer] + size for buffer, size in sizes.items()), default=0)
