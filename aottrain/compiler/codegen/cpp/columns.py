"""Reductions over rows in C++: each thread's rows in blocks, the blocks in its scratch memory, the threads in order."""

from __future__ import annotations

from collections.abc import Callable

from aottrain.compiler.codegen.cpp.text import COMPUTED, affine_text, folded, identity, to_stored
from aottrain.ir.kernels.alignment import CACHE_LINE
from aottrain.ir.kernels.kernel import Column, KernelIR, partial_bytes

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
        self._totals(depth)
        self._out(depth, f"for (i64 block = begin; block < end; block += {_BLOCK_ROWS}) {{")
        self._out(depth + 1, f"const i64 stop = block + {_BLOCK_ROWS} < end ? block + {_BLOCK_ROWS} : end;")
        for k, column in enumerate(self.kernel.columns):
            kind, size = COMPUTED[column.dtype], self._size(column)
            if size <= _LONGEST_LOCAL:
                self._out(depth + 1, f"alignas({CACHE_LINE}) {kind} l{k}[{size}];")
            start = identity(column.op, column.dtype)
            self._out(depth + 1, f"for (i64 j = 0; j < {size}; j++) l{k}[j] = {start};")
        return depth + 2

    def _totals(self, depth: int) -> None:
        offset = 0
        for k, column in enumerate(self.kernel.columns):
            kind, size = COMPUTED[column.dtype], self._size(column)
            padded = partial_bytes(self.kernel, column)
            address = f"scratch + {offset} * num_threads + thread * {2 * padded}"
            self._out(depth, f"{kind}* __restrict const t{k} = ({kind}*)({address});")
            if size > _LONGEST_LOCAL:
                self._out(depth, f"{kind}* __restrict const l{k} = ({kind}*)({address} + {padded});")
            start = identity(column.op, column.dtype)
            self._out(depth, f"for (i64 j = 0; j < {size}; j++) t{k}[j] = {start};")
            offset += 2 * padded

    def end(self, depth: int, parallel: bool) -> None:
        """Close the loop over blocks, and add up what the threads have."""
        if not self.kernel.columns:
            return
        for k, column in enumerate(self.kernel.columns):
            combine = folded(column.op, f"t{k}[j]", f"l{k}[j]")
            self._out(depth + 1, f"for (i64 j = 0; j < {self._size(column)}; j++) {{ {combine} }}")
        self._out(depth, "}")
        if parallel:
            self._out(depth, "#pragma omp barrier")
        offset = 0
        for column in self.kernel.columns:
            self._finish(depth, column, offset)
            offset += 2 * partial_bytes(self.kernel, column)

    def _finish(self, depth: int, column: Column, offset: int) -> None:
        kind, size = COMPUTED[column.dtype], self._size(column)
        self._out(depth, f"for (i64 j = {size} * thread / threads; j < {size} * (thread + 1) / threads; j++) {{")
        self._out(depth + 1, f"{kind} total = {identity(column.op, column.dtype)};")
        self._out(depth + 1, "for (i64 t = 0; t < threads; t++) {")
        address = f"scratch + {offset} * num_threads + t * {2 * partial_bytes(self.kernel, column)}"
        self._out(depth + 2, f"const {kind} part = (({kind}*)({address}))[j];")
        self._out(depth + 2, folded(column.op, "total", "part"))
        self._out(depth + 1, "}")
        if not column.whole:
            step = self.kernel.row_size
            for loop in range(self.kernel.num_outer, len(self.kernel.ranges)):
                step //= self.kernel.ranges[loop]
                part = "j" if step == 1 else f"j / {step}"
                self._out(depth + 1, f"const i64 i{loop} = {part} % {self.kernel.ranges[loop]};")
        result = "total" if column.divisor == 1 else f"total / ({kind}){column.divisor}"
        target = f"p{column.buffer}[{affine_text(column.address.offset)}]"
        self._out(depth + 1, f"{target} = {to_stored(self.kernel.parameters[column.buffer].dtype, result)};")
        self._out(depth, "}")

    def _size(self, column: Column) -> int:
        return 1 if column.whole else self.kernel.row_size
