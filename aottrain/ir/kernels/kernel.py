"""KernelIR: one fused loop nest as a value that can be printed, verified, run in plain torch, and rendered.

A kernel iterates over outer loops (rows: independent, run in parallel) and inner loops (one row). Its body is a list
of instructions in single-assignment form; a value is a number, its position in the body. A value lives at a level:
it is one number per kernel (CONSTANT), per row (ROW) or per element (ELEMENT). Reductions over a row turn elements into
a row's value that later instructions of the same row may read: a softmax or a norm is one kernel. Reductions over the
rows (`Column`) have no reader in the kernel: they are stored when all rows are done, or all of a sequence, an image.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeGuard

import torch

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.shown import Shown

DRAWS = ("philox", "philox_normal")
"""Ops of random numbers, uniform and normal: of a seed, the number of a draw and that of an element."""


class Level(IntEnum):
    CONSTANT = 0
    ROW = 1
    ELEMENT = 2


@dataclass(frozen=True)
class Address:
    """Element position in a buffer: affine, plus `stride * value` for indices that are themselves values."""

    offset: Affine
    indirect: tuple[tuple[int, int, int], ...] = ()
    """(value, stride, size): a negative index counts from `size`, as in eager."""

    def __str__(self) -> str:
        return " + ".join([str(self.offset), *(f"{stride}*v{value}" for value, stride, _ in self.indirect)])


@dataclass(frozen=True)
class Load:
    """An element of a parameter."""

    buffer: int
    address: Address
    dtype: torch.dtype
    guard: int | None = None
    """A boolean value: where it is false nothing is read, and `other` is the result."""
    other: float | int | bool = 0


@dataclass(frozen=True)
class Constant:
    value: float | int | bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Position:
    """An affine function of the loops as an int64 value."""

    offset: Affine
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Compute:
    """One arithmetic operation, rounded to its dtype. All operands of arithmetic have the type that it is done in."""

    op: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce:
    """The sum, product, maximum or minimum over the inner loops: a ROW value. NaN wins in max and min, as in eager."""

    op: str  # sum | prod | max | min | argmax | argmin
    value: int
    dtype: torch.dtype


Instruction = Load | Constant | Position | Compute | Reduce


@dataclass(frozen=True)
class Store:
    buffer: int
    address: Address
    value: int


@dataclass(frozen=True)
class Column:
    """Reduce `value` over rows, and store the result at an address in the inner loops and those that are kept."""

    op: str  # sum | max | min | prod
    buffer: int
    address: Address
    value: int
    dtype: torch.dtype
    whole: bool = False
    """Reduce over the inner loops, too: the result is one number."""
    divisor: int = 1
    """What the result is divided by in the end, for means."""
    kept: int = 0
    """How many of the first loops have a result for each of their iterations, as the sequences of a batch. They are
    outer ones; the rows of one iteration follow each other."""
    apart: tuple[int, ...] = ()
    """In C++ alone, instead of these (see `by_memory`): outer loops anywhere that have a result for each iteration. A
    thread has all results, and adds each row to those that it is of."""


@dataclass(frozen=True)
class Part:
    """Sum `value` over the last of a row's loops, and store each result at an address in the other loops: of each
    channel, where a row is a group of channels. No instruction reads it."""

    buffer: int
    address: Address
    value: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Parameter:
    """A buffer that the kernel takes."""

    name: str
    """Of the graph's value."""
    dtype: torch.dtype
    written: bool
    """A written buffer may be read as well: each element by the iteration that writes it, before it does (an update in
    place, which `verify_kernel` checks)."""
    span: int
    """Elements from its start that are touched."""


