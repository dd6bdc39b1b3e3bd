"""The C++ text of a row's reductions: a running result for the row, and one for each innermost loop, in vectors.

A sum over a part of a row has the same: `t` for the part, `u` for an innermost loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from aottrain.compiler.codegen.cpp.text import (
    COMPUTED,
    address_text,
    combined,
    identity,
    rounded,
    to_stored,
    tracks_nan,
)
from aottrain.compiler.codegen.cpp.work import Work
from aottrain.ir.kernels.kernel import KernelIR, Reduce


def start(work: Work) -> Iterator[str]:
    """Of the row."""
    for value, reduce in work.reductions.items():
        yield f"{COMPUTED[reduce.dtype]} a{value} = {identity(reduce.op, reduce.dtype)};"
        if tracks_nan(reduce):
            yield f"int n{value} = 0;"


def start_loop(work: Work) -> Iterator[str]:
    """Of an innermost loop."""
    for value, reduce in work.reductions.items():
        yield f"{COMPUTED[reduce.dtype]} b{value} = {identity(reduce.op, reduce.dtype)};"
    for k, part in work.parts.items():
        yield f"{COMPUTED[part.dtype]} u{k} = 0;"


def clauses(work: Work) -> Iterator[str]:
    """For OpenMP, of an innermost loop."""
    for value, reduce in work.reductions.items():
        sign = {"sum": "+", "prod": "*"}.get(reduce.op, reduce.op)
        yield f"reduction({sign}:b{value})"
        if tracks_nan(reduce):
            yield f"reduction(|:n{value})"
    for k in work.parts:
        yield f"reduction(+:u{k})"


def accumulate(work: Work, running: str) -> Iterator[str]:
    """An element. running: what the names of running results begin with."""
    for value, reduce in work.reductions.items():
        yield combined(reduce.op, f"{running}{value}", f"v{reduce.value}")
        if tracks_nan(reduce):
            yield f"n{value} |= v{reduce.value} != v{reduce.value};"
    for k, part in work.parts.items():
        yield combined("sum", f"u{k}", f"v{part.value}")


def join(work: Work) -> Iterator[str]:
    """An innermost loop's result to the row's, and to the part's."""
    for value, reduce in work.reductions.items():
        yield combined(reduce.op, f"a{value}", f"b{value}")
    for k in work.parts:
        yield combined("sum", f"t{k}", f"u{k}")


def end(value: int, reduce: Reduce) -> str:
    """Of the row."""
    kind = COMPUTED[reduce.dtype]
    total = rounded(reduce.dtype, f"a{value}")
    if tracks_nan(reduce):
        nan = '__builtin_nan("")' if kind == "double" else '__builtin_nanf("")'
        total = f"n{value} ? {nan} : {total}"
    return f"const {kind} v{value} = {total};"


def start_parts(kernel: KernelIR, work: Work, loop: int) -> list[str]:
    """Before a loop, where it is the first of those that parts are summed over."""
    parts = work.parts.items() if loop == kernel.num_kept else ()
    return [f"{COMPUTED[part.dtype]} t{k} = 0;" for k, part in parts]


def end_parts(kernel: KernelIR, work: Work, loop: int) -> Iterator[str]:
    """After it: each sum is stored."""
    for k, part in work.parts.items() if loop == kernel.num_kept else ():
        text = to_stored(kernel.parameters[part.buffer].dtype, f"t{k}")
        yield f"p{part.buffer}[{address_text(kernel, part.address)}] = {text};"
