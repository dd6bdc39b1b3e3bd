"""simplified: a kernel without instructions that its results do not need, and without roundings that change nothing.

Operators of low precision are computed in float32, and each rounds its result. A value that was read as bfloat16, or
chosen among such values, is not changed by it. A comparison with a number does not need its operand rounded either:
rounding keeps the order, so what it makes of a value lies below the number where the value lies below a bound.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from aottrain.ir.kernels.kernel import Address, Compute, Constant, Instruction, KernelIR, Load, Reduce, operands
from aottrain.ir.kernels.numbers import LOW_PRECISION, held

_INFINITE = 0x7F800000  # the bits of float32's infinity
_NO_HALF = frozenset[torch.dtype]()
_AT_MOST = ("le", "gt")  # comparisons that ask whether a value is at most a number, and whether it is below one
_BELOW = ("lt", "ge")


def simplified(kernel: KernelIR) -> KernelIR:
    """It, with the same results to the last bit; what is not a number may be another such one."""
    kernel = _without_dead(_with_body(kernel, *_without_held(kernel.body)))
    return _without_dead(_compared_unrounded(kernel))


def rewired(instruction: Instruction, numbers: Mapping[int, int]) -> Instruction:
    """It, of values that have other numbers."""
    if isinstance(instruction, Load):
        indirect = tuple((numbers[value], stride, size) for value, stride, size in instruction.address.indirect)
        guard = None if instruction.guard is None else numbers[instruction.guard]
        return replace(instruction, address=Address(instruction.address.offset, indirect), guard=guard)
    if isinstance(instruction, Compute):
        return replace(instruction, args=tuple(numbers[value] for value in instruction.args))
    return replace(instruction, value=numbers[instruction.value]) if isinstance(instruction, Reduce) else instruction


def _without_dead(kernel: KernelIR) -> KernelIR:
    live = [False] * len(kernel.body)
    stack = [each.value for each in kernel.results]
    while stack:
        value = stack.pop()
        if not live[value]:
            live[value] = True
            stack.extend(operands(kernel.body[value]))
    numbers: dict[int, int] = {}
    body: list[Instruction] = []
    for position, instruction in enumerate(kernel.body):
        if live[position]:
            numbers[position] = len(body)
            body.append(rewired(instruction, numbers))
    return _with_body(kernel, body, numbers)


def _with_body(kernel: KernelIR, body: Sequence[Instruction], numbers: Mapping[int, int]) -> KernelIR:
    """numbers: what the values of the results are called in the new body."""
    stores = tuple(replace(store, value=numbers[store.value]) for store in kernel.stores)
    columns = tuple(replace(column, value=numbers[column.value]) for column in kernel.columns)
    parts = tuple(replace(part, value=numbers[part.value]) for part in kernel.parts)
    return replace(kernel, body=tuple(body), stores=stores, columns=columns, parts=parts)


def _without_held(body: Sequence[Instruction]) -> tuple[list[Instruction], dict[int, int]]:
    """A body of as many instructions, and the value that each of the old ones is: roundings of values that their type
    holds are those values, and a choice of the larger one is compared as the value that it is made of."""
    new: list[Instruction] = []
    halves: list[frozenset[torch.dtype]] = []  # for each value, the types that hold it as it is
    numbers: dict[int, int] = {}
    for position, instruction in enumerate(body):
        instruction = rewired(instruction, numbers)
        if isinstance(instruction, Compute) and instruction.op in _AT_MOST:
            instruction = replace(instruction, args=(_unbounded(new, *instruction.args), instruction.args[1]))
        new.append(instruction)
        halves.append(_halves_of(instruction, new, halves))
        rounds = _rounding(new, position)
        numbers[position] = rounds[0] if rounds and rounds[1] in halves[rounds[0]] else position
    return new, numbers


def _halves_of(
    instruction: Instruction, body: Sequence[Instruction], halves: Sequence[frozenset[torch.dtype]]
) -> frozenset[torch.dtype]:
    """The types of low precision that hold a value of float32 as it is."""
    if instruction.dtype is not torch.float32:
        return _NO_HALF
    if isinstance(instruction, Constant):
        return _halves_with(instruction.value)
    if not isinstance(instruction, Compute):
        return _NO_HALF
    if instruction.op == "cast":
        source = body[instruction.args[0]].dtype
        return frozenset(LOW_PRECISION) if source is torch.bool else frozenset({source}).intersection(LOW_PRECISION)
    if instruction.op in ("where", "neg", "abs"):
        return frozenset.intersection(*(halves[value] for value in instruction.args[-2:]))
    return _NO_HALF


@cache
def _halves_with(number: float) -> frozenset[torch.dtype]:
    """The types of low precision that hold a number as float32 does; zero of either sign is held by all."""
    own = repr(held(number, torch.float32))  # NaN is not equal to itself
    return frozenset(half for half in LOW_PRECISION if repr(held(number, half)) == own)


def _rounding(body: Sequence[Instruction], value: int) -> tuple[int, torch.dtype] | None:
    """What a value of float32 was before it was brought to a type of low precision and back, and that type."""
    wide = body[value]
    if not isinstance(wide, Compute) or wide.op != "cast" or wide.dtype is not torch.float32:
        return None
    half = body[wide.args[0]]
    if not isinstance(half, Compute) or half.op != "cast" or half.dtype not in LOW_PRECISION:
        return None
    source = half.args[0]
    return (source, half.dtype) if body[source].dtype is torch.float32 else None


def _unbounded(body: Sequence[Instruction], value: int, number: int) -> int:
    """Where a value, or a bound that it is below, is compared with a number no less than the bound: the value. Both
    are at most the number, or neither is; what is not a number stays so."""
    larger, limit = body[value], body[number]
    if not isinstance(larger, Compute) or larger.op != "where" or not isinstance(limit, Constant):
        return value
    condition, low, other = larger.args
    below, bound = body[condition], body[low]
    if not isinstance(below, Compute) or below.op != "lt" or below.args != (other, low):
        return value
    return other if isinstance(bound, Constant) and bound.value <= limit.value else value


def _compared_unrounded(kernel: KernelIR) -> KernelIR:
    """With comparisons of the values themselves, where nothing else needs them rounded."""
    readers: dict[int, list[int]] = {}
    for position, instruction in enumerate(kernel.body):
        for value in operands(instruction):
            readers.setdefault(value, []).append(position)
    written = {each.value for each in kernel.results}
    unrounded: dict[int, tuple[int, torch.dtype]] = {}
    for value in range(len(kernel.body)):
        rounds = _rounding(kernel.body, value)
        if rounds is None or written.intersection((value, *operands(kernel.body[value]))):
            continue
        (narrow,) = operands(kernel.body[value])
        if len(readers[narrow]) == 1 and all(_compares(kernel.body, reader, value) for reader in readers[value]):
            unrounded[value] = rounds
    if not unrounded:
        return kernel
    body: list[Instruction] = []
    numbers: dict[int, int] = {}
    for position, instruction in enumerate(kernel.body):
        rewritten = rewired(instruction, numbers)
        if isinstance(instruction, Compute) and instruction.args and instruction.args[0] in unrounded:
            source, half = unrounded[instruction.args[0]]
            number = kernel.body[instruction.args[1]]
            assert isinstance(number, Constant)
            limit = float(held(number.value, torch.float32))  # 0.49999999999 is 0.5, which a half may be
            body.append(Constant(_bound(instruction.op, limit, half), torch.float32))
            rewritten = replace(instruction, args=(numbers[source], len(body) - 1))
        numbers[position] = len(body)
        body.append(rewritten)
    return _with_body(kernel, body, numbers)


def _compares(body: Sequence[Instruction], reader: int, value: int) -> bool:
    """Whether an instruction asks on which side of a number the value lies."""
    instruction = body[reader]
    if not isinstance(instruction, Compute) or instruction.op not in _AT_MOST + _BELOW or instruction.args[0] != value:
        return False
    number = body[instruction.args[1]]
    return isinstance(number, Constant) and number.value == number.value


@cache
def _bound(op: str, number: float, half: torch.dtype) -> float:
    """What values of float32 compare with as their roundings do with the number: the largest one that is rounded to no
    more than it, or the smallest one that is rounded to no less."""

    def lies_below(bits: int) -> bool:
        rounded = held(_of_bits(bits), half)
        return rounded <= number if op in _AT_MOST else rounded < number

    low, high = -_INFINITE - 1, _INFINITE  # the largest below lies between: at low, or before high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if lies_below(middle) else (low, middle - 1)
    return _of_bits(low if op in _AT_MOST else low + 1)


def _of_bits(bits: int) -> float:
    """The number of float32 whose place in their order this is: 0 is 0.0, and -1 the largest one below."""
    size = struct.unpack("<f", struct.pack("<I", abs(bits)))[0]
    return float(-size if bits < 0 else size)