@dataclass(frozen=True)
class KernelIR(Shown):
    """One fused loop nest."""

    name: str
    ranges: tuple[int, ...]
    """Iterations of each loop."""
    num_outer: int
    """How many of the first loops are those over rows."""
    parameters: tuple[Parameter, ...]
    body: tuple[Instruction, ...]
    stores: tuple[Store, ...]
    columns: tuple[Column, ...]
    sources: tuple[str, ...] = ()
    """The graph's calls that it does, as "node = op  # file:line", for the header of the generated code."""
    parts: tuple[Part, ...] = ()
    """In C++ alone."""

    @property
    def num_rows(self) -> int:
        return math.prod(self.ranges[: self.num_outer])

    @property
    def row_size(self) -> int:
        return math.prod(self.ranges[self.num_outer :])

    @property
    def sums(self) -> tuple[Column | Part, ...]:
        """What is complete only when several elements are done, and has no reader in the kernel."""
        return *self.columns, *self.parts

    @property
    def results(self) -> tuple[Store | Column | Part, ...]:
        """All that is written."""
        return *self.stores, *self.columns, *self.parts

    @property
    def num_kept(self) -> int:
        """How many of the first loops have a result of each `Part`; all of them where there is none."""
        kept = [1 + max(part.address.offset.loops, default=-1) for part in self.parts]
        return max([self.num_outer, *kept]) if kept else len(self.ranges)

    def __str__(self) -> str:
        return "\n".join(_text(self)) + "\n"


def draw_numbers(kernel: KernelIR) -> tuple[int, ...]:
    """The numbers of the random draws that it makes. They are arguments of a call, so that the dropouts of all blocks
    are one function."""
    constants = [kernel.body[value] for value in draw_constants(kernel)]
    return tuple(int(constant.value) for constant in constants if isinstance(constant, Constant))


def made_of(kernel: KernelIR) -> Hashable:
    """Equal for two kernels that are there only where they are made of the same objects but for names and the numbers
    of draws, as those that were lowered once for several blocks: then they are one function."""
    draws = draw_constants(kernel)
    body = tuple(-1 if value in draws else id(instruction) for value, instruction in enumerate(kernel.body))
    others = tuple(map(id, kernel.results))
    parameters = tuple((each.dtype, each.written, id(each.span)) for each in kernel.parameters)
    return id(kernel.ranges), kernel.num_outer, parameters, body, others, tuple(draws)


def is_draw(instruction: Instruction) -> TypeGuard[Compute]:
    """Whether it is an element of a random draw."""
    return isinstance(instruction, Compute) and instruction.op in DRAWS


def is_run(kernel: KernelIR, value: int) -> bool:
    """Whether these are draws of consecutive elements of the row, which are made for a whole row at once."""
    instruction = kernel.body[value]
    if not is_draw(instruction):
        return False
    element = kernel.body[instruction.args[2]]
    last = len(kernel.ranges) - 1
    return (
        isinstance(element, Position)
        and len(kernel.ranges) - kernel.num_outer == 1
        and element.offset.coefficient(last) == 1
    )


def draw_constants(kernel: KernelIR) -> list[int]:
    """The constants that are added to the offset of a state to number a draw."""
    constants: dict[int, None] = {}
    for instruction in kernel.body:
        if is_draw(instruction):
            number = kernel.body[instruction.args[1]]
            if isinstance(number, Compute) and number.op == "add":
                constants.update((v, None) for v in number.args if isinstance(kernel.body[v], Constant))
    return list(constants)


def operands(instruction: Instruction) -> tuple[int, ...]:
    """The values that an instruction reads."""
    if isinstance(instruction, Compute):
        return instruction.args
    if isinstance(instruction, Reduce):
        return (instruction.value,)
    if isinstance(instruction, Load):
        guard = () if instruction.guard is None else (instruction.guard,)
        return (*(value for value, _, _ in instruction.address.indirect), *guard)
    return ()


def affine_level(offset: Affine, num_outer: int) -> Level:
    if any(loop >= num_outer for loop in offset.loops):
        return Level.ELEMENT
    return Level.ROW if offset.terms else Level.CONSTANT


