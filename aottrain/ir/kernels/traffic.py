"""The memory traffic of a kernel if each element that it touches moves once; twice where it is read and written.

Sizes that each call has its own of count as in the call that was traced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aottrain.ir.kernels.kernel import Address, KernelIR, Load, Position, Reduce, operands
from aottrain.ir.sizes.polynomials import likely


def moved_bytes(kernel: KernelIR) -> int:
    """Read and written."""
    read, written = moved_by_parameter(kernel)
    return sum(read) + sum(written)


def moved_by_parameter(kernel: KernelIR) -> tuple[list[int], list[int]]:
    """The bytes that are read of each parameter, and those that are written of it."""
    loads = [(load.buffer, load.address) for load in kernel.body if isinstance(load, Load)]
    stores = [(store.buffer, store.address) for store in kernel.stores]
    sums = [(each.buffer, each.address) for each in kernel.sums]
    return _touched_bytes(kernel, loads), _touched_bytes(kernel, stores + sums)


def _touched_bytes(kernel: KernelIR, accesses: Sequence[tuple[int, Address]]) -> list[int]:
    """Of each parameter the bytes of the elements at these addresses. An indirect access may touch all elements of its
    dimension, but no more than there are iterations of the loops that its indices depend on."""
    depends = _loops_of_values(kernel)
    touched = [0] * len(kernel.parameters)
    for buffer, address in dict.fromkeys(accesses):
        looked_up = math.prod(likely(size) for _, _, size in address.indirect)
        loops = frozenset(address.offset.loops)
        everything = loops.union(*(depends[value] for value, _, _ in address.indirect))
        iterations, steps = (math.prod(likely(kernel.ranges[loop]) for loop in each) for each in (everything, loops))
        touched[buffer] += min(looked_up * steps, iterations)
    return [min(n, likely(p.span)) * p.dtype.itemsize for n, p in zip(touched, kernel.parameters, strict=True)]


def _loops_of_values(kernel: KernelIR) -> list[frozenset[int]]:
    """The loops along which each value changes."""
    outer, loops = frozenset(range(kernel.num_outer)), list[frozenset[int]]()
    for instruction in kernel.body:
        found = frozenset[int]().union(*(loops[value] for value in operands(instruction)))
        if isinstance(instruction, Load | Position):
            offset = instruction.address.offset if isinstance(instruction, Load) else instruction.offset
            found = found.union(offset.loops)
        loops.append(found & outer if isinstance(instruction, Reduce) else found)
    return loops
