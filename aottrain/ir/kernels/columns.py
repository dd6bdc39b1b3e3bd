"""What a kernel adds up over its rows: in which order C++ goes through them, and the memory that a thread needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.alignment import aligned
from aottrain.ir.kernels.kernel import Address, Column, Instruction, KernelIR, Load, Position
from aottrain.ir.sizes.polynomials import is_open, likely

# Results that a thread has all of: in its second cache, with those of a block.
MOST_APART = 1 << 15


def scratch_bytes(kernel: KernelIR) -> int:
    """Memory that one run needs for partial sums, for each thread."""
    kernel = by_memory(kernel)
    return sum(column_bytes(kernel, column) for column in kernel.columns)


def moved(kernel: KernelIR, ranges: tuple[int, ...], num_outer: int, change: Callable[[Affine], Affine]) -> KernelIR:
    """Over other loops, in which each position is as `change` says."""

    def placed(address: Address) -> Address:
        return replace(address, offset=change(address.offset))

    def changed(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Load):
            return replace(instruction, address=placed(instruction.address))
        if isinstance(instruction, Position):
            return replace(instruction, offset=change(instruction.offset))
        return instruction

    return replace(
        kernel,
        ranges=ranges,
        num_outer=num_outer,
        body=tuple(map(changed, kernel.body)),
        stores=tuple(replace(store, address=placed(store.address)) for store in kernel.stores),
        columns=tuple(replace(column, address=placed(column.address)) for column in kernel.columns),
        parts=tuple(replace(part, address=placed(part.address)) for part in kernel.parts),
    )


def steps(kernel: KernelIR) -> dict[int, int]:
    """How far each loop moves in memory, in the access that covers the most loops; results before operands."""
    affines = [store.address.offset for store in kernel.stores]
    affines += [load.address.offset for load in kernel.body if isinstance(load, Load)]
    affines += [position.offset for position in kernel.body if isinstance(position, Position)]
    found: dict[int, int] = {}
    for position in sorted(affines, key=lambda position: -len(position.terms)):
        for loop, c in position.terms:
            found.setdefault(loop, abs(likely(c)))
    return found


def by_memory(kernel: KernelIR) -> KernelIR:
    """For C++, where columns keep loops that are not the first ones in memory: rows one after the other as they lie
    there, added to results that a thread has all of, as those of each head are. Else the kernel as it is."""
    kept = max((column.kept for column in kernel.columns), default=0)
    if not kept or is_open(*kernel.ranges) or math.prod(kernel.ranges[:kept]) * kernel.row_size > MOST_APART:
        return kernel
    far, outer = steps(kernel), range(kernel.num_outer)
    order = sorted(outer, key=lambda loop: -far.get(loop, 0))
    across = max((far.get(loop, 0) for loop in range(kernel.num_outer, len(kernel.ranges))), default=0)
    if order == list(outer) or across >= far.get(order[-1], 0):
        return kernel
    numbers = {loop: place for place, loop in enumerate(order)}
    ranges = (*(kernel.ranges[loop] for loop in order), *kernel.ranges[kernel.num_outer :])

    def change(position: Affine) -> Affine:
        return Affine.of({numbers.get(loop, loop): c for loop, c in position.terms}, position.constant)

    changed = moved(kernel, ranges, kernel.num_outer, change)
    columns = (replace(c, kept=0, apart=tuple(sorted(numbers[i] for i in range(c.kept)))) for c in changed.columns)
    return replace(changed, columns=tuple(columns))


def column_bytes(kernel: KernelIR, column: Column) -> int:
    """Of a thread's results: its own, that of a block of rows and, where rows are kept apart, of what another began."""
    return (3 if column.kept else 2) * partial_bytes(kernel, column)


def rows_of_one(kernel: KernelIR, column: Column) -> int:
    """The rows that a result is of."""
    return math.prod(kernel.ranges[column.kept : kernel.num_outer])


def partial_bytes(kernel: KernelIR, column: Column) -> int:
    """Of one partial result, at eight bytes an element."""
    return aligned(8 * column_size(kernel, column))


def column_size(kernel: KernelIR, column: Column) -> int:
    """How many numbers a thread adds up for it."""
    return math.prod(kernel.ranges[i] for i in column.apart) * (1 if column.whole else kernel.row_size)
