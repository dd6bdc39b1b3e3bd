"""Integer affine functions of loop variables: what addresses in kernels are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """sum of coefficient * loop, plus a constant. Loops are numbers; terms are sorted and have no zero coefficient."""

    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(terms: Mapping[int, int], constant: int = 0) -> Affine:
        return Affine(tuple(sorted((loop, c) for loop, c in terms.items() if c)), constant)

    @property
    def loops(self) -> tuple[int, ...]:
        return tuple(loop for loop, _ in self.terms)

    def coefficient(self, loop: int) -> int:
        return next((c for term_loop, c in self.terms if term_loop == loop), 0)

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for loop, c in other.terms:
            terms[loop] = terms.get(loop, 0) + c
        return Affine.of(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        return Affine.of({loop: c * factor for loop, c in self.terms}, self.constant * factor)

    def split(self, loop: int, outer: int, inner: int, inner_size: int) -> Affine:
        """With `loop` replaced by outer * inner_size + inner."""
        c = self.coefficient(loop)
        if not c:
            return self
        terms = dict(self.terms)
        del terms[loop]
        terms[outer], terms[inner] = c * inner_size, c
        return Affine.of(terms, self.constant)

    def rename(self, names: Mapping[int, int]) -> Affine:
        return Affine.of({names[loop]: c for loop, c in self.terms}, self.constant)

    def at(self, values: Mapping[int, int]) -> int:
        return self.constant + sum(c * values[loop] for loop, c in self.terms)

    def __str__(self) -> str:
        parts = [f"i{loop}" if c == 1 else f"{c}*i{loop}" for loop, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


ZERO = Affine()


def offset_of(index: Sequence[Affine], strides: Sequence[int], start: int = 0) -> Affine:
    """Position in memory, in elements, of the element at `index`."""
    total: dict[int, int] = {}
    constant = start
    for position, stride in zip(index, strides, strict=True):
        constant += position.constant * stride
        for loop, c in position.terms:
            total[loop] = total.get(loop, 0) + c * stride
    return Affine.of(total, constant)


class Straddles(Exception):
    """A loop runs across the border of two dimensions; split so that the inner part has `inner` iterations."""

    def __init__(self, loop: int, inner: int):
        super().__init__(f"loop i{loop} crosses a dimension's border; its inner part has {inner} iterations")
        self.loop, self.inner = loop, inner


def delinearize(
    offset: Affine, sizes: Mapping[int, int], shape: Sequence[int], strides: Sequence[int], start: int = 0
) -> tuple[Affine, ...] | None:
    """The index whose position in memory is `offset`: the inverse of `offset_of` for layouts without overlap.

    sizes: iterations of each loop. None where no index has that position, or the layout overlaps. Dimensions of size 1
    and those with stride 0 get index 0. Raises Straddles where a loop must be split first.
    """
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1 and strides[d] > 0), key=lambda d: -strides[d])
    inner = 0
    for d in reversed(dims):
        if strides[d] <= inner:
            return None  # elements overlap: no position has one index
        inner += (shape[d] - 1) * strides[d]
    index_terms: list[dict[int, int]] = [{} for _ in shape]
    for loop, c in offset.terms:
        if c <= 0:
            return None
        dim = next((d for d in dims if strides[d] <= c), None)
        if dim is None or c % strides[dim]:
            return None
        coefficient = c // strides[dim]
        extent = coefficient * sizes[loop]
        if extent > shape[dim]:
            # The loop leaves this dimension: its inner part stays, the outer one counts in the next dimension.
            if shape[dim] % coefficient:
                return None
            inner = shape[dim] // coefficient
            if inner <= 1 or sizes[loop] % inner:
                return None
            raise Straddles(loop, inner)
        index_terms[dim][loop] = coefficient
    if offset.constant != start:
        return None
    return tuple(Affine.of(terms) for terms in index_terms)


def row_major(loops: Iterable[tuple[int, int]]) -> Affine:
    """The running number of an iteration; loops of (number, size), the outermost first."""
    terms: dict[int, int] = {}
    step = 1
    for loop, size in reversed(list(loops)):
        terms[loop] = step
        step *= size
    return Affine.of(terms)
