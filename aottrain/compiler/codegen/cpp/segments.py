"""Loops over elements cut where a comparison of their position with a number changes its answer.

A concatenation, padding or window tests the position of each element. Within a segment the result of each test is
constant. What is left is a loop without branches, which compilers vectorise.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, Instruction, KernelIR, Level, Load, Position, extent
from aottrain.ir.sizes.polynomials import is_open

_ORDERS: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
# More segments are more code than what they save.
_MOST_SEGMENTS = 6
_MOST_CONDITIONS = 4


@dataclass(frozen=True)
class Segment:
    """Iterations of the innermost loop from start to stop."""

    start: int
    stop: int
    answers: Mapping[int, bool] = field(default_factory=dict)
    """The comparisons that have the same answer in all of them, and that answer."""


def cut_segments(kernel: KernelIR, values: Sequence[int]) -> list[Segment]:
    """The innermost loop in segments. values: what it computes."""
    last = len(kernel.ranges) - 1
    size = kernel.ranges[last]
    if is_open(size):
        return [Segment(0, size)]
    answers = {value: answer for value in values if (answer := _answer_by_iteration(kernel, value, last)) is not None}
    borders = {0, size}
    for answer in answers.values():
        borders.add(_first_other(answer, size))
    if len(borders) > _MOST_SEGMENTS + 1:
        return [Segment(0, size)]
    return [
        Segment(start, stop, {value: answer(start) for value, answer in answers.items()})
        for start, stop in pairwise(sorted(borders))
    ]


def _first_other(answer: Callable[[int], bool], size: int) -> int:
    """The first iteration with another answer than the first one; the number of iterations where there is none."""
    return bisect_left(range(size), True, key=lambda i: answer(i) != answer(0))


def _answer_by_iteration(kernel: KernelIR, value: int, last: int) -> Callable[[int], bool] | None:
    """For a comparison of a position in the innermost loop with a number: its answer at each iteration."""
    instruction = kernel.body[value]
    if not isinstance(instruction, Compute) or instruction.op not in _ORDERS:
        return None
    position, limit = (kernel.body[v] for v in instruction.args)
    if not isinstance(position, Position) or not isinstance(limit, Constant) or position.offset.loops != (last,):
        return None
    step, start = position.offset.coefficient(last), position.offset.constant
    if is_open(step, start):
        return None
    order, number = instruction.op, int(limit.value)
    return lambda i: _ORDERS[order](step * i + start, number)


def is_uniform(kernel: KernelIR, value_levels: Sequence[Level], answers: Mapping[int, bool], value: int) -> bool:
    """Whether a value is the same for all elements of a segment."""
    if value_levels[value] is not Level.ELEMENT or value in answers:
        return True
    instruction = kernel.body[value]
    return isinstance(instruction, Compute) and all(
        is_uniform(kernel, value_levels, answers, v) for v in instruction.args
    )


def address_in_any_case(
    kernel: KernelIR, value_levels: Sequence[Level], load: Instruction, segment: Segment | None
) -> tuple[Address, Affine] | None:
    """The address of a load whose guard, and what it is looked up by, are the same for all elements of a segment, in
    two parts: the one that is constant in a row, and the one that changes within it.

    Where the guard is false the second part alone is read. None where that may lie outside the buffer, and for others.
    """
    if segment is None or not isinstance(load, Load) or load.guard is None:
        return None
    looked_up = [value for value, _, _ in load.address.indirect]
    if not all(is_uniform(kernel, value_levels, segment.answers, value) for value in (load.guard, *looked_up)):
        return None
    if is_open(*kernel.ranges):
        return None
    offset = load.address.offset
    moving = Affine.of({loop: c for loop, c in offset.terms if loop >= kernel.num_outer}, 0)
    rest = Affine.of({loop: c for loop, c in offset.terms if loop < kernel.num_outer}, offset.constant)
    last = len(kernel.ranges) - 1
    low, high = extent(moving, kernel.ranges)
    step = moving.coefficient(last)
    if step > 0:
        low, high = low + step * segment.start, high - step * (kernel.ranges[last] - segment.stop)
    span = kernel.parameters[load.buffer].span
    sound = not is_open(low, high, span) and low >= 0 and high < span
    return (Address(rest, load.address.indirect), moving) if sound else None


def conditions_of(kernel: KernelIR, value_levels: Sequence[Level], values: Sequence[int]) -> list[int]:
    """What the elements of a loop are chosen by that is known of the row, the last choice first: in a chain of choices
    it decides. Nothing where there are more than loops are worth. values: what the loop computes."""
    choices = [i for v in reversed(values) if isinstance(i := kernel.body[v], Compute) and i.op == "where"]
    conditions = dict.fromkeys(choice.args[0] for choice in choices if value_levels[choice.args[0]] is Level.ROW)
    return list(conditions) if len(conditions) <= _MOST_CONDITIONS else []


def once_for_each(indent: str, conditions: Sequence[int], loop: Sequence[str]) -> list[str]:
    """A loop, once for each of the conditions as the first of them that holds, and once where none does: so it computes
    nothing that is not chosen. Its lines, where there are none."""
    if not conditions:
        return list(loop)
    lines = []
    for place, value in enumerate([*conditions, None]):
        known = {before: "false" for before in conditions[:place]} | ({} if value is None else {value: "true"})
        head = "} else {" if value is None else ("} else " * bool(place)) + f"if (v{value}) {{"
        lines += [indent + head, *(f"{indent}  const bool v{v} = {answer};" for v, answer in known.items())]
        lines += ["  " + line for line in loop]
    return [*lines, indent + "}"]
