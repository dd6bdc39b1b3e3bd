"""Kernels whose vectors go over rows: of rows that lie side by side in memory, or that fill no vector.

Where neighbours in memory belong to neighbouring rows, as in a softmax over channels, the elements of one row are far
apart. So a block of rows is taken together: what is known of a row is an array with one number for each of the block's
rows, and the innermost loop goes over these. Short rows that lie one after the other are copied for that, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from aottrain.compiler.codegen.cpp import reductions as cpp_reductions
from aottrain.compiler.codegen.cpp.columns import Columns
from aottrain.compiler.codegen.cpp.pragmas import simd
from aottrain.compiler.codegen.cpp.text import (
    COMPUTED,
    STORED,
    affine_text,
    combined,
    decoded,
    folded,
    identity,
    loaded,
    row_position,
    tracks_nan,
)
from aottrain.compiler.codegen.cpp.tiles import stays_near
from aottrain.compiler.codegen.cpp.work import Work, work_of
from aottrain.compiler.codegen.row_passes import PassPlan, cost_of, is_element
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.alignment import CACHE_LINE
from aottrain.ir.kernels.kernel import DRAWS, Compute, KernelIR, Level, Load, Reduce, Store, operands

# Rows of a block; and the fewest neighbours for which it is worth it.
_LANES, _FEWEST = 64, 16
# Runs of rows, each of which has a sum of its own and is one thread's.
_FEWEST_RUNS = 4
# What an element costs that is worth a copy, in additions.
_DEAR = 16
# Of a row, elements whose sum is added up on its own: keeps errors small.
_PART = 128
# What is held of a block of rows is on the stack, and should stay in the nearest caches.
_MOST_HELD = 128 << 10
_REDUCTIONS = ("sum", "prod", "max", "min")
_SIMD = "#pragma omp simd"
_SPECIAL = {"sin", "cos", "tan", *DRAWS}  # their loops are made otherwise, or twice


class Writers(NamedTuple):
    """What writes the parts of a kernel, at a depth."""

    out: Callable[[int, str], None]
    define: Callable[[int, int], None]
    """A value, by its number."""
    body: Callable[[int, int], None]
    """What a pass, by its number, does for each element."""
    store: Callable[[int, Store], None]
    columns: Columns


@dataclass(frozen=True)
class Lanes:
    """A kernel that is written so."""

    kernel: KernelIR
    levels: Sequence[Level]
    stages: Sequence[int]
    plan: PassPlan
    loads: tuple[int, ...]
    """Loads along rows, by their position in the body: from a copy of the block."""
    stores: tuple[int, ...]
    """Stores along rows, by their position in the kernel's stores: to a copy."""

    @property
    def loop(self) -> int:
        """The outer loop whose iterations are neighbours in memory."""
        return self.kernel.num_outer - 1

    def held(self, position: str) -> str:
        """Where in a row's buffer the element at this position is."""
        return f"({position}) * {_LANES} + lane"

    def read(self, value: int) -> str:
        """An element of a copy."""
        return loaded(self.kernel.body[value].dtype, f"x{value}", self.held(row_position(self.kernel)))

    def written(self, store: Store) -> str | None:
        """Where in a copy a store goes; None for one that goes to its buffer."""
        number = self.kernel.stores.index(store)
        return f"z{number}[{self.held(row_position(self.kernel))}]" if number in self.stores else None

    def render(self, write: Writers, buffers: Mapping[int, int], parallel: bool) -> None:
        """All of the kernel's loops. buffers: of what is held, by value."""
        kernel, out = self.kernel, write.out
        outer = kernel.ranges[: kernel.num_outer]
        sizes = [*outer[:-1], -(-outer[-1] // _LANES)]
        blocks = math.prod(sizes)
        if parallel:
            out(1, "#pragma omp parallel num_threads(num_threads) reduction(|:failed)")
        out(1, "{")
        of_all = "omp_get_thread_num(), threads = omp_get_num_threads()" if parallel else "0, threads = 1"
        out(2, f"const i64 thread = {of_all};")
        runs = _runs(kernel)
        if runs:  # each is a thread's
            out(2, f"for (i64 run = {runs} * thread / threads; run < {runs} * (thread + 1) / threads; run++) {{")
            write.columns.totals(2)
            out(2, f"for (i64 block = run * {blocks // runs}; block < (run + 1) * {blocks // runs}; block++) {{")
            self._block(write, buffers, sizes)
            write.columns.end_whole_runs(2)
            out(2, "}")
        else:
            if kernel.columns:
                write.columns.totals(2)
            out(2, f"const i64 last = {blocks} * (thread + 1) / threads;")
            out(2, f"for (i64 block = {blocks} * thread / threads; block < last; block++) {{")
            self._block(write, buffers, sizes)
            if kernel.columns:
                write.columns.end(2, parallel)
            else:
                out(2, "}")
        out(1, "}")

    def _block(self, write: Writers, buffers: Mapping[int, int], sizes: Sequence[int]) -> None:
        kernel, out = self.kernel, write.out
        size = kernel.ranges[self.loop]
        for line in decoded("block", [*(f"i{loop}" for loop in range(self.loop)), "part"], sizes):
            out(3, line)
        out(3, f"const i64 first = part * {_LANES};")
        out(3, f"const i64 stop = first + {_LANES} < {size} ? first + {_LANES} : {size};")
        if kernel.columns:
            write.columns.parts(3)
        for value in self._kept():
            out(3, f"alignas({CACHE_LINE}) {_stored(kernel.body[value].dtype)} y{value}[{_LANES}];")
        for buffer, kind in sorted({(b, COMPUTED[kernel.body[v].dtype]) for v, b in buffers.items()}):
            out(3, f"alignas({CACHE_LINE}) {kind} r{buffer}[{kernel.row_size * _LANES}];")
        for value in self.loads:
            load = kernel.body[value]
            assert isinstance(load, Load)
            self._copy(out, load.buffer, f"x{value}", "{copy} = {memory};", load.address.offset)
        for number in self.stores:
            self._declare(out, kernel.stores[number].buffer, f"z{number}")
        self._rows(write, 0)
        for number in range(len(self.plan.passes)):
            self._pass(write, number)
            self._rows(write, number + 1)
        stores = [store for store in kernel.stores if not is_element(kernel, self.levels, store)]
        if stores:
            self._open(write, 3, [store.value for store in stores])
            for store in stores:
                write.store(4, store)
            out(3, "}")
        for number in self.stores:
            store = kernel.stores[number]
            self._loops(out, store.buffer, f"z{number}", "{memory} = {copy};", store.address.offset)

    def _declare(self, out: Callable[[int, str], None], buffer: int, name: str) -> None:
        kind = STORED[self.kernel.parameters[buffer].dtype]
        out(3, f"alignas({CACHE_LINE}) {kind} {name}[{self.kernel.row_size * _LANES}];")

    def _copy(self, out: Callable[[int, str], None], buffer: int, name: str, text: str, offset: Affine) -> None:
        self._declare(out, buffer, name)
        self._loops(out, buffer, name, text, offset)

    def _loops(self, out: Callable[[int, str], None], buffer: int, name: str, text: str, offset: Affine) -> None:
        """In memory's order."""
        copy = f"{name}[({row_position(self.kernel)}) * {_LANES} + i{self.loop} - first]"
        out(3, f"for (i64 i{self.loop} = first; i{self.loop} < stop; i{self.loop}++)")
        for loop in range(self.kernel.num_outer, len(self.kernel.ranges)):
            out(4, f"for (i64 i{loop} = 0; i{loop} < {self.kernel.ranges[loop]}; i{loop}++)")
        out(5, text.format(copy=copy, memory=f"p{buffer}[{affine_text(offset)}]"))

    def _kept(self) -> list[int]:
        """Values of a row that are read in another loop over rows than the one that computes them."""
        readers: dict[int, set[tuple[Level, int] | None]] = {}
        for value, instruction in enumerate(self.kernel.body):
            place = (self.levels[value], self.stages[value]) if not isinstance(instruction, Reduce) else None
            for operand in operands(instruction):
                readers.setdefault(operand, set()).add(place)
        for store in self.kernel.stores:
            readers.setdefault(store.value, set()).add(None)
        rows = [value for value, level in enumerate(self.levels) if level is Level.ROW and value in readers]
        return [
            value
            for value in rows
            if isinstance(self.kernel.body[value], Reduce) or readers[value] != {(Level.ROW, self.stages[value])}
        ]

    def _open(self, write: Writers, depth: int, read: Iterable[int], pragma: Sequence[str] = (_SIMD,)) -> None:
        """Open a loop over the block's rows, which reads these of their values."""
        for line in pragma:
            write.out(depth, line)
        write.out(depth, f"for (i64 i{self.loop} = first; i{self.loop} < stop; i{self.loop}++) {{")
        write.out(depth + 1, f"const i64 lane = i{self.loop} - first;")
        for value in sorted(set(read) & set(self._kept())):
            dtype = self.kernel.body[value].dtype
            truth = " != 0" * (dtype is torch.bool)
            write.out(depth + 1, f"const {COMPUTED[dtype]} v{value} = y{value}[lane]{truth};")

    def _rows(self, write: Writers, stage: int) -> None:
        """Values of a row that are known once the passes before `stage` are done."""
        body, kept = self.kernel.body, set(self._kept())
        values = [
            value
            for value, instruction in enumerate(body)
            if self.levels[value] is Level.ROW and self.stages[value] == stage and not isinstance(instruction, Reduce)
        ]
        if not values:
            return
        read = {operand for value in values for operand in operands(body[value])} - set(values)
        self._open(write, 3, read, simd([body[value] for value in values], Work({}, [], {}, {}), {}))
        for value in values:
            write.define(4, value)
            if value in kept:
                write.out(4, f"y{value}[lane] = v{value};")
        write.out(3, "}")

    def _pass(self, write: Writers, number: int) -> None:
        """One pass over the block's rows, element by element."""
        kernel, out = self.kernel, write.out
        reductions, stores, columns, _ = work_of(kernel, self.levels, self.stages, number)
        if not (reductions or stores or columns):
            return
        computed = self.plan.passes[number]
        read = {operand for value in computed for operand in operands(kernel.body[value])}
        read |= {reduce.value for reduce in reductions.values()} | {column.value for column in columns.values()}
        read |= {store.value for store in stores}
        *others, last = range(kernel.num_outer, len(kernel.ranges))
        size = kernel.ranges[last]
        in_parts = bool(reductions) and size > _PART
        for value, reduce in reductions.items():
            kind = COMPUTED[reduce.dtype]
            self._fill(out, 3, f"{kind} A{value}", identity(reduce.op, reduce.dtype))
            if tracks_nan(reduce):
                self._fill(out, 3, f"int N{value}", "0")
        for k, column in columns.items():
            if column.whole:
                self._fill(out, 3, f"{COMPUTED[column.dtype]} W{k}", identity(column.op, column.dtype))
        depth = 3
        for loop in others:
            out(depth, f"for (i64 i{loop} = 0; i{loop} < {kernel.ranges[loop]}; i{loop}++) {{")
            depth += 1
        bounds = "0", str(size)
        if in_parts:
            out(depth, f"for (i64 begin = 0; begin < {size}; begin += {_PART}) {{")
            depth += 1
            bounds = "begin", f"(begin + {_PART} < {size} ? begin + {_PART} : {size})"
            for value, reduce in reductions.items():
                self._fill(out, depth, f"{COMPUTED[reduce.dtype]} B{value}", identity(reduce.op, reduce.dtype))
        out(depth, f"for (i64 i{last} = {bounds[0]}; i{last} < {bounds[1]}; i{last}++) {{")
        sums = {k: column for k, column in columns.items() if not column.whole}
        for k, column in sums.items():
            out(depth + 1, f"{COMPUTED[column.dtype]} w{k} = {identity(column.op, column.dtype)};")
        self._open(write, depth + 1, read, [_SIMD + "".join(f" reduction(+:w{k})" for k in sums)])
        for value, reduce in reductions.items():
            array = "B" if in_parts else "A"
            out(depth + 2, f"{COMPUTED[reduce.dtype]}& b{value} = {array}{value}[lane];")
            if tracks_nan(reduce):
                out(depth + 2, f"int& n{value} = N{value}[lane];")
        for k, column in columns.items():
            if column.whole:
                out(depth + 2, f"{COMPUTED[column.dtype]}& w{k} = W{k}[lane];")
        write.body(depth + 2, number)
        out(depth + 1, "}")
        for k in sums:
            out(depth + 1, folded("sum", f"l{k}[{row_position(kernel)}]", f"w{k}"))
        out(depth, "}")
        if in_parts:
            for value, reduce in reductions.items():
                text = combined(reduce.op, f"A{value}[lane]", f"B{value}[lane]")
                out(depth, f"for (i64 lane = 0; lane < {_LANES}; lane++) {text}")
            depth -= 1
            out(depth, "}")
        for _ in others:
            depth -= 1
            out(depth, "}")
        for k, column in columns.items():
            if column.whole:
                out(3, f"for (i64 lane = 0; lane < {_LANES}; lane++) {folded(column.op, f'l{k}[0]', f'W{k}[lane]')}")
        if reductions:
            self._open(write, 3, ())
            for value, reduce in reductions.items():
                out(4, f"const {COMPUTED[reduce.dtype]} a{value} = A{value}[lane];")
                if tracks_nan(reduce):
                    out(4, f"const int n{value} = N{value}[lane];")
                out(4, cpp_reductions.end(value, reduce))
                out(4, f"y{value}[lane] = v{value};")
            out(3, "}")

    def _fill(self, out: Callable[[int, str], None], depth: int, array: str, value: str) -> None:
        name = array.split()[-1]
        out(depth, f"alignas({CACHE_LINE}) {array}[{_LANES}];")
        out(depth, f"for (i64 lane = 0; lane < {_LANES}; lane++) {name}[lane] = {value};")


def _runs(kernel: KernelIR) -> int:
    """How many iterations of the loops that sums over rows keep; 0 where they keep none."""
    kept = max((column.kept for column in kernel.columns), default=0)
    return math.prod(kernel.ranges[:kept]) if kept else 0


def _stored(dtype: torch.dtype) -> str:
    """Of truth values in memory g++ makes no vectors."""
    return "int" if dtype is torch.bool else COMPUTED[dtype]


def find_lanes(kernel: KernelIR, levels: Sequence[Level], stages: Sequence[int], plan: PassPlan) -> Lanes | None:
    """None where neighbours in memory are not those of rows, or rows have more than sums and extrema."""
    last, loop = len(kernel.ranges) - 1, kernel.num_outer - 1
    reductions = [instruction for instruction in kernel.body if isinstance(instruction, Reduce)]
    if loop < 0 or last <= loop or kernel.ranges[loop] < _FEWEST:
        return None
    if not (reductions or kernel.columns or _is_tiny(kernel)):
        return None
    if any(reduce.op not in _REDUCTIONS for reduce in reductions):
        return None
    if (
        any(column.op != "sum" or column.apart for column in kernel.columns)
        or len({column.kept for column in kernel.columns}) > 1
    ):
        return None
    if kernel.parts or any(column.kept > loop for column in kernel.columns) or 0 < _runs(kernel) < _FEWEST_RUNS:
        return None
    loads, stores, across = list[int](), list[int](), list[int]()
    for value, instruction in enumerate(kernel.body):
        if isinstance(instruction, Compute) and (
            instruction.op in _SPECIAL or (instruction.op == "checked" and levels[value] is Level.ELEMENT)
        ):
            return None
        if isinstance(instruction, Load) and levels[value] is Level.ELEMENT:
            if instruction.guard is not None or instruction.address.indirect:
                return None
            offset = instruction.address.offset
            size = instruction.dtype.itemsize
            if offset.coefficient(loop) == 1:
                across.append(size * offset.coefficient(last))
            elif offset.coefficient(last) == 1 and offset.coefficient(loop) > 1:
                loads.append(value)
    for number, store in enumerate(kernel.stores):
        if store.address.indirect:
            return None
        if is_element(kernel, levels, store):
            offset = store.address.offset
            if offset.coefficient(loop) == 1:
                across.append(kernel.parameters[store.buffer].dtype.itemsize * offset.coefficient(last))
            elif offset.coefficient(last) == 1 and offset.coefficient(loop) > 1:
                stores.append(number)
    far = [step for step in across if not stays_near(step, kernel.row_size)]
    worth_it = bool(far) or len(across) > len(loads) + len(stores)
    if not worth_it and not (_is_short(kernel.row_size) if reductions else _is_tiny(kernel)):
        return None
    num_bytes = sum(kernel.body[value].dtype.itemsize for value in (*plan.holds, *loads))
    num_bytes += sum(kernel.body[kernel.stores[number].value].dtype.itemsize for number in stores)
    if num_bytes * kernel.row_size * _LANES > _MOST_HELD:
        return None
    return Lanes(kernel, levels, stages, plan, tuple(loads), tuple(stores))


def _is_short(size: int) -> bool:
    """Whether a good part of a row's vectors would be empty."""
    return size < 64 and size % 16 != 0


def _is_tiny(kernel: KernelIR) -> bool:
    """Whether hardly any vector would be filled, of a row whose elements cost much more than to copy them."""
    costs = sum(cost_of(instruction.op) for instruction in kernel.body if isinstance(instruction, Compute))
    return kernel.row_size < 8 and costs >= _DEAR
