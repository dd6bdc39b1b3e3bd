"""How a kernel is cut into Triton programs: a small model of a GPU's registers and parallelism, from the shape alone.

The same kernel gets the same tiles on every device, so that its sums are always added in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aottrain.compiler.codegen.row_passes import is_element
from aottrain.compiler.codegen.triton.derived import Derived
from aottrain.ir.analysis.liveness import last_uses
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import KernelIR, Level, Load, Position, Reduce, levels, operands
from aottrain.ir.kernels.registers import BUSY_PROGRAMS, LONGEST_HELD, values_that_fit, warps_of
from aottrain.ir.sizes.polynomials import is_open, likely

# Elements of a tile: enough for each thread to load 16 bytes at a time, few enough that nothing spills.
_TILE, _SWEPT_WIDTH, _COLUMN_WIDTH, _WHOLE_BLOCK, _SUMMED_TILE = 1024, 4096, 128, 4096, 2048
# Of a row whose length each call has its own of: what is traced may be shorter than what follows.
_OPEN_WIDTH = 256
# Elements of a row, times its values that live across a reduction, that are kept in registers: most of a
# multiprocessor's 65536. A row that is swept is computed again in each pass.
_HELD_ELEMENTS = 57344
# Rows that lie across memory, of which neighbours share what is read at once (32 bytes): so many in a program, by parts
# of so many of their elements, where there are rows for so many programs.
_ACROSS_ROWS, _ACROSS_WIDTH, _ACROSS_PROGRAMS = 16, 512, 64
_LARGE_SPAN = 1 << 18  # elements; what is smaller is in a nearer cache
# Programs to aim for where rows are only read, once, to be added up: each then waits for memory alone, and four fit.
_READING_PROGRAMS = 528
# So few elements are added up by one program, as of the partial sums of images: another launch would take longer.
_FEW_SUMMED = 16384
# Rows that are reduced and summed up, where they are not wider than this: four warps, whose threads have as many
# elements as registers hold (values alive across a reduction, times elements), within bounds. Measured on an H100 by
# kernels of norms' gradients, of three sums: with more threads one program has a multiprocessor to itself, with more
# registers they spill.
_MEASURED_SUMS = 3
_SUMMED_WIDTH, _SUMMED_THREADS, _SUMMED_REGISTERS, _FEWEST, _MOST = 2048, 128, 128, 4, 32
# Offsets up to here are 32 bits: tiles reach over the ends of loops, at most by as much again.
_NARROW = 1 << 30


@dataclass(frozen=True)
class Tile:
    """The part of a kernel's elements that a program computes at once."""

    flat: bool
    """Whether all elements are numbered in one: a tile is `width` of them. Otherwise it is `rows` rows of `width`."""
    rows: int
    width: int
    num_warps: int
    wide: bool
    """Whether offsets are 64 bits."""
    derived: Derived
    """Numbers of programs that follow from the sizes of a call."""
    swept: bool = False
    """Whether a program loops over the elements of its rows, pass by pass. Otherwise a tile has all elements of its
    rows, or those of one of `width_programs` programs."""
    rows_each: Any = 1
    """Rows of one program, a multiple of `rows`."""
    row_programs: Any = 1
    """Programs that share the rows."""
    width_programs: Any = 1
    """Programs that share a row."""
    runs: int = 1
    """Parts of equally many rows whose programs are apart: those that a reduction over rows keeps apart."""
    left: int = 0
    """Values of a row that registers hold besides those that live across its reductions."""

    @property
    def num_programs(self) -> Any:
        return self.row_programs * self.width_programs


def choose_tile(kernel: KernelIR) -> Tile:
    wide, derived = needs_wide_offsets(kernel), Derived(kernel)
    reduces = any(isinstance(instruction, Reduce) for instruction in kernel.body)
    value_levels = levels(kernel)
    plain_columns = any(not column.whole for column in kernel.columns)
    elements_only = all(is_element(kernel, value_levels, store) for store in kernel.stores)
    if not reduces and not plain_columns and elements_only:
        return _flat(kernel, wide, derived)
    if not reduces:
        width = min(_power(kernel.row_size), _COLUMN_WIDTH)
        return _by_rows(
            kernel, width, wide, derived, width_programs=derived.rounded_up("parts", kernel.row_size, width)
        )
    width = _power(kernel.row_size)
    if is_open(kernel.row_size):
        return _by_rows(kernel, max(_OPEN_WIDTH, min(width, _SWEPT_WIDTH)), wide, derived, swept=True)
    if width > _ACROSS_WIDTH // 2 and _reads_across(kernel):
        return _by_rows(kernel, min(width, _ACROSS_WIDTH), wide, derived, swept=width > _ACROSS_WIDTH, across=True)
    if width <= LONGEST_HELD and width * _num_held(kernel) <= _HELD_ELEMENTS:
        return _by_rows(kernel, width, wide, derived)
    return _by_rows(kernel, min(width, _SWEPT_WIDTH), wide, derived, swept=True)


