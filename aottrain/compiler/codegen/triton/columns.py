"""Reductions over rows in Triton: a program's partial results, and the kernels that add them up in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aottrain.compiler.codegen.triton.index import COL, ROW, Axes, Indices
from aottrain.compiler.codegen.triton.text import STORED, folded, identity, literal, option, reduced, stored
from aottrain.compiler.codegen.triton.tiles import Tile
from aottrain.ir.kernels.kernel import Column, KernelIR
from aottrain.ir.kernels.open_sizes import size_names
from aottrain.ir.sizes.polynomials import likely, same

# Of the kernel that adds partial results: how many it adds at once, and elements of a row that one of its programs adds
# up, of which 64 bytes are read for each. It waits for memory and little else: 16 at once, of 64 elements, took ten
# microseconds on an H100, where a launch takes two. What is a sum over all elements is one program's.
_MOST_AT_ONCE, _FEWEST_AT_ONCE, _WIDTH, _EACH_THREAD = 256, 16, 16, 16
_WHOLE_AT_ONCE, _WHOLE_WARPS = 1024, 4


class Columns:
    """Writes a kernel's reductions over rows.

    A column's total is `l0` in registers, one element for each of the tile, until the program's rows are done. Where
    rows are swept they are too long for that, and where registers hold no more, partial results are added up in scratch
    memory.

    out(depth, text) writes a line. masked(value, op, axes) is a value as a full tile, without effect on the reduction
    outside of the elements.
    """

    def __init__(
        self,
        kernel: KernelIR,
        tile: Tile,
        index: Indices,
        masked: Callable[[int, str, Axes], str],
        out: Callable[[int, str], None],
    ):
        self.kernel, self.tile, self.index = kernel, tile, index
        self._masked, self._out = masked, out
        # Partial results of one program need no second kernel, unless they are too long for registers.
        self.split = bool(kernel.columns) and (not same(tile.num_programs, 1) or tile.swept)
        sums = [k for k, column in enumerate(kernel.columns) if not column.whole]
        self._held = frozenset(() if tile.swept else sums[: tile.left] if self.split else sums)

    @property
    def buffers(self) -> list[str]:
        return [f"s{k}" for k in range(len(self.kernel.columns))] if self.split else []

    @property
    def sizes(self) -> list[tuple[str, Any]]:
        """Type and elements of each scratch buffer."""
        if not self.split:
            return []
        return [
            (STORED[self._total_type(column)].removeprefix("tl."), self._num_partials(column))
            for column in self.kernel.columns
        ]

    def start(self, depth: int) -> None:
        for k, column in enumerate(self.kernel.columns):
            if self._in_registers(k, column):
                dtype = self._total_type(column)
                self._out(depth, f"l{k} = tl.full({self.index.shape}, {identity(column.op, dtype)}, {STORED[dtype]})")

    def end(self, depth: int) -> None:
        for k, column in enumerate(self.kernel.columns):
            if not self._in_registers(k, column):
                continue
            total = reduced(column.op, f"l{k}", 0)
            if not column.whole:
                total = f"{total}[None, :]"
            elif not self.tile.flat:
                total = reduced(column.op, total, 0)
            self._out(depth, f"l{k} = {total}")
            self._leave(depth, k, column)

    def _in_registers(self, k: int, column: Column) -> bool:
        return column.whole or k in self._held

    @property
    def num_held(self) -> int:
        """Sums that take the registers of a row each."""
        return len(self._held)

    def accumulate(self, depth: int, k: int, column: Column) -> None:
        """Add a tile to the program's partial result: in registers; in scratch memory where rows are swept."""
        dtype = self._total_type(column)
        over = self.index.all_axes if column.whole else frozenset({ROW})
        part = self._masked(column.value, column.op, over)
        if self._in_registers(k, column):
            self._out(depth, f"l{k} = {folded(column.op, f'l{k}', part, dtype)}")
            return
        mask = self.index.mask(frozenset({COL}))
        self._out(depth, f"at{k} = s{k} + (program * {self.kernel.row_size} + col)")
        self._out(depth, f"part{k} = {reduced(column.op, part, 0)}[None, :]")
        if not same(self.tile.rows_each, self.tile.rows):
            later = " & ".join([*([mask] if mask else []), "(step > 0)"])
            previous = f"tl.load(at{k}, mask={later}, other={identity(column.op, dtype)})"
            self._out(depth, f"part{k} = {folded(column.op, previous, f'part{k}', dtype)}")
        self._out(depth, f"tl.store(at{k}, part{k}{option('mask', mask)})")
        # The next row's tile may be laid out over the threads in another way.
        self._out(depth, "tl.debug_barrier()")

    def _leave(self, depth: int, k: int, column: Column) -> None:
        """Store a program's partial result, or the result where there is one program alone."""
        mask = "" if column.whole else option("mask", self.index.mask(frozenset({COL})))
        if not self.split:
            target = self._scalar_target(column) if column.whole else self._column_target(column)
            self._out(depth, f"tl.store({target}, {self._result(column, f'l{k}')}{mask})")
        elif column.whole:
            self._out(depth, f"tl.store(s{k} + tl.program_id(0), l{k})")
        else:
            self._out(depth, f"tl.store(s{k} + (program * {self.kernel.row_size} + col), l{k}{mask})")

    def _scalar_target(self, column: Column) -> str:
        return f"p{column.buffer} + {column.address.offset.constant}"

    def _column_target(self, column: Column) -> str:
        offset = column.address.offset
        shaped = self.index.shaped(self.index.text(offset), self.index.axes_of(offset), frozenset({COL}))
        return f"p{column.buffer} + {shaped}"

    def finish(self, name: str) -> Iterator[tuple[str, Any, int, list[str]]]:
        """The kernels that add partial results in the order of the programs: one for each column where sizes are open,
        else one for all of them."""
        columns = list(enumerate(self.kernel.columns)) if self.split else []
        alone = len(columns) == 1 or bool(size_names(self.kernel))
        first, parameters = 0, list[str]()
        branches: list[str] = []
        for k, column in columns:
            own = f"{name}_column_{k}"
            names = [f"s{k}", f"p{column.buffer}"]
            for text in ("", "", "@triton.jit", f"def {own}({', '.join([*names, *([] if alone else ['at'])])}):"):
                self._out(0, text)
            programs = self._finish_body(k, column, self.index.program if alone else "at")
            if alone:
                yield own, programs, self._finish_warps(column), names
                continue
            inside = f"(at >= {first}) & (at < {first + programs})" if first else f"at < {programs}"
            place = f"at - {first}" if first else "at"
            branches += [f"if {inside}:", f"    {own}({', '.join([*names, place])})"]
            first, parameters = first + programs, [*parameters, *names]
        if branches:
            own, parameters = f"{name}_columns", list(dict.fromkeys(parameters))
            for text in ("", "", "@triton.jit", f"def {own}({', '.join(parameters)}):"):
                self._out(0, text)
            self._out(1, f"at = {self.index.program}")
            for text in branches:
                self._out(1, text)
            yield own, first, max(map(self._finish_warps, self.kernel.columns)), parameters

    def _finish_body(self, k: int, column: Column, program: str) -> Any:
        """What each program of it does, by its number. Returns how many there are."""
        if column.whole:
            self._add_partials(k, column, self.tile.num_programs, f"[{_WHOLE_AT_ONCE}]", _WHOLE_AT_ONCE, "part", "part")
            self._out(1, f"total = {reduced(column.op, 'total', 0)}")
            self._out(1, f"tl.store({self._scalar_target(column)}, {self._result(column, 'total')})")
            return 1
        size = self.kernel.row_size
        runs = math.prod(self.kernel.ranges[: column.kept])
        for line in self.index.finish_lines(_WIDTH, runs, program):
            self._out(1, line)
        count, height = self._partials_of(runs), self._at_once(runs)
        partial = f"(run * {count} + part[:, None])" if runs > 1 else "part[:, None]"
        shape, offset = f"[{height}, {_WIDTH}]", f"({partial} * {size} + col)"
        self._add_partials(k, column, count, shape, height, "part[:, None]", offset)
        self._out(1, f"total = {reduced(column.op, 'total', 0)}[None, :]")
        self._out(1, f"tl.store({self._column_target(column)}, {self._result(column, 'total')}, mask=col < {size})")
        return runs * self.tile.derived.rounded_up("blocks", size, _WIDTH)

    def _partials_of(self, runs: int) -> Any:
        """How many partial results a sum has, of each of so many runs of rows apart."""
        return self.tile.row_programs // runs if runs > 1 else self.tile.row_programs

    def _at_once(self, runs: int) -> int:
        return min(_MOST_AT_ONCE, max(_FEWEST_AT_ONCE, 1 << (likely(self._partials_of(runs)) - 1).bit_length()))

    def _finish_warps(self, column: Column) -> int:
        if column.whole:
            return _WHOLE_WARPS
        height = self._at_once(math.prod(self.kernel.ranges[: column.kept]))
        return max(1, height * _WIDTH // (32 * _EACH_THREAD))

    def _add_partials(
        self, k: int, column: Column, count: Any, shape: str, height: int, position: str, offset: str
    ) -> None:
        dtype = self._total_type(column)
        start = identity(column.op, dtype)
        inside = f"{position} < {count}" if column.whole else f"({position} < {count}) & (col < {self.kernel.row_size})"
        self._out(1, f"total = tl.full({shape}, {start}, {STORED[dtype]})")
        self._out(1, f"for start in range(0, {count}, {height}):")
        self._out(2, f"part = start + tl.arange(0, {height})")
        partials = f"tl.load(s{k} + {offset}, mask={inside}, other={start})"
        self._out(2, f"total = {folded(column.op, 'total', partials, dtype)}")

    def _result(self, column: Column, total: str) -> str:
        dtype = self._total_type(column)
        if not same(column.divisor, 1):
            total = f"fn.div({total}, {literal(column.divisor, dtype)})"
        return stored(total, dtype, self.kernel.parameters[column.buffer].dtype)

    def _total_type(self, column: Column) -> torch.dtype:
        dtype = self.kernel.body[column.value].dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def _num_partials(self, column: Column) -> Any:
        if column.whole:
            return self.tile.num_programs
        return self.tile.row_programs * self.kernel.row_size
