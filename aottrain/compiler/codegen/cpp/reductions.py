"""The C++ text of a row's reductions: a running result for the row, and one for each innermost loop, in vectors."""

from __future__ import annotations

from collections.abc import Iterator

from aottrain.compiler.codegen.cpp.text import COMPUTED, combined, identity, rounded, tracks_nan
from aottrain.ir.kernels.kernel import Reduce


def start(value: int, reduce: Reduce) -> Iterator[str]:
    """Of the row."""
    yield f"{COMPUTED[reduce.dtype]} a{value} = {identity(reduce.op, reduce.dtype)};"
    if tracks_nan(reduce):
        yield f"int n{value} = 0;"


def start_part(value: int, reduce: Reduce) -> str:
    """Of an innermost loop."""
    return f"{COMPUTED[reduce.dtype]} b{value} = {identity(reduce.op, reduce.dtype)};"


def clauses(value: int, reduce: Reduce) -> Iterator[str]:
    """For OpenMP, of an innermost loop."""
    sign = {"sum": "+", "prod": "*"}.get(reduce.op, reduce.op)
    yield f"reduction({sign}:b{value})"
    if tracks_nan(reduce):
        yield f"reduction(|:n{value})"


def accumulate(value: int, reduce: Reduce, running: str) -> Iterator[str]:
    yield combined(reduce.op, running, f"v{reduce.value}")
    if tracks_nan(reduce):
        yield f"n{value} |= v{reduce.value} != v{reduce.value};"


def join(value: int, reduce: Reduce) -> str:
    """An innermost loop's result to the row's."""
    return combined(reduce.op, f"a{value}", f"b{value}")


def end(value: int, reduce: Reduce) -> str:
    kind = COMPUTED[reduce.dtype]
    total = rounded(reduce.dtype, f"a{value}")
    if tracks_nan(reduce):
        nan = '__builtin_nan("")' if kind == "double" else '__builtin_nanf("")'
        total = f"n{value} ? {nan} : {total}"
    return f"const {kind} v{value} = {total};"