def _flat(kernel: KernelIR, wide: bool, derived: Derived) -> Tile:
    count = kernel.num_rows * kernel.row_size
    if kernel.columns:
        block = min(_power(count), _WHOLE_BLOCK)
    else:
        block = max(min(_TILE, _power(likely(count) // BUSY_PROGRAMS)), min(128, _power(count)))
    programs = derived.rounded_up("blocks", count, block)
    return Tile(True, 1, block, warps_of(block), wide, derived, width_programs=programs)


def _reads_across(kernel: KernelIR) -> bool:
    """Whether it reads much memory of which neighbours are elements of neighbouring rows, and there are many rows."""
    if likely(kernel.num_rows) < _ACROSS_ROWS * _ACROSS_PROGRAMS:
        return False
    return any(isinstance(step, Load) and _lies_across(kernel, step) for step in kernel.body)


def _lies_across(kernel: KernelIR, load: Load) -> bool:
    if load.address.indirect or likely(kernel.parameters[load.buffer].span) < _LARGE_SPAN:
        return False
    ranges = list(map(likely, kernel.ranges))
    terms = [(loop, abs(likely(c))) for loop, c in load.address.offset.terms if ranges[loop] > 1]
    along = [c for loop, c in terms if loop >= kernel.num_outer]
    beside = [ranges[loop] for loop, c in terms if loop < kernel.num_outer and c == 1]
    return bool(along and beside) and min(along) >= _ACROSS_ROWS and max(beside) >= _ACROSS_ROWS


def _by_rows(
    kernel: KernelIR,
    width: int,
    wide: bool,
    derived: Derived,
    swept: bool = False,
    width_programs: Any = 1,
    across: bool = False,
) -> Tile:
    """Short rows share a tile, as long as there is work for all programs; sums over rows take several tiles each.
    across: as of `_reads_across`."""
    runs = math.prod(kernel.ranges[: max((column.kept for column in kernel.columns), default=0)])
    num_rows = kernel.num_rows // runs if runs > 1 else kernel.num_rows
    # Partial sums cost memory traffic: each is over eight rows at least, but for one number of all rows.
    largest = _SUMMED_TILE if kernel.columns else _TILE
    least = 8 if any(not column.whole for column in kernel.columns) else 1
    reduced = any(isinstance(instruction, Reduce) for instruction in kernel.body)
    per_thread = 0
    if kernel.columns and reduced and not swept and not across and width <= _SUMMED_WIDTH:
        more = max(0, len(kernel.columns) - _MEASURED_SUMS)
        fitting = max(1, _SUMMED_REGISTERS // (_num_held(kernel) + more))
        per_thread = min(max(1 << (fitting.bit_length() - 1), _FEWEST), _MOST)
        largest = per_thread * _SUMMED_THREADS
    if swept:  # rows whose length each call has its own of may be short ones
        largest = _TILE if is_open(kernel.row_size) else width
    if across:
        largest, least = _ACROSS_ROWS * width, max(least, _ACROSS_ROWS)
    rows = max(1, min(largest // width, _power(num_rows)))
    few = not is_open(num_rows) and num_rows * width <= _FEW_SUMMED
    alone = bool(kernel.columns) and not reduced and runs == 1 and few
    while rows > least and not alone and -(-likely(num_rows) // rows) * likely(runs * width_programs) < BUSY_PROGRAMS:
        rows //= 2
    tiles, each = derived.rounded_up("tiles", num_rows, rows), 1
    if kernel.columns:
        aim = BUSY_PROGRAMS if reduced else _READING_PROGRAMS
        each = tiles if alone else derived.share(tiles, runs * width_programs, aim, least // rows)
    programs = derived.rounded_up("programs", tiles, each) * runs if kernel.columns else tiles * runs
    warps = max(1, rows * width // (32 * per_thread)) if per_thread else warps_of(rows * width)
    left = 0 if swept else values_that_fit(rows * width, warps) - _num_held(kernel)
    if per_thread:  # as measured, with all sums
        left = len(kernel.body)
    return Tile(
        False, rows, width, warps, wide, derived, swept, rows * each, programs, width_programs, runs, max(0, left)
    )


def _num_held(kernel: KernelIR) -> int:
    """The most values of an element that are alive across a reduction over its row, at least one: what registers must
    hold. In between, an element's values come and go; what is stored is stored as soon as it is there."""
    value_levels = levels(kernel)
    last = last_uses(map(operands, kernel.body))
    reductions = [position for position, instruction in enumerate(kernel.body) if isinstance(instruction, Reduce)]
    elements = [value for value in last if value_levels[value] is Level.ELEMENT]
    return max([1, *(sum(value < reduction < last[value] for value in elements) for reduction in reductions)])


def _power(count: Any) -> int:
    """The next power of two, of a size that each call has its own of as it was traced."""
    return 1 << max(0, likely(count) - 1).bit_length()


def needs_wide_offsets(kernel: KernelIR) -> bool:
    """Whether any offset, or any number of an element, may pass what 32 bits hold. Of sizes that each call has its own
    of it is what they were when they were traced: a guard."""
    counts = [kernel.num_rows * kernel.row_size, *(parameter.span for parameter in kernel.parameters)]
    counts += [_reach(position, kernel.ranges) for position in affines(kernel)]
    return any([bool(count > _NARROW) for count in counts])


def _reach(position: Affine, ranges: tuple[int, ...]) -> int:
    return abs(position.constant) + sum(abs(c) * (ranges[loop] - 1) for loop, c in position.terms)


def affines(kernel: KernelIR) -> list[Affine]:
    """All positions that the kernel computes."""
    positions = [i.address.offset for i in kernel.body if isinstance(i, Load)]
    positions += [i.offset for i in kernel.body if isinstance(i, Position)]
    positions += [store.address.offset for store in kernel.stores]
    positions += [column.address.offset for column in kernel.columns if not column.whole]
    return positions
