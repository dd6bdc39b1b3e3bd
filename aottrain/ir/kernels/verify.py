"""verify_kernel: whether a kernel means one thing in whatever order its iterations run, and stays within its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aottrain.errors import VerificationError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import (
    Address,
    KernelIR,
    Level,
    Load,
    Store,
    affine_level,
    extent,
    levels,
    operands,
    stages,
)


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
        known = [*range(column.kept), *column.apart]
        if not column.whole and (rows != known or rows == list(column.address.offset.loops) != []):
            fail("a reduction over rows is stored at an address that depends on the row")
    for part in kernel.parts:
        loops, row = part.address.offset.loops, range(kernel.num_outer, len(kernel.ranges))
        if part.address.indirect or tuple(loops) != tuple(range(kernel.num_kept)) or kernel.num_kept not in row:
            fail("a sum over a part of a row is stored at an address that depends on that part, or on no row")
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
    sums = {each.buffer for each in kernel.sums}
    written = {store.buffer for store in kernel.stores} | sums
    stage = stages(kernel)
    for position, load in enumerate(kernel.body):
        if not isinstance(load, Load) or load.buffer not in written:
            continue
        stores = [store for store in kernel.stores if store.buffer == load.buffer]
        if len(stores) != 1 or load.buffer in sums:
            return f"parameter {load.buffer} is read, and written more than once"
        (store,) = stores
        if load.address != store.address or load.address.indirect:
            return f"v{position} reads parameter {load.buffer} at another address than its store writes"
        if not _is_injective(load.address.offset, kernel.ranges):
            return f"parameter {load.buffer} is read and written at one address by several iterations"
        if stage[store.value] or any(stage[user] for user in dependents(kernel, position)):
            return f"v{position} may be read again in a pass after parameter {load.buffer} was written"
    return ""


def dependents(kernel: KernelIR, value: int) -> set[int]:
    """The values, by their numbers, that are made of this one, and it itself."""
    found = {value}
    for position, instruction in enumerate(kernel.body):
        if found.intersection(operands(instruction)):
            found.add(position)
    return found


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
    for part in kernel.parts:
        yield part.buffer, part.address, "a sum over a part of a row"
