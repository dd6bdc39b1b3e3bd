"""What a pass over a row leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aottrain.compiler.codegen.row_passes import is_element, store_stage
from aottrain.ir.kernels.kernel import Column, KernelIR, Level, Reduce, Store


class Work(NamedTuple):
    """The row's reductions, stores, and its part of reductions over rows by their number."""

    reductions: dict[int, Reduce]
    stores: list[Store]
    columns: dict[int, Column]


def work_of(kernel: KernelIR, levels: Sequence[Level], stages: Sequence[int], number: int) -> Work:
    """Of the pass with this number."""
    reductions = {v: i for v, i in enumerate(kernel.body) if isinstance(i, Reduce) and stages[i.value] == number}
    elements = [s for s in kernel.stores if is_element(kernel, levels, s)]
    stores = [s for s in elements if store_stage(stages, s) == number]
    columns = {k: c for k, c in enumerate(kernel.columns) if stages[c.value] == number}
    return Work(reductions, stores, columns)
