"""Values that a call computes where it reads them: what is read instead, and the call's rule with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from aottrain.compiler.lowering import Builder, Operand, Rule
from aottrain.compiler.lowering.builder import place_at
from aottrain.compiler.lowering.rules import Values
from aottrain.compiler.schedule.grouping.view_index import Term, View
from aottrain.ir.kernels.affine import ZERO, Affine


@dataclass(frozen=True)
class Read:
    """An operand of what is computed that stays one."""

    operand: Operand
    dims: tuple[int | None, ...]
    """Of the computed value's dimensions that which indexes each of the operand's."""


@dataclass(frozen=True)
class Made:
    """A value that is computed where it is read."""

    rule: Rule
    dims: tuple[int | None, ...]
    """As in Read."""
    view: View
    """How it is read through a view."""
    parts: tuple[Made | Read, ...]


def read_for(made: Iterable[Made]) -> list[Operand]:
    """What is read for values that are computed."""
    found: list[Operand] = []
    stack: list[Made | Read] = list(made)
    while stack:
        part = stack.pop(0)
        if isinstance(part, Read):
            found.append(part.operand)
        else:
            stack = [*part.parts, *stack]
    return found


def with_made(rule: Rule, made: Mapping[fx.Node, Made]) -> Rule:
    """The rule with operands that it computes itself."""
    operands: list[Operand] = []
    numbers: dict[int, int] = {}  # of those that are kept

    def number(operand: Operand) -> int:
        if operand not in operands:
            operands.append(operand)
        return operands.index(operand)

    for place, operand in enumerate(rule.operands):
        if operand.node in made:
            for leaf in read_for([made[operand.node]]):
                number(leaf)
        else:
            numbers[place] = number(operand)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        values: list[int] = []
        computed: dict[int, Callable[..., int]] = {}
        for place, operand in enumerate(rule.operands):
            if place in numbers:
                values.append(v[numbers[place]])
            elif operand.free:
                computed[-1 - place] = _Computed(made[operand.node], operands, v)
                values.append(-1 - place)
            else:
                values.append(_Computed(made[operand.node], operands, v)(b, (), ()))
        with b.computing(computed):
            return rule.formula(b, values)

    return replace(rule, operands=tuple(operands), formula=formula)


@dataclass(frozen=True)
class _Computed:
    """Computes an element of a value for `Builder.load`."""

    made: Made
    operands: Sequence[Operand]
    values: Values

    def __call__(
        self,
        b: Builder,
        index: Sequence[Affine],
        indirect: Sequence[tuple[int, int]],
        guard: int | None = None,
        other: float | int | bool = 0,
    ) -> int:
        places = list(index)
        for dim, value in indirect:
            places[dim] = places[dim] + place_at(value)
        with b.computing({}, guard=guard):
            value = self._element(b, self.made, places)
        return value if guard is None else b.compute("where", guard, value, b.constant(other, b.dtype(value)))

    def _element(self, b: Builder, made: Made, index: Sequence[Affine]) -> int:
        position = [
            sum((_part_of(b, index[term.dim], term) * term.step for term in terms), Affine((), start))
            for terms, start in made.view
        ]
        values: list[int] = []
        computed: dict[int, Callable[..., int]] = {}
        for place, (operand, part) in enumerate(zip(made.rule.operands, made.parts, strict=True)):
            inner = [ZERO if d is None else position[d] for d in part.dims]
            if isinstance(part, Read):
                known = self.values[self.operands.index(part.operand)]
                is_value = operand.free or not part.operand.free
                values.append(known if is_value else b.load(known, inner))
            elif operand.free:
                computed[-1 - place] = replace(self, made=part)
                values.append(-1 - place)
            else:
                values.append(self._element(b, part, inner))
        with b.computing(computed, position):
            return made.rule.formula(b, values)[0]


def _part_of(b: Builder, place: Affine, term: Term) -> Affine:
    """What an index says of one of the dimensions that it runs through."""
    if not term.is_split:
        return place
    value = b.at(place)
    if term.every != 1:
        value = b.compute("div", value, b.constant(term.every, torch.int64))
    if term.times is not None:
        value = b.compute("fmod", value, b.constant(term.times, torch.int64))
    return place_at(value)