def is_natural(kernel: KernelIR, value: int) -> bool:
    """Whether it is known to be negative in no iteration, so that as an index it counts from the start."""
    instruction = kernel.body[value]
    if isinstance(instruction, Position):
        return extent(instruction.offset, kernel.ranges)[0] >= 0
    if isinstance(instruction, Constant):
        return instruction.value >= 0
    if not isinstance(instruction, Compute) or instruction.op not in ("div", "fmod", "checked", "where"):
        return False
    if instruction.op != "where":
        return all(is_natural(kernel, v) for v in instruction.args)
    test, negative, other = instruction.args  # as `Builder.checked` asks for indices that do not count from the end
    condition = kernel.body[test]
    is_below = isinstance(condition, Compute) and condition.op == "lt" and condition.args[0] == other
    return is_below and is_natural(kernel, condition.args[1]) and is_natural(kernel, negative)  # type: ignore[union-attr]


def levels(kernel: KernelIR) -> list[Level]:
    """The level of each value."""
    value_levels: list[Level] = []
    for instruction in kernel.body:
        if isinstance(instruction, Reduce):
            value_levels.append(Level.ROW)
            continue
        level = max((value_levels[value] for value in operands(instruction)), default=Level.CONSTANT)
        if isinstance(instruction, Load):
            level = max(level, affine_level(instruction.address.offset, kernel.num_outer))
        elif isinstance(instruction, Position):
            level = affine_level(instruction.offset, kernel.num_outer)
        value_levels.append(level)
    return value_levels


def stages(kernel: KernelIR) -> list[int]:
    """For each value the number of passes over the row that must be done before it is known."""
    value_stages: list[int] = []
    for instruction in kernel.body:
        stage = max((value_stages[value] for value in operands(instruction)), default=0)
        value_stages.append(stage + isinstance(instruction, Reduce))
    return value_stages


def extent(offset: Affine, ranges: Sequence[int]) -> tuple[int, int]:
    """Smallest and largest value over all iterations."""
    low = high = offset.constant
    for loop, c in offset.terms:
        step = c * (ranges[loop] - 1)
        low, high = low + min(step, 0), high + max(step, 0)
    return low, high


def _text(kernel: KernelIR) -> Iterator[str]:
    rows = " x ".join(map(str, kernel.ranges[: kernel.num_outer])) or "1"
    row = " x ".join(map(str, kernel.ranges[kernel.num_outer :])) or "1"
    yield f"{kernel.name}: {rows} rows of {row}"
    for source in kernel.sources:
        yield f"  # {source}"
    names = [f"p{i}" for i in range(len(kernel.parameters))]
    read = {instruction.buffer for instruction in kernel.body if isinstance(instruction, Load)}
    for number, (name, parameter) in enumerate(zip(names, kernel.parameters, strict=True)):
        direction = ("inout" if number in read else "out") if parameter.written else "in"
        yield f"  {name}: {direction} {_dtype(parameter.dtype)}[{parameter.span}] {parameter.name}"
    for position, (instruction, level) in enumerate(zip(kernel.body, levels(kernel), strict=True)):
        yield f"  v{position}: {_dtype(instruction.dtype)} {level.name.lower()} = {_expression(instruction, names)}"
    for store in kernel.stores:
        yield f"  {names[store.buffer]}[{store.address}] = v{store.value}"
    for column in kernel.columns:
        over = "all" if column.whole else "rows"
        over += f" of each i{', i'.join(map(str, range(column.kept)))}" if column.kept else ""
        yield f"  {names[column.buffer]}[{column.address}] = {column.op} over {over} of v{column.value}"
    for part in kernel.parts:
        over = f"i{', i'.join(map(str, range(kernel.num_kept, len(kernel.ranges))))}"
        yield f"  {names[part.buffer]}[{part.address}] = sum over {over} of v{part.value}"


def _expression(instruction: Instruction, names: list[str]) -> str:
    if isinstance(instruction, Load):
        guard = "" if instruction.guard is None else f" if v{instruction.guard} else {instruction.other}"
        return f"{names[instruction.buffer]}[{instruction.address}]{guard}"
    if isinstance(instruction, Constant):
        return repr(instruction.value)
    if isinstance(instruction, Position):
        return str(instruction.offset)
    if isinstance(instruction, Reduce):
        return f"{instruction.op} over the row of v{instruction.value}"
    return f"{instruction.op}({', '.join(f'v{value}' for value in instruction.args)})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
