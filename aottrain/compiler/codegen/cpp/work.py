"""What a pass over a row leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from aottrain.compiler.codegen.row_passes import PassPlan, is_element, plan_passes, row_buffers, store_stage
from aottrain.ir.kernels.kernel import Column, Compute, Constant, KernelIR, Level, Load, Part, Reduce, Store
from aottrain.ir.sizes.polynomials import is_open

# What is held of a row is on the stack, and should stay in a processor's own cache: up to this many bytes of it, or of
# rows up to this many elements.
_MOST_HELD, LONGEST_BUFFER = 512 << 10, 16384


class Work(NamedTuple):
    """The row's reductions, stores, its part of reductions over rows by their number, and sums over parts of it."""

    reductions: dict[int, Reduce]
    stores: list[Store]
    columns: dict[int, Column]
    parts: dict[int, Part]


def work_of(kernel: KernelIR, levels: Sequence[Level], stages: Sequence[int], number: int) -> Work:
    """Of the pass with this number."""
    reductions = {v: i for v, i in enumerate(kernel.body) if isinstance(i, Reduce) and stages[i.value] == number}
    elements = [s for s in kernel.stores if is_element(kernel, levels, s)]
    stores = [s for s in elements if store_stage(stages, s) == number]
    columns = {k: c for k, c in enumerate(kernel.columns) if stages[c.value] == number}
    parts = {k: part for k, part in enumerate(kernel.parts) if stages[part.value] == number}
    return Work(reductions, stores, columns, parts)


def plan_row(kernel: KernelIR, single: bool) -> tuple[PassPlan, dict[int, int]]:
    """Its passes, and of what is held the buffers by value: none where a row of that does not fit into fast memory.

    single: whether the row is one loop that is done in blocks."""
    plan = plan_passes(kernel, can_hold=True)
    buffers = row_buffers(kernel, plan)
    held = sum(kernel.body[v].dtype.itemsize for v in {b: v for v, b in buffers.items()}.values())
    size = kernel.row_size
    if is_open(size):  # one loop is done in blocks, whatever its length
        fits = single or held == 0 or not size > LONGEST_BUFFER
    else:
        fits = size <= LONGEST_BUFFER or size * held <= _MOST_HELD
    return (plan, buffers) if fits else (plan_passes(kernel, can_hold=False), {})


class Skipping(NamedTuple):
    """Rows that hold one number, as those of padding do, among others that are computed."""

    kernel: KernelIR
    """It for the other rows, where nothing asks before it reads."""
    guard: int
    """The value by which a row is one of the others."""
    stores: tuple[Store, ...]
    """Of the rows that hold one number."""


def skipping_of(kernel: KernelIR, levels: Sequence[Level]) -> Skipping | None:
    """None where all rows are computed, or some read what others do not."""
    guards = {load.guard for load in kernel.body if isinstance(load, Load)}
    (guard,) = guards if len(guards) == 1 else (None,)
    if guard is None or levels[guard] is not Level.ROW or kernel.sums:
        return None
    if not any(isinstance(i, Reduce) for i in kernel.body):
        return None
    stores = []
    for store in kernel.stores:
        chosen = kernel.body[store.value]
        if not (isinstance(chosen, Compute) and chosen.op == "where" and chosen.args[0] == guard):
            return None
        if not isinstance(kernel.body[chosen.args[2]], Constant) or not is_element(kernel, levels, store):
            return None
        stores.append(replace(store, value=chosen.args[2]))
    body = tuple(replace(i, guard=None) if isinstance(i, Load) else i for i in kernel.body)
    return Skipping(replace(kernel, body=body), guard, tuple(stores))


def skip_row(
    skipping: Skipping, depth: int, out: Callable[[int, str], None], write: Callable[[int, Store], None]
) -> None:
    """Where the guard is known: a row that holds one number is filled with it, and done."""
    kernel = skipping.kernel
    inner = range(kernel.num_outer, len(kernel.ranges))
    out(depth, f"if (!v{skipping.guard}) {{")
    for loop in inner:
        out(depth + 1, f"for (i64 i{loop} = 0; i{loop} < {kernel.ranges[loop]}; i{loop}++) {{")
    for store in skipping.stores:
        write(depth + 2, store)
    out(depth + 1, "}" * len(inner))
    out(depth + 1, "continue;")
    out(depth, "}")
