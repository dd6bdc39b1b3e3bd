"""Kernels that read or write across memory, such as a change of layout, in tiles that stay in the nearest cache.

Where the loop over rows is contiguous in memory and the loop over a row's elements takes large steps, each element
costs a cache line, which is evicted before the next row reads its next element. So a tile of a few rows is copied at
once, by whole lines, and computed from the copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aottrain.compiler.codegen.cpp.segments import Segment
from aottrain.compiler.codegen.cpp.text import STORED, address_text, affine_text, decoded, loaded
from aottrain.compiler.codegen.cpp.work import Work
from aottrain.compiler.codegen.row_passes import PassPlan, is_element
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.alignment import CACHE_LINE
from aottrain.ir.kernels.kernel import DRAWS, Compute, KernelIR, Level, Load, Reduce, Store
from aottrain.ir.sizes.polynomials import is_open

_PAGE_BYTES, _WAYS = 4096, 16
# Rows of a tile: those of one cache line in float32; and elements of each, with some more so that columns of a tile do
# not all fall into one set of the cache.
_ROWS, _COLUMNS, _MOST_COLUMNS, _GAP = 16, 64, 128, 4
_FEWEST = 8
# Elements of a row's innermost loop that are done together, and of how many elements there are copies then.
_PIECE, _MOST_COPIED = 64, 16384
# For the sake of vectors alone: elements of a row that are copied, how far apart, and how much is computed of each.
_FEWEST_SCATTERED, _MOST_SCATTERED, _FEWEST_APART, _FEWEST_COMPUTED = 16, 2048, 5, 2
# Ops whose loops are made twice, or that look at single elements.
_SPECIAL = {"sin", "cos", "tan", "checked", *DRAWS}


@dataclass(frozen=True)
class Tile:
    """Which loops of a kernel run in tiles, and which accesses go through a copy of the tile."""

    kernel: KernelIR
    loop: int
    """The outer loop of a tile's rows."""
    loads: tuple[int, ...]
    """Loads across memory, by their position in the body."""
    stores: tuple[int, ...]
    """Stores across memory, by their position in the kernel's stores."""

    @property
    def last(self) -> int:
        return len(self.kernel.ranges) - 1

    @property
    def columns(self) -> int:
        size = self.kernel.ranges[self.last]
        return size if size <= _MOST_COLUMNS else _COLUMNS

    def render(
        self, out: Callable[[int, str], None], row: Callable[[int], None], element: Callable[[int], None]
    ) -> None:
        """All of the kernel's loops. row, element: write what is done for each, at a depth."""
        kernel = self.kernel
        blocks = [-(-kernel.ranges[self.loop] // _ROWS), -(-kernel.ranges[self.last] // self.columns)]
        others = [loop for loop in range(kernel.num_outer) if loop != self.loop]
        sizes = [kernel.ranges[loop] for loop in others] + blocks
        out(1, "#pragma omp parallel for schedule(static) num_threads(num_threads)")
        out(1, f"for (i64 block = 0; block < {math.prod(sizes)}; block++) {{")
        names = [f"i{loop}" for loop in others] + ["part", "piece"]
        for line in decoded("block", names, sizes):
            out(2, line)
        self._bounds(out, "part", self.loop, _ROWS)
        self._bounds(out, "piece", self.last, self.columns)
        for value in self.loads:
            load = kernel.body[value]
            assert isinstance(load, Load)
            source = f"p{load.buffer}[{affine_text(load.address.offset)}]"
            self._copy(out, load.buffer, f"t{value}", f"t{value}[{self.position}] = {source};")
        for number in self.stores:
            self._declare(out, kernel.stores[number].buffer, f"s{number}")
        out(2, f"for (i64 i{self.loop} = first_{self.loop}; i{self.loop} < end_{self.loop}; i{self.loop}++) {{")
        row(3)
        out(3, "#pragma omp simd")
        out(3, f"for (i64 i{self.last} = first_{self.last}; i{self.last} < end_{self.last}; i{self.last}++) {{")
        element(4)
        out(3, "}")
        out(2, "}")
        for number in self.stores:
            store = kernel.stores[number]
            target = f"p{store.buffer}[{affine_text(store.address.offset)}]"
            self._loops(out, f"{target} = s{number}[{self.position}];")
        out(1, "}")

    @property
    def position(self) -> str:
        """Of an element in the copy of its tile."""
        return f"(i{self.loop} - first_{self.loop}) * {self.columns + _GAP} + i{self.last} - first_{self.last}"

    def read(self, value: int) -> str:
        return loaded(self.kernel.body[value].dtype, f"t{value}", self.position)

    def written(self, store: Store) -> str | None:
        """Where in a copy a store goes; None for one that goes to its buffer."""
        number = self.kernel.stores.index(store)
        return f"s{number}[{self.position}]" if number in self.stores else None

    def _bounds(self, out: Callable[[int, str], None], part: str, loop: int, size: int) -> None:
        whole = self.kernel.ranges[loop]
        out(2, f"const i64 first_{loop} = {part} * {size};")
        end = f"first_{loop} + {size}"
        if whole % size:
            end = f"{end} < {whole} ? {end} : {whole}"
        out(2, f"const i64 end_{loop} = {end};")

    def _declare(self, out: Callable[[int, str], None], buffer: int, name: str) -> None:
        kind = STORED[self.kernel.parameters[buffer].dtype]
        out(2, f"alignas({CACHE_LINE}) {kind} {name}[{_ROWS * (self.columns + _GAP)}];")

    def _copy(self, out: Callable[[int, str], None], buffer: int, name: str, text: str) -> None:
        self._declare(out, buffer, name)
        self._loops(out, text)

    def _loops(self, out: Callable[[int, str], None], text: str) -> None:
        """Memory's order: rows innermost."""
        a, b = self.loop, self.last
        out(2, f"for (i64 i{b} = first_{b}; i{b} < end_{b}; i{b}++)")
        out(3, f"for (i64 i{a} = first_{a}; i{a} < end_{a}; i{a}++) {text}")


def find_tile(kernel: KernelIR, value_levels: Sequence[Level], plan: PassPlan) -> Tile | None:
    """None where no access of a kernel without reductions goes across memory."""
    last = len(kernel.ranges) - 1
    sums = kernel.columns or kernel.parts
    if kernel.num_outer != last or last < 1 or sums or plan.holds or kernel.ranges[last] < _FEWEST:
        return None
    for instruction in kernel.body:
        if isinstance(instruction, Reduce) or (isinstance(instruction, Compute) and instruction.op in _SPECIAL):
            return None
        if isinstance(instruction, Load) and (instruction.guard is not None or instruction.address.indirect):
            return None
    if any(store.address.indirect or not is_element(kernel, value_levels, store) for store in kernel.stores):
        return None
    loads = {v: _rows_of(kernel, i.buffer, i.address.offset) for v, i in enumerate(kernel.body) if isinstance(i, Load)}
    stores = {n: _rows_of(kernel, s.buffer, s.address.offset) for n, s in enumerate(kernel.stores)}
    loops = [loop for loop in (*loads.values(), *stores.values()) if loop is not None]
    if not loops or (len(loads) == len(loops) == 1 and _copies_near(kernel, *loads)):
        return None
    loop = max(loops, key=loops.count)
    return Tile(
        kernel,
        loop,
        tuple(value for value, rows_loop in loads.items() if rows_loop == loop),
        tuple(number for number, rows_loop in stores.items() if rows_loop == loop),
    )


def stays_near(step: int, size: int) -> bool:
    """Whether the cache lines of a row of this size, so many bytes apart, are still there for the next row: lines at
    the same place of a page share a set of the nearest cache, which has 64 of them."""
    sets = min(_PAGE_BYTES // math.gcd(step, _PAGE_BYTES), _PAGE_BYTES // CACHE_LINE)
    return size <= _WAYS * sets


def _copies_near(kernel: KernelIR, value: int) -> bool:
    """Whether a mere copy needs no tile."""
    last, load = len(kernel.ranges) - 1, kernel.body[value]
    assert isinstance(load, Load)
    step = abs(load.address.offset.coefficient(last)) * load.dtype.itemsize
    return stays_near(step, kernel.ranges[last])


def _rows_of(kernel: KernelIR, buffer: int, offset: Affine) -> int | None:
    """The outer loop along which an access is contiguous, where along the row it takes a cache line for each
    element."""
    last = len(kernel.ranges) - 1
    if abs(offset.coefficient(last)) * kernel.parameters[buffer].dtype.itemsize < CACHE_LINE:
        return None
    return next((i for i in range(last) if offset.coefficient(i) == 1 and kernel.ranges[i] >= _FEWEST), None)


@dataclass(frozen=True)
class Copies(ABC):
    """Accesses that go through a copy of what is done together."""

    kernel: KernelIR
    loads: tuple[int, ...]
    """Loads of what lies apart in memory, by their position in the body."""
    stores: tuple[int, ...]
    """Stores of such, by their position in the kernel's stores."""

    @property
    @abstractmethod
    def _position(self) -> str:
        """Of an element in a copy."""

    def read(self, value: int) -> str:
        return loaded(self.kernel.body[value].dtype, f"x{value}", self._position)

    def written(self, store: Store) -> str | None:
        """As `Tile.written`."""
        number = self.kernel.stores.index(store)
        return f"z{number}[{self._position}]" if number in self.stores else None


class Pieces(Copies):
    """A pass of a row of several loops, of which the innermost goes across memory in some access while another goes
    along: it is done in pieces, and such accesses go through a copy of the piece, for a cache line that is read or
    written for one element is gone before the next one is."""

    def render(self, out: Callable[[int, str], None], depth: int, nest: Callable[[int, tuple[str, str]], None]) -> None:
        """The pass, piece by piece. nest: writes a row's loops, at a depth and with bounds of the innermost."""
        kernel, size = self.kernel, self.kernel.ranges[-1]
        end = f"first + {_PIECE}"
        out(depth, f"for (i64 first = 0; first < {size}; first += {_PIECE}) {{")
        out(depth + 1, f"const i64 last = {end if size % _PIECE == 0 else f'{end} < {size} ? {end} : {size}'};")
        for value in self.loads:
            load = kernel.body[value]
            assert isinstance(load, Load)
            self._declare(out, depth + 1, load.buffer, f"x{value}")
            source = f"p{load.buffer}[{affine_text(load.address.offset)}]"
            self._loops(out, depth + 1, f"x{value}[{self._position}] = {source};")
        for number in self.stores:
            self._declare(out, depth + 1, kernel.stores[number].buffer, f"z{number}")
        nest(depth + 1, ("first", "last"))
        for number in self.stores:
            store = kernel.stores[number]
            target = f"p{store.buffer}[{affine_text(store.address.offset)}]"
            self._loops(out, depth + 1, f"{target} = z{number}[{self._position}];")
        out(depth, "}")

    @property
    def _others(self) -> range:
        return range(self.kernel.num_outer, len(self.kernel.ranges) - 1)

    @property
    def _position(self) -> str:
        first, *rest = self._others
        position = f"i{first}"
        for loop in rest:
            position = f"({position} * {self.kernel.ranges[loop]} + i{loop})"
        return f"{position} * {_PIECE + _GAP} + i{len(self.kernel.ranges) - 1} - first"

    def _declare(self, out: Callable[[int, str], None], depth: int, buffer: int, name: str) -> None:
        size = math.prod(self.kernel.ranges[loop] for loop in self._others) * (_PIECE + _GAP)
        out(depth, f"alignas({CACHE_LINE}) {STORED[self.kernel.parameters[buffer].dtype]} {name}[{size}];")

    def _loops(self, out: Callable[[int, str], None], depth: int, text: str) -> None:
        last = len(self.kernel.ranges) - 1
        out(depth, f"for (i64 i{last} = first; i{last} < last; i{last}++)")
        for loop in self._others:
            out(depth, f"for (i64 i{loop} = 0; i{loop} < {self.kernel.ranges[loop]}; i{loop}++)")
        out(depth + 1, text)


def find_pieces(
    kernel: KernelIR, value_levels: Sequence[Level], values: Sequence[int], stores: Sequence[Store]
) -> Pieces | None:
    """For a pass that computes these values and writes these stores; None where no access of it is so."""
    last = len(kernel.ranges) - 1
    others = range(kernel.num_outer, last)
    if is_open(*kernel.ranges) or kernel.parts or not others or kernel.ranges[last] <= _PIECE:
        return None
    computed = {value: kernel.body[value] for value in values if value_levels[value] is Level.ELEMENT}
    if any(isinstance(i, Compute) and i.op in _SPECIAL for i in computed.values()):
        return None
    loads = {value: i for value, i in computed.items() if isinstance(i, Load)}
    written = {n: store for n, store in enumerate(kernel.stores) if store in stores}
    if any(load.guard is not None for load in loads.values()):
        return None
    accesses: list[Load | Store] = [*loads.values(), *written.values()]
    if any(access.address.indirect for access in accesses):
        return None

    def is_across(access: Load | Store) -> bool:
        offset, size = access.address.offset, kernel.parameters[access.buffer].dtype.itemsize
        along = any(offset.coefficient(loop) == 1 and kernel.ranges[loop] > 1 for loop in others)
        return along and abs(offset.coefficient(last)) * size >= CACHE_LINE

    found = (
        tuple(value for value, load in loads.items() if is_across(load)),
        tuple(n for n, store in written.items() if is_element(kernel, value_levels, store) and is_across(store)),
    )
    size = math.prod(kernel.ranges[loop] for loop in others) * (_PIECE + _GAP) * sum(map(len, found))
    return Pieces(kernel, *found) if any(found) and size <= _MOST_COPIED else None


class Scattered(Copies):
    """An innermost loop whose elements lie apart in some memory: they are copied to the stack before it, and from there
    after it, for compilers make no vectors of a loop that has such accesses, whatever else it computes."""

    def around(self, segment: Segment) -> tuple[list[str], list[str]]:
        """The lines before the loop over a segment, and those after it."""
        loop = self._position
        each = f"for (i64 {loop} = {segment.start}; {loop} < {segment.stop}; {loop}++)"
        before, after = [], []
        for value in self.loads:
            load = self.kernel.body[value]
            assert isinstance(load, Load)
            before.append(self._declared(load.buffer, f"x{value}"))
            before.append(f"{each} x{value}[{loop}] = p{load.buffer}[{address_text(self.kernel, load.address)}];")
        for number in self.stores:
            store = self.kernel.stores[number]
            before.append(self._declared(store.buffer, f"z{number}"))
            after.append(f"{each} p{store.buffer}[{address_text(self.kernel, store.address)}] = z{number}[{loop}];")
        return before, after

    @property
    def _position(self) -> str:
        return f"i{len(self.kernel.ranges) - 1}"

    def _declared(self, buffer: int, name: str) -> str:
        return f"alignas({CACHE_LINE}) {STORED[self.kernel.parameters[buffer].dtype]} {name}[{self.kernel.ranges[-1]}];"


def find_scattered(
    kernel: KernelIR, value_levels: Sequence[Level], values: Sequence[int], work: Work
) -> Scattered | None:
    """Of a pass that computes these values and leaves this behind; None where no access of it is so, or where it hardly
    does more than to copy."""
    if is_open(*kernel.ranges) or not _FEWEST_SCATTERED <= kernel.ranges[-1] <= _MOST_SCATTERED:
        return None
    elements = [kernel.body[value] for value in values if value_levels[value] is Level.ELEMENT]
    ops = [i.op for i in elements if isinstance(i, Compute) and i.op != "cast"]
    if len(ops) + len(work.reductions) + len(work.columns) < _FEWEST_COMPUTED or "checked" in ops:
        return None
    loads = {v: i for v in values if isinstance(i := kernel.body[v], Load) and value_levels[v] is Level.ELEMENT}
    written = {n: s for n, s in enumerate(kernel.stores) if s in work.stores}

    def lies_apart(access: Load | Store) -> bool:
        looked_up = any(value_levels[value] is Level.ELEMENT for value, _, _ in access.address.indirect)
        return not looked_up and abs(access.address.offset.coefficient(len(kernel.ranges) - 1)) >= _FEWEST_APART

    found = (
        tuple(value for value, load in loads.items() if load.guard is None and lies_apart(load)),
        tuple(number for number, store in written.items() if lies_apart(store)),
    )
    num_copied = kernel.ranges[-1] * sum(map(len, found))
    return Scattered(kernel, *found) if 0 < num_copied <= _MOST_COPIED else None
