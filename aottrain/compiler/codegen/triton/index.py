"""Indices of a tile: the variables along its dimensions, the loops as parts of them, and masks."""

from __future__ import annotations

import math

from aottrain.compiler.codegen.triton.tiles import Tile, affines
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.open_sizes import divides
from aottrain.ir.sizes.polynomials import same

Axes = frozenset[str]
ROW, COL, INDEX = "row", "col", "index"


class Indices:
    """Loops are digits of a number along each of the tile's dimensions: of the row's and the element's, or, flat, of
    one. Neighbouring loops that a position steps over as over one longer loop are read as one: `i0_2` is loops 0 to 2.
    """

    def __init__(self, kernel: KernelIR, tile: Tile):
        self.kernel, self.tile = kernel, tile
        rank, outer = len(kernel.ranges), kernel.num_outer
        self.loops = {INDEX: range(rank)} if tile.flat else {ROW: range(outer), COL: range(outer, rank)}
        self.counts = {axis: math.prod(kernel.ranges[loop] for loop in loops) for axis, loops in self.loops.items()}
        self.names = tuple(self.loops)
        self.all_axes: Axes = frozenset(self.names)
        self.shape = f"[{tile.width}]" if tile.flat else f"[{tile.rows}, {tile.width}]"
        used = affines(kernel)
        self.runs = {axis: sorted({run for p in used for run, _ in self._runs(p, axis)}) for axis in self.loops}

    def axes_of(self, position: Affine) -> Axes:
        used = [loop for loop, _ in position.terms if not same(self.kernel.ranges[loop], 1)]
        return frozenset(axis for axis, loops in self.loops.items() if any(loop in loops for loop in used))

    def text(self, position: Affine) -> str:
        parts = []
        for axis in self.names:
            for run, c in self._runs(position, axis):
                name = self._name(axis, run)
                parts.append(name if same(c, 1) else f"{c} * {name}")
        if position.constant or not parts:
            parts.append(str(position.constant))
        return " + ".join(parts)

    def shaped(self, offset: str, axes: Axes, target: Axes) -> str:
        """An offset that varies along `axes` as one with the dimensions that `target` has as well."""
        more = [name for name in self.names if name in target - axes]
        text = " + ".join([offset, *(f"{name} * 0" for name in more)])
        return f"({text})" if " " in text else text

    def _runs(self, position: Affine, axis: str) -> list[tuple[tuple[int, int], int]]:
        """(first and last loop, coefficient of the last) of each run of loops that count as one."""
        ranges = self.kernel.ranges
        runs: list[tuple[tuple[int, int], int]] = []
        for loop in self.loops[axis]:
            c = position.coefficient(loop)
            if same(c, 0) or same(ranges[loop], 1):
                continue
            if runs:
                (first, last), before = runs[-1]
                # Loops of one iteration between them do not count.
                skipped = all(same(ranges[between], 1) for between in range(last + 1, loop))
                if skipped and same(before, c * ranges[loop]):
                    runs[-1] = (first, loop), c
                    continue
            runs.append(((loop, loop), c))
        return runs

    def _step_and_size(self, axis: str, run: tuple[int, int]) -> tuple[int, int]:
        """(step, size): the run's number is index // step % size."""
        ranges, last = self.kernel.ranges, self.loops[axis][-1]
        step = math.prod(ranges[run[1] + 1 : last + 1])
        return step, math.prod(ranges[run[0] : run[1] + 1])

    def _name(self, axis: str, run: tuple[int, int]) -> str:
        step, size = self._step_and_size(axis, run)
        if same(step, 1) and same(size, self.counts[axis]):
            return axis
        return f"i{run[0]}" if run[0] == run[1] else f"i{run[0]}_{run[1]}"

    def _parts(self, axis: str) -> list[str]:
        lines = []
        for run in self.runs[axis]:
            step, size = self._step_and_size(axis, run)
            name = self._name(axis, run)
            if name == axis:
                continue
            text = axis if same(step, 1) else f"{axis} // {step}"
            lines.append(f"{name} = {text}" + ("" if same(step * size, self.counts[axis]) else f" % {size}"))
        return lines

    def mask(self, axes: Axes) -> str:
        """Where there is an element along these axes; empty where there always is."""
        return " & ".join(f"{axis}_mask" for axis in self.names if axis in axes and self._is_masked(axis))

    def _is_masked(self, axis: str) -> bool:
        tile = self.tile
        if axis == ROW:
            return not same(tile.row_programs * tile.rows_each, self.counts[axis])
        return not divides(tile.width, self.counts[axis])

    def _mask_line(self, axis: str) -> list[str]:
        return [f"{axis}_mask = {axis} < {self.counts[axis]}"] if self._is_masked(axis) else []

    @property
    def program(self) -> str:
        """The number of the program."""
        return "tl.program_id(0).to(tl.int64)" if self.tile.wide else "tl.program_id(0)"

    def flat_lines(self) -> list[str]:
        width = self.tile.width
        return [
            f"first = {self.program} * {width}",
            f"index = first + tl.arange(0, {width})",
            *self._mask_line(INDEX), *self._parts(INDEX),
        ]  # fmt: skip

    def program_lines(self) -> list[str]:
        """The program's place: `program` among the rows, `part` along them."""
        tile = self.tile
        if same(tile.width_programs, 1):
            return [f"program = {self.program}"]
        return [
            f"program = {self.program} // {tile.width_programs}",
            f"part = {self.program} % {tile.width_programs}",
        ]

    def row_lines(self, step: str | None) -> list[str]:
        tile = self.tile
        if tile.runs > 1:
            return self._rows_of_run(step)
        first = "program" + ("" if same(tile.rows_each, 1) else f" * {tile.rows_each}") + (f" + {step}" if step else "")
        return [
            f"row = {first} + tl.arange(0, {tile.rows})[:, None]",
            *self._mask_line(ROW), *self._parts(ROW),
        ]  # fmt: skip

    def _rows_of_run(self, step: str | None) -> list[str]:
        """Where a program's rows lie in one run of rows: `member` counts them from its start."""
        tile = self.tile
        programs, rows = tile.row_programs // tile.runs, self.counts[ROW] // tile.runs
        first = f"program % {programs} * {tile.rows_each}" + (f" + {step}" if step else "")
        return [
            f"member = {first} + tl.arange(0, {tile.rows})[:, None]",
            f"row = program // {programs} * {rows} + member",
            *([f"row_mask = member < {rows}"] if self._is_masked(ROW) else []), *self._parts(ROW),
        ]  # fmt: skip

    def col_lines(self, start: str | None) -> list[str]:
        """start: the name of the first element's number, or `part`, the number of the tile."""
        width = self.tile.width
        first = {None: "", "part": f"part * {width} + "}.get(start, f"{start} + ")
        wide = ".to(tl.int64)" if self.tile.wide else ""
        return [
            f"col = {first}tl.arange(0, {width})[None, :]{wide}",
            *self._mask_line(COL), *self._parts(COL),
        ]  # fmt: skip

    def finish_lines(self, width: int, runs: int, program: str) -> list[str]:
        """Of the kernel that adds partial results of a row's elements, of each of so many runs of rows apart."""
        if runs == 1:
            return [f"col = {program} * {width} + tl.arange(0, {width})[None, :]", *self._parts(COL)]
        blocks = -(-self.counts[COL] // width)
        return [
            f"run = {program} // {blocks}",
            f"row = run * {self.counts[ROW] // runs}",
            *self._parts(ROW),
            f"col = {program} % {blocks} * {width} + tl.arange(0, {width})[None, :]", *self._parts(COL),
        ]  # fmt: skip

    def is_run(self, position: Affine) -> bool:
        """Whether elements along the tile's last dimension are numbered one by one, from a multiple of four."""
        last = self.names[-1]
        runs = self._runs(position, last)
        if self.tile.width % 4 or len(runs) != 1 or not same(runs[0][1], 1) or self._name(last, runs[0][0]) != last:
            return False
        rest = [c for axis in self.names[:-1] for _, c in self._runs(position, axis)]
        return all(divides(4, c) for c in (*rest, position.constant))

    def block_text(self, position: Affine) -> str:
        """The numbers of the blocks of four that hold the tile's elements, one for every four elements."""
        last = self.names[-1]
        tile = self.tile
        lanes = f"tl.arange(0, {tile.width // 4})"
        if tile.flat:
            start, rest = f"first // 4 + {lanes}", ""
        else:
            first = (
                "start // 4 + "
                if tile.swept
                else f"part * {tile.width // 4} + "
                if not same(tile.width_programs, 1)
                else ""
            )
            start = f"{first}{lanes}[None, :]"
            others = Affine.of(
                {loop: c for loop, c in position.terms if loop not in self.loops[last]}, position.constant
            )
            rest = f" + ({self.text(others)}) // 4" if others.terms or others.constant else ""
        return f"({start}{rest}).to(tl.int64)"
