"""What the formula of a lowering rule writes a kernel's body with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import required_spec as spec
from aottrain.ir.kernels.affine import ZERO, Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, Instruction, Load, Position, Reduce
from aottrain.ir.kernels.numbers import held
from aottrain.ir.sizes.polynomials import Polynomial


@dataclass
class Builder:
    """Writes a kernel's body; equal instructions become one value."""

    body: list[Instruction] = field(default_factory=list)
    index: Sequence[Affine] = ()
    """The domain's position: for each dimension an affine function of the loops."""
    resolve: Callable[[fx.Node, Sequence[Affine]], tuple[int, Affine]] | None = None
    """Of an element of a free operand, by node and index: the buffer, and the position in it."""
    free: Mapping[int, fx.Node] = field(default_factory=dict)
    """The free operands, by their positions."""
    row_size: int = 1
    computed: Mapping[int, Callable[..., int]] = field(default_factory=dict)
    """For operands that are computed where they are read, by their positions, what `load` does instead."""
    guard: int | None = None
    """Where it is false nothing is to be loaded: what is computed is not read there."""
    _numbers: dict[Instruction, int] = field(default_factory=dict)
    """The value of each instruction of the body."""

    def emit(self, instruction: Instruction) -> int:
        # Constants that compare equal may differ: 0.0 and -0.0, True and 1.
        key: Any = instruction
        if isinstance(instruction, Constant):
            key = (repr(instruction.value), instruction.dtype)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.body)
            self.body.append(instruction)
        return number

    def dtype(self, value: int) -> torch.dtype:
        return self.body[value].dtype

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> int:
        """A number of a type; an integer that is too large for it wraps, as eager's do."""
        if isinstance(value, Polynomial):
            return self.cast(self.emit(Position(Affine((), value))), dtype)
        if dtype is torch.bool or dtype.is_floating_point:
            return self.emit(Constant(bool(value) if dtype is torch.bool else float(value), dtype))
        limits = torch.iinfo(dtype)
        return self.emit(Constant((int(value) - limits.min) % (1 << limits.bits) + limits.min, dtype))

    def compute(self, op: str, *args: int, dtype: torch.dtype | None = None) -> int:
        """An operation on values of one type; the result has that type unless told otherwise."""
        return self.emit(Compute(op, args, dtype or self.dtype(args[-1])))

    def compare(self, op: str, a: int, b: int) -> int:
        return self.compute(op, a, b, dtype=torch.bool)

    def cast(self, value: int, dtype: torch.dtype) -> int:
        if self.dtype(value) is dtype:
            return value
        instruction = self.body[value]
        if (
            isinstance(instruction, Constant)
            and instruction.dtype is not torch.bool
            and dtype in (torch.float32, torch.float64)
        ):
            return self.constant(float(held(instruction.value, instruction.dtype)), dtype)
        return self.compute("cast", value, dtype=dtype)

    def checked(self, value: int, size: int, from_end: bool = True) -> int:
        """An index into `size` elements; negative ones count from the end, or are outside as well. The kernel reports
        one that is outside."""
        if not from_end:
            negative = self.compare("lt", value, self.constant(0, torch.int64))
            value = self.compute("where", negative, self.constant(size, torch.int64), value)
        return self.compute("checked", value, self.constant(size, torch.int64), dtype=torch.int64)

    def require(self, flag: int, value: int) -> int:
        """The value. The kernel reports a flag that is false, as it does an index outside of what it indexes."""
        zero, one = (self.constant(number, torch.int64) for number in (0, 1))
        index = self.compute("checked", self.compute("where", flag, zero, one), one, dtype=torch.int64)
        return self.compute("where", self.compare("eq", index, zero), value, value)

    def reduce(self, op: str, value: int, dtype: torch.dtype | None = None) -> int:
        """Over the row."""
        return self.emit(Reduce(op, value, dtype or self.dtype(value)))

    def position(self, dim: int) -> int:
        """The index in a dimension of the domain, as int64."""
        return self.at(self.index[dim])

    def at(self, place: Affine) -> int:
        """A place that is affine in the loops, or in values (`place_at`), as int64."""
        plain, values = _apart(place)
        if not values or plain != ZERO:
            values = [(self.emit(Position(plain)), 1), *values]
        terms = [self._times(value, factor) for value, factor in values]
        return reduce(lambda total, term: self.compute("add", total, term), terms)

    def _times(self, value: int, factor: int) -> int:
        return value if factor == 1 else self.compute("mul", value, self.constant(factor, torch.int64))

    def both(self, guard: int | None, other: int | None) -> int | None:
        """Where both are true; None is true everywhere."""
        if guard is None or other is None or guard == other:
            return other if guard is None else guard
        return self.compute("and", guard, other)

    @contextmanager
    def computing(
        self,
        computed: Mapping[int, Callable[..., int]],
        index: Sequence[Affine] | None = None,
        guard: int | None = None,
    ) -> Iterator[None]:
        """While a formula is written, these of its operands are computed, as (builder, index, indirect, guard, other)
        says, instead of loaded; at another index of the domain, and where the guard is true alone, if that is told."""
        before = self.computed, self.index, self.guard
        self.computed, self.guard = computed, self.both(self.guard, guard)
        self.index = self.index if index is None else index
        yield
        self.computed, self.index, self.guard = before

    def load(
        self,
        operand: int,
        index: Sequence[Affine],
        indirect: Sequence[tuple[int, int]] = (),
        guard: int | None = None,
        other: float | int | bool = 0,
    ) -> int:
        """An element of a free operand at an affine index; `indirect` adds (dimension, value) to it. Where guard is
        false the result is `other`."""
        if operand in self.computed:
            return self.computed[operand](self, index, indirect, guard, other)
        assert self.resolve is not None
        node = self.free[operand]
        looked_up = {dim: self.at(place) for dim, place in enumerate(index) if _apart(place)[1]}
        buffer, offset = self.resolve(node, [ZERO if dim in looked_up else place for dim, place in enumerate(index)])
        source = spec(node)
        # Along one element nothing moves. But the load needs the value: what is wrong with an index is reported.
        steps = tuple(
            (value, source.stride[dim] if source.shape[dim] > 1 else 0, source.shape[dim])
            for dim, value in (*indirect, *looked_up.items())
        )
        return self.emit(Load(buffer, Address(offset, steps), source.dtype, self.both(self.guard, guard), other))


def place_at(value: int) -> Affine:
    """The place that a value of a kernel's body says, as a term of an index: values are the numbers below 0."""
    return Affine(((-1 - value, 1),))


def _apart(place: Affine) -> tuple[Affine, list[tuple[int, int]]]:
    """What of a place loops say, and the values that are in it, (number, factor)."""
    plain = Affine(tuple(term for term in place.terms if term[0] >= 0), place.constant)
    return plain, [(-1 - number, factor) for number, factor in place.terms if number < 0]
