"""Reductions over rows in C++: each thread's rows in blocks, the blocks in its scratch memory, the threads in order.

Where a column keeps some of the loops over rows, a run is the rows of one of its results, as those of a sequence. A
block lies within one run. A thread stores the results of runs that are all its own. Of a run that another thread began
it leaves its part as h{k}, of one that it begins and another ends as t{k}; these are added up in the end. Where it
keeps loops in another order than theirs, a thread has a result of each of their iterations, and m{k} is a row's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from aottrain.compiler.codegen.cpp.text import (
    COMPUTED,
    STORED,
    affine_text,
    decoded,
    folded,
    identity,
    to_stored,
)
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.alignment import CACHE_LINE
from aottrain.ir.kernels.columns import column_bytes, column_size, partial_bytes, rows_of_one
from aottrain.ir.kernels.kernel import Column, KernelIR
from aottrain.ir.sizes.polynomials import is_open

# Rows whose partial result is added up on its own: keeps errors small.
_BLOCK_ROWS = 64
# A block's partial result of rows up to this length is in local arrays, which the compiler keeps in registers.
_LONGEST_LOCAL = 64


class Columns:
    """Writes a kernel's reductions over rows. out(depth, text) writes a line; `first` and `last` bound the row loop."""

    def __init__(self, kernel: KernelIR, out: Callable[[int, str], None]):
        self.kernel, self._out = kernel, out
        self.first, self.last = ("block", "stop") if kernel.columns else ("begin", "end")

    def start(self, depth: int) -> int:
        """Open the loop over blocks, where there are columns. Returns the depth of what is done for each row.

        Column k of a thread is t{k}, a block's part of it l{k}."""
        if not self.kernel.columns:
            return depth + 1
        self.totals(depth)
        runs = sorted({rows_of_one(self.kernel, column) for column in self.kernel.columns if column.kept})
        ranges = self.kernel.ranges
        rows = _BLOCK_ROWS * max(math.prod(ranges[loop] for loop in column.apart) for column in self.kernel.columns)
        step = "block = stop" if runs else f"block += {rows}"
        self._out(depth, f"for (i64 block = begin{', stop' * bool(runs)}; block < end; {step}) {{")
        stop = f"stop = block + {rows} < end ? block + {rows} : end;"
        self._out(depth + 1, stop if runs else f"const i64 {stop}")
        for run in runs:
            self._out(depth + 1, f"if (stop > (block / {run} + 1) * {run}) stop = (block / {run} + 1) * {run};")
        self.parts(depth + 1)
        return depth + 2

    def row(self, depth: int) -> None:
        """The results that a row is added to, where its loops say which."""
        for k, column in enumerate(self.kernel.columns):
            if column.apart:
                place = affine_text(Affine.of({i: c for i, c in self._loops(column).items() if i in column.apart}))
                self._out(depth, f"{COMPUTED[column.dtype]}* __restrict const m{k} = l{k} + {place};")

    def name(self, k: int) -> str:
        """Of the array of a row's results."""
        return f"m{k}" if self.kernel.columns[k].apart else f"l{k}"

    def parts(self, depth: int) -> None:
        """Those of a block, with nothing added up yet."""
        for k, column in enumerate(self.kernel.columns):
            kind, size = COMPUTED[column.dtype], self._size(column)
            if not is_open(size) and size <= _LONGEST_LOCAL:
                self._out(depth, f"alignas({CACHE_LINE}) {kind} l{k}[{size}];")
            self._start(depth, f"l{k}", column)

    def totals(self, depth: int) -> None:
        """Those of the thread."""
        offset = 0
        for k, column in enumerate(self.kernel.columns):
            kind, size = COMPUTED[column.dtype], self._size(column)
            padded = partial_bytes(self.kernel, column)
            whole = column_bytes(self.kernel, column)
            address = f"scratch + {offset} * num_threads + thread * {whole}"
            self._out(depth, f"{kind}* __restrict const t{k} = ({kind}*)({address});")
            if is_open(size) or size > _LONGEST_LOCAL:
                self._out(depth, f"{kind}* __restrict const l{k} = ({kind}*)({address} + {padded});")
            if column.kept:
                self._out(depth, f"{kind}* __restrict const h{k} = ({kind}*)({address} + {2 * padded});")
            self._start(depth, f"t{k}", column)
            offset += whole

    def _start(self, depth: int, name: str, column: Column) -> None:
        """Nothing is added up yet."""
        size, start = self._size(column), identity(column.op, column.dtype)
        loop = f"start_columns({name}, {size});" if self._is_called(column) else ""
        self._out(depth, loop or f"for (i64 j = 0; j < {size}; j++) {name}[j] = {start};")

    def _is_called(self, column: Column) -> bool:
        """Whether functions of the library go over its parts, which a compiler then compiles once for all columns; a
        short part stays in registers only where it is handed to none."""
        size = self._size(column)
        return column.op == "sum" and (is_open(size) or size > _LONGEST_LOCAL)

    def end(self, depth: int, parallel: bool) -> None:
        """Close the loop over blocks, and add up what the threads have."""
        if not self.kernel.columns:
            return
        for k, column in enumerate(self.kernel.columns):
            self._add(depth + 1, k, column)
            if column.kept:
                self._end_of_run(depth + 1, k, column)
        self._out(depth, "}")
        if parallel:
            self._out(depth, "#pragma omp barrier")
        offset = 0
        for column in self.kernel.columns:
            (self._finish_runs if column.kept else self._finish)(depth, column, offset)
            offset += column_bytes(self.kernel, column)

    def _add(self, depth: int, k: int, column: Column) -> None:
        """A block's part to the thread's."""
        combine, size = folded(column.op, f"t{k}[j]", f"l{k}[j]"), self._size(column)
        loop = f"add_columns(t{k}, l{k}, {size});" if self._is_called(column) else ""
        self._out(depth, loop or f"for (i64 j = 0; j < {size}; j++) {{ {combine} }}")

    def end_whole_runs(self, depth: int) -> None:
        """Close a loop over blocks that are all of one run, and store its results."""
        for k, column in enumerate(self.kernel.columns):
            self._add(depth + 1, k, column)
        self._out(depth, "}")
        for k, column in enumerate(self.kernel.columns):
            self._out(depth, f"for (i64 j = 0; j < {self._size(column)}; j++) {{")
            self._store(depth + 1, column, f"t{k}[j]")
            self._out(depth, "}")

    def _end_of_run(self, depth: int, k: int, column: Column) -> None:
        """After a block: what the thread has of the run, where it has no more rows of it."""
        size, rows = self._size(column), rows_of_one(self.kernel, column)
        self._out(depth, f"if (stop % {rows} == 0 || stop == end) {{")
        self._out(depth + 1, f"const i64 run = block / {rows};")
        self._out(depth + 1, f"if (run * {rows} < begin) {{")
        self._out(depth + 2, f"for (i64 j = 0; j < {size}; j++) h{k}[j] = t{k}[j];")
        self._out(depth + 1, f"}} else if (stop % {rows} == 0) {{")
        self._out(depth + 2, f"for (i64 j = 0; j < {size}; j++) {{")
        self._store(depth + 3, column, f"t{k}[j]")
        self._out(depth + 2, "}")
        self._out(depth + 1, "}")
        self._out(depth + 1, "if (stop < end)")
        self._start(depth + 2, f"t{k}", column)
        self._out(depth, "}")

    def _finish_runs(self, depth: int, column: Column, offset: int) -> None:
        """The runs that several threads have a part of, each found at the thread that begins it."""
        kind, size, rows = COMPUTED[column.dtype], self._size(column), rows_of_one(self.kernel, column)
        padded, whole = partial_bytes(self.kernel, column), column_bytes(self.kernel, column)
        all_rows = self.kernel.num_rows
        self._out(depth, "for (i64 t = 0; t < threads; t++) {")
        self._out(depth + 1, f"const i64 first = {all_rows} * t / threads, after = {all_rows} * (t + 1) / threads;")
        self._out(depth + 1, f"const i64 run = (after - 1) / {rows}, border = (run + 1) * {rows};")
        self._out(depth + 1, f"if (first == after || after == border || run * {rows} < first) continue;")
        self._out(depth + 1, f"for (i64 j = {size} * thread / threads; j < {size} * (thread + 1) / threads; j++) {{")
        address = f"scratch + {offset} * num_threads"
        self._out(depth + 2, f"{kind} total = (({kind}*)({address} + t * {whole}))[j];")
        self._out(depth + 2, f"for (i64 u = t + 1; u < threads && {all_rows} * u / threads < border; u++) {{")
        self._out(depth + 3, f"if ({all_rows} * u / threads == {all_rows} * (u + 1) / threads) continue;")
        self._out(depth + 3, f"const {kind} part = (({kind}*)({address} + u * {whole} + {2 * padded}))[j];")
        self._out(depth + 3, folded(column.op, "total", "part"))
        self._out(depth + 2, "}")
        self._store(depth + 2, column, "total")
        self._out(depth + 1, "}")
        self._out(depth, "}")

    def _finish(self, depth: int, column: Column, offset: int) -> None:
        kind, size = COMPUTED[column.dtype], self._size(column)
        first, after = f"{size} * thread / threads", f"{size} * (thread + 1) / threads"
        if self._is_called(column):
            parts = f"scratch + {offset} * num_threads"
            rest = f"{parts}, {column_bytes(self.kernel, column)}, threads, {first}, {after}"
            if self._is_copied(column):
                target = f"p{column.buffer} + {column.address.offset.constant}"
                self._out(depth, f"sum_columns({target}, {rest});")
                return
            self._out(depth, f"sum_columns(({kind}*)({parts}), {rest});")
            self._out(depth, f"for (i64 j = {first}; j < {after}; j++) {{")
            self._store(depth + 1, column, f"(({kind}*)({parts}))[j]")
            self._out(depth, "}")
            return
        self._out(depth, f"for (i64 j = {first}; j < {after}; j++) {{")
        self._out(depth + 1, f"{kind} total = {identity(column.op, column.dtype)};")
        self._out(depth + 1, "for (i64 t = 0; t < threads; t++) {")
        address = f"scratch + {offset} * num_threads + t * {column_bytes(self.kernel, column)}"
        self._out(depth + 2, f"const {kind} part = (({kind}*)({address}))[j];")
        self._out(depth + 2, folded(column.op, "total", "part"))
        self._out(depth + 1, "}")
        self._store(depth + 1, column, "total")
        self._out(depth, "}")

    def _is_copied(self, column: Column) -> bool:
        """Whether its results lie in memory as the sums lie in scratch memory."""
        dtype = self.kernel.parameters[column.buffer].dtype
        in_order = affine_text(Affine(column.address.offset.terms)) == affine_text(Affine.of(self._loops(column)))
        return in_order and column.divisor == 1 and STORED[dtype] == COMPUTED[column.dtype]

    def _store(self, depth: int, column: Column, total: str) -> None:
        """Of element j of a row and, where loops over rows are kept, of a run."""
        kind = COMPUTED[column.dtype]
        for text in decoded("run", [f"i{loop}" for loop in range(column.kept)], self.kernel.ranges[: column.kept]):
            self._out(depth, text)
        for loop, step in reversed(self._loops(column).items()):
            part = "j" if step == 1 else f"j / {step}"
            self._out(depth, f"const i64 i{loop} = {part} % {self.kernel.ranges[loop]};")
        result = total if column.divisor == 1 else f"{total} / ({kind}){column.divisor}"
        target = f"p{column.buffer}[{affine_text(column.address.offset)}]"
        self._out(depth, f"{target} = {to_stored(self.kernel.parameters[column.buffer].dtype, result)};")

    def _size(self, column: Column) -> int:
        return column_size(self.kernel, column)

    def _loops(self, column: Column) -> dict[int, int]:
        """Those of which it has a result for each iteration, each with how many results lie between two of these."""
        found, step = dict[int, int](), 1
        inner = range(self.kernel.num_outer, len(self.kernel.ranges))
        for loop in reversed([*column.apart, *(() if column.whole else inner)]):
            found[loop], step = step, step * self.kernel.ranges[loop]
        return found
