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

import torch

from aottrain.errors import VerificationError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.alignment import aligned
from aottrain.ir.shown import Shown


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

    @property
    def num_rows(self) -> int:
        return math.prod(self.ranges[: self.num_outer])

    @property
    def row_size(self) -> int:
        return math.prod(self.ranges[self.num_outer :])

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
    others = tuple(map(id, (*kernel.stores, *kernel.columns)))
    parameters = tuple((each.dtype, each.written, id(each.span)) for each in kernel.parameters)
    return id(kernel.ranges), kernel.num_outer, parameters, body, others, tuple(draws)


def draw_constants(kernel: KernelIR) -> list[int]:
    """The constants that are added to the offset of a state to number a draw."""
    constants: dict[int, None] = {}
    for instruction in kernel.body:
        if isinstance(instruction, Compute) and instruction.op == "philox":
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


def verify_kernel(kernel: KernelIR) -> None:
    """Raises VerificationError for a value read before it is computed, a reduction of a row's value, an address outside
    its parameter, a value per element stored once per row, or an update in place of which the order would matter."""

    def fail(text: str) -> None:
        raise VerificationError(f"kernel {kernel.name}: {text}")

    for position, instruction in enumerate(kernel.body):
        if any(value >= position for value in operands(instruction)):
            fail(f"v{position} reads a value that is not computed yet")
    value_levels = levels(kernel)
    for buffer, address, reader in _accesses(kernel):
        low, high = extent(address.offset, kernel.ranges)
        high += sum(stride * (size - 1) for _, stride, size in address.indirect)
        if low < 0 or high >= kernel.parameters[buffer].span:
            fail(
                f"{reader} reaches {low}..{high} of the {kernel.parameters[buffer].span} elements of parameter {buffer}"
            )
    for column in kernel.columns:
        rows = [loop for loop in column.address.offset.loops if loop < kernel.num_outer]
        if not column.whole and (rows != list(range(column.kept)) or rows == list(column.address.offset.loops) != []):
            fail("a reduction over rows is stored at an address that depends on the row")
    for store in kernel.stores:
        many = value_levels[store.value] is Level.ELEMENT or kernel.num_rows > 1
        if many and value_levels[store.value] > _store_level(store, value_levels, kernel):
            fail(f"v{store.value} has one value per element but is stored once per row")
    if text := _mistake_in_place(kernel):
        fail(text)


def _mistake_in_place(kernel: KernelIR) -> str:
    """What makes an update in place depend on the order of iterations; empty where nothing does.

    A buffer that is both read and written is read in the pass that writes it and at the same address, and no two
    iterations have one address in common: so each element is read by the iteration that writes it alone.
    """
    written = {store.buffer for store in kernel.stores} | {column.buffer for column in kernel.columns}
    stage = stages(kernel)
    for position, load in enumerate(kernel.body):
        if not isinstance(load, Load) or load.buffer not in written:
            continue
        stores = [store for store in kernel.stores if store.buffer == load.buffer]
        if len(stores) != 1 or any(column.buffer == load.buffer for column in kernel.columns):
            return f"parameter {load.buffer} is read, and written more than once"
        (store,) = stores
        if load.address != store.address or load.address.indirect:
            return f"v{position} reads parameter {load.buffer} at another address than its store writes"
        if not _is_injective(load.address.offset, kernel.ranges):
            return f"parameter {load.buffer} is read and written at one address by several iterations"
        if stage[store.value] or any(stage[user] for user in _descendants(kernel, position)):
            return f"v{position} may be read again in a pass after parameter {load.buffer} was written"
    return ""


def _descendants(kernel: KernelIR, value: int) -> set[int]:
    dependents = {value}
    for position, instruction in enumerate(kernel.body):
        if dependents.intersection(operands(instruction)):
            dependents.add(position)
    return dependents


def _is_injective(offset: Affine, ranges: Sequence[int]) -> bool:
    """Whether no two iterations of all loops have one value in common: each loop steps over those inside it."""
    reach = 0
    strides = {loop: abs(c) for loop, c in offset.terms}
    if any(size > 1 and loop not in strides for loop, size in enumerate(ranges)):
        return False
    for step, loop in sorted((c, loop) for loop, c in strides.items() if ranges[loop] > 1):
        if step <= reach:
            return False
        reach += step * (ranges[loop] - 1)
    return True


def _store_level(store: Store, value_levels: list[Level], kernel: KernelIR) -> Level:
    level = affine_level(store.address.offset, kernel.num_outer)
    return max([level, *(value_levels[value] for value, _, _ in store.address.indirect)])


def _accesses(kernel: KernelIR) -> Iterator[tuple[int, Address, str]]:
    """Without guarded loads, whose address may lie outside where they are not done."""
    for position, instruction in enumerate(kernel.body):
        if isinstance(instruction, Load) and instruction.guard is None:
            yield instruction.buffer, instruction.address, f"v{position}"
    for store in kernel.stores:
        yield store.buffer, store.address, "a store"
    for column in kernel.columns:
        yield column.buffer, column.address, "a column"


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


def scratch_bytes(kernel: KernelIR) -> int:
    """Memory that one run needs for partial sums, for each thread."""
    return sum(column_bytes(kernel, column) for column in kernel.columns)


def column_bytes(kernel: KernelIR, column: Column) -> int:
    """Of a thread's results: its own, that of a block of rows and, where rows are kept apart, of what another began."""
    return (3 if column.kept else 2) * partial_bytes(kernel, column)


def rows_of_one(kernel: KernelIR, column: Column) -> int:
    """The rows that a result is of."""
    return math.prod(kernel.ranges[column.kept : kernel.num_outer])


def partial_bytes(kernel: KernelIR, column: Column) -> int:
    """Of one partial result, at eight bytes an element."""
    return aligned(8 * (1 if column.whole else kernel.row_size))
