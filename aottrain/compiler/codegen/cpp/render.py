"""Render a KernelIR as a C++ function: rows in parallel by OpenMP, the row's innermost loop in SIMD.

A row is passed over as often as its reductions depend on each other. What a later pass needs and is costly to compute
again is held in a row buffer on the stack. Reductions over rows are summed per thread, and then over threads in order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial

import torch

from aottrain.compiler.codegen.cpp import reductions as cpp_reductions
from aottrain.compiler.codegen.cpp.circular import with_far_angles
from aottrain.compiler.codegen.cpp.columns import Columns
from aottrain.compiler.codegen.cpp.lanes import Lanes, Writers, find_lanes
from aottrain.compiler.codegen.cpp.pragmas import parameters, pointers_of, simd
from aottrain.compiler.codegen.cpp.segments import (
    Segment,
    address_in_any_case,
    conditions_of,
    cut_segments,
    is_uniform,
    once_for_each,
)
from aottrain.compiler.codegen.cpp.text import (
    COMPUTED,
    NARROW,
    SELECTING,
    STORED,
    address_text,
    affine_text,
    arguments,
    arithmetic,
    decoded,
    folded,
    holds,
    identity,
    literal,
    loaded,
    rounded,
    row_position,
    run_of_draws,
    to_stored,
)
from aottrain.compiler.codegen.cpp.tiles import Copies, Pieces, Scattered, Tile, find_pieces, find_scattered, find_tile
from aottrain.compiler.codegen.cpp.work import LONGEST_BUFFER, Work, plan_row, skip_row, skipping_of, work_of
from aottrain.compiler.codegen.row_passes import is_element
from aottrain.ir.kernels.alignment import CACHE_LINE
from aottrain.ir.kernels.columns import by_memory
from aottrain.ir.kernels.kernel import (
    Compute,
    Constant,
    KernelIR,
    Level,
    Load,
    Position,
    Reduce,
    Store,
    draw_constants,
    levels,
    stages,
)
from aottrain.ir.kernels.open_sizes import numbered, size_names
from aottrain.ir.sizes.polynomials import is_open

# Below this many elements a kernel runs on the calling thread: starting the others costs more.
_PARALLEL_FROM = 16384
# Loops of so many elements are written once for each part of a concatenation or the like.
_BRANCHED_FROM = 32
_FLUSH_ELEMENTS = 4096  # of a row, whose partial sum is added up on its own: keeps errors small


class Renderer:
    def __init__(self, kernel: KernelIR):
        kernel = by_memory(kernel)
        self.levels, self.stages = levels(kernel), stages(kernel)
        self.skipping = skipping_of(kernel, self.levels)
        self.kernel = kernel = self.skipping.kernel if self.skipping else kernel
        size = kernel.num_rows * kernel.row_size
        self.parallel = is_open(size) or size >= _PARALLEL_FROM
        self.clauses = f" if({size} >= {_PARALLEL_FROM})" * is_open(size) + " num_threads(num_threads)"
        reduces = any(isinstance(i, Reduce) for i in kernel.body)
        self.single = not (reduces or kernel.sums) and kernel.num_outer == 0 and self.parallel
        self.plan, self.buffers = plan_row(kernel, self.single)
        self.pointers = pointers_of(kernel)
        self.draws, self.sizes = draw_constants(kernel), size_names(kernel)
        self.lines: list[str] = []
        self.columns = Columns(kernel, self._out)
        # Of the innermost loop, while it is rendered; and the values that are computed before it.
        self.segment: Segment | None = None
        self.tile: Tile | None = None
        self.lanes: Lanes | None = None
        self.pieces: Pieces | None = None  # of the pass that is rendered
        self.scattered: Scattered | None = None  # of the innermost loop that is rendered
        self.ready = set[int]()

    def render(self) -> str:
        kernel = self.kernel
        parallel = self.parallel
        self._out(0, f"static int {kernel.name}(void* const* p, char* scratch, int num_threads) {{")
        self._lines(1, parameters(kernel, self.pointers))
        if self.draws:
            self._out(1, f"const i64* const draws = (const i64*)p[{len(kernel.parameters)}];")
        self._lines(1, arguments(self.sizes, len(kernel.parameters) + bool(self.draws)))
        self._out(1, "i64 failed = 0;")
        self._values(1, Level.CONSTANT, 0)
        if not is_open(*kernel.ranges) and self.skipping is None:
            self.tile = find_tile(kernel, self.levels, self.plan) if parallel else None
            self.lanes = find_lanes(kernel, self.levels, self.stages, self.plan)
        if self.tile is not None:
            element = partial(self._body, number=0, work=self._work(0), base=None, running="b")
            self.tile.render(self._out, partial(self._values, level=Level.ROW, stage=0), element)
        elif self.single:
            self._single(parallel)
        elif self.lanes is not None:
            writers = Writers(self._out, self._define, self._lane, self._store, self.columns)
            self.lanes.render(writers, self.buffers, parallel)
        else:
            self._rows(parallel and kernel.num_rows > 1)
        self._out(1, "return failed != 0;")
        self._out(0, "}")
        return numbered("\n".join(self.lines) + "\n", self.sizes)

    def _single(self, parallel: bool) -> None:
        """No rows, no reductions: one long loop, in blocks."""
        size = self.kernel.row_size
        self._out(1, f"#pragma omp parallel for schedule(static) reduction(|:failed){self.clauses}")
        blocks = f"({size} + 4095) / 4096" if is_open(size) else f"{-(-size // 4096)}"
        self._out(1, f"for (i64 block = 0; block < {blocks}; block++) {{")
        self._out(2, f"const i64 begin = block * 4096, end = begin + 4096 < {size} ? begin + 4096 : {size};")
        for value, before in self.plan.holds.items():
            if before == -1:
                self._out(2, f"alignas({CACHE_LINE}) float r{self.buffers[value]}[4096];")
                self._run(2, value, "begin", "end - begin")
        self._pass(2, 0, ("begin", "end"), "begin")
        self._out(1, "}")

    def _rows(self, parallel: bool) -> None:
        kernel = self.kernel
        if parallel:
            self._out(1, f"#pragma omp parallel{self.clauses} reduction(|:failed)")
        self._out(1, "{")
        own = "omp_get_thread_num(), threads = omp_get_num_threads()" if parallel else "0, threads = 1"
        self._out(2, f"const i64 thread = {own};")
        self._out(2, f"const i64 begin = {kernel.num_rows} * thread / threads;")
        self._out(2, f"const i64 end = {kernel.num_rows} * (thread + 1) / threads;")
        longest = LONGEST_BUFFER if is_open(kernel.row_size) else kernel.row_size
        for buffer, kind in sorted({(self.buffers[v], COMPUTED[kernel.body[v].dtype]) for v in self.plan.holds}):
            self._out(2, f"alignas({CACHE_LINE}) {kind} r{buffer}[{longest}];")
        depth = self.columns.start(2)
        self._out(depth - 1, f"for (i64 row = {self.columns.first}; row < {self.columns.last}; row++) {{")
        loops = range(kernel.num_outer)
        self._lines(depth, decoded("row", [f"i{loop}" for loop in loops], [kernel.ranges[loop] for loop in loops]))
        self.columns.row(depth)
        self._values(depth, Level.ROW, 0)
        for value, before in self.plan.holds.items():
            if before == -1:
                self._run(depth, value, None, str(kernel.row_size))
        for number in range(len(self.plan.passes)):
            self._pass(depth, number, None, None)
            self._values(depth, Level.ROW, number + 1)
        self._row_stores(depth)
        self._out(depth - 1, "}")
        self.columns.end(2, parallel)
        self._out(1, "}")

    def _values(self, depth: int, level: Level, stage: int) -> None:
        """Values of a level that are known once the passes before `stage` are done."""
        for value, instruction in enumerate(self.kernel.body):
            if self.levels[value] is not level or isinstance(instruction, Reduce):
                continue
            if level is Level.ROW and self.stages[value] != stage:
                continue
            self._define(depth, value)
            if self.skipping is not None and value == self.skipping.guard:
                skip_row(self.skipping, depth, self._out, self._store)

    def _define(self, depth: int, value: int) -> None:
        instruction = self.kernel.body[value]
        # A truth that is known before the elements is a number: g++ cannot make one of it within vectors.
        is_truth = instruction.dtype == torch.bool
        kind = "i32" if is_truth and self._is_known_before(value) else COMPUTED[instruction.dtype]
        if isinstance(instruction, Compute) and instruction.op == "checked":
            index, size = (f"v{v}" for v in instruction.args)
            self._out(depth, f"const i64 v{value} = ({index} < -{size}) | ({index} >= {size}) ? 0 : {index};")
            # Not the condition itself: g++ 12 adds up wrong vectors of one that numbers of two widths depend on.
            self._out(depth, f"failed |= ({index} ^ v{value}) | ({size} == 0);")
            return
        if self.segment is not None and value in self.segment.answers:
            self._out(depth, f"const {kind} v{value} = {literal(self.segment.answers[value], torch.bool)};")
            return
        parts = address_in_any_case(self.kernel, self.levels, instruction, self.segment)
        if isinstance(instruction, Load) and parts is not None:
            text = loaded(instruction.dtype, f"q{value}", affine_text(parts[1]))
            other = literal(instruction.other, instruction.dtype)
            self._out(depth, f"const {kind} e{value} = {text};")
            self._out(depth, f"const {kind} v{value} = blend_(v{instruction.guard}, e{value}, {other});")
            return
        self._out(depth, f"const {kind} v{value} = {self._expression(value)};")

    def _run(self, depth: int, value: int, begin: str | None, count: str) -> None:
        arguments = run_of_draws(self.kernel, value, begin, count)
        self._out(depth, f"{arguments}, r{self.buffers[value]});")

    def _pass(self, depth: int, number: int, bounds: tuple[str, str] | None, base: str | None) -> None:
        """One pass over the row: the values that it needs, its stores, its reductions."""
        kernel = self.kernel
        work = self._work(number)
        if not any(work):
            return
        self._lines(depth, cpp_reductions.start(work))
        self.pieces = find_pieces(kernel, self.levels, self.plan.passes[number], work.stores)
        if self.pieces is None:
            self._nest(depth, bounds, number, work, base)
        else:
            self.pieces.render(self._out, depth, partial(self._nest, number=number, work=work, base=base))
            self.pieces = None
        self._lines(depth, (cpp_reductions.end(value, reduce) for value, reduce in work.reductions.items()))

    def _nest(self, depth: int, bounds: tuple[str, str] | None, number: int, work: Work, base: str | None) -> None:
        """The loops of a row. bounds: of the innermost."""
        inner = range(self.kernel.num_outer, len(self.kernel.ranges))
        for loop in inner[:-1]:
            self._lines(depth, cpp_reductions.start_parts(self.kernel, work, loop))
            self._out(depth, f"for (i64 i{loop} = 0; i{loop} < {self.kernel.ranges[loop]}; i{loop}++) {{")
            depth += 1
        if inner:
            self._lines(depth, cpp_reductions.start_parts(self.kernel, work, inner[-1]))
            self._loop(depth, number, work, inner[-1], bounds, base)
            self._lines(depth, cpp_reductions.end_parts(self.kernel, work, inner[-1]))
        else:
            self._body(depth, number, work, base, "a")
        for loop in reversed(inner[:-1]):
            depth -= 1
            self._out(depth, "}")
            self._lines(depth, cpp_reductions.end_parts(self.kernel, work, loop))

    @property
    def _copies(self) -> Tile | Lanes | Copies | None:
        return self.tile or self.lanes or self.pieces or self.scattered

    def _computed(self, number: int) -> list[int]:
        """What a pass does not read back."""
        return [v for v in self.plan.passes[number] if self.plan.holds.get(v, number) == number]

    def _work(self, number: int) -> Work:
        return work_of(self.kernel, self.levels, self.stages, number)

    def _loop(
        self, depth: int, number: int, work: Work, last: int, bounds: tuple[str, str] | None, base: str | None
    ) -> None:
        """The innermost loop, its reductions in one vector each; of a long row in parts."""
        kernel = self.kernel
        size = kernel.ranges[last]
        wholes = {k: column for k, column in work.columns.items() if column.whole}
        ends = bounds or ("0", str(size))
        sums = any((work.reductions, wholes, work.parts))
        flushed = bounds is None and sums and (is_open(size) or size > _FLUSH_ELEMENTS)
        if flushed:
            self._out(depth, f"for (i64 part = 0; part < {size}; part += {_FLUSH_ELEMENTS}) {{")
            depth += 1
            ends = "part", f"(part + {_FLUSH_ELEMENTS} < {size} ? part + {_FLUSH_ELEMENTS} : {size})"
        for k, column in wholes.items():
            self._out(depth, f"{COMPUTED[column.dtype]} w{k} = {identity(column.op, column.dtype)};")
        self._lines(depth, cpp_reductions.start_loop(work))
        pragma = simd([kernel.body[v] for v in self.plan.passes[number]], work, wholes)
        cut = bounds is None and not flushed
        for segment in cut_segments(kernel, self.plan.passes[number]) if cut else [Segment(0, size)]:
            self.segment = segment
            self._out(depth, "{")
            self._uniform_values(depth + 1, number, segment)
            if cut and not self._copies:
                self.scattered = find_scattered(kernel, self.levels, self._computed(number), work)
            begin, end = self.scattered.around(segment) if self.scattered else ((), ())
            self._lines(depth + 1, begin)
            first_line = len(self.lines)
            self._lines(depth, pragma)
            first, stop = (str(segment.start), str(segment.stop)) if cut else ends
            self._out(depth, f"for (i64 i{last} = {first}; i{last} < {stop}; i{last}++) {{")
            self._body(depth + 1, number, work, base, "b", wholes)
            self._out(depth, "}")
            rendered = self.lines[first_line:]
            held = {value for value, before in self.plan.holds.items() if before < number}
            values = self.plan.passes[number]
            rendered = with_far_angles(kernel, self.levels, values, held, rendered)
            branched = is_open(size) or segment.stop - segment.start >= _BRANCHED_FROM
            conditions = conditions_of(kernel, self.levels, values) if branched and self.skipping is None else []
            self.lines[first_line:] = once_for_each("  " * depth, conditions, rendered)
            self._lines(depth + 1, end)
            self.scattered = None
            self._out(depth, "}")
        self.segment, self.ready = None, set()
        for k, column in wholes.items():
            self._out(depth, folded(column.op, f"l{k}[0]", f"w{k}"))
        self._lines(depth, cpp_reductions.join(work))
        if flushed:
            self._out(depth - 1, "}")

    def _uniform_values(self, depth: int, number: int, segment: Segment) -> None:
        """What is the same for all elements of a segment; and where in memory loads begin whose guards are: at an
        address that may be read in any case, for compilers make no vectors of a choice whether to read."""
        kernel, answers = self.kernel, segment.answers
        computed = self._computed(number)
        self.ready = {
            v for v in computed if self.levels[v] is Level.ELEMENT and is_uniform(kernel, self.levels, answers, v)
        }
        for value in sorted(self.ready):
            self._define(depth, value)
        for value in computed:
            load = kernel.body[value]
            if isinstance(load, Load) and (parts := address_in_any_case(kernel, self.levels, load, segment)):
                kind = STORED[load.dtype]
                start = f"p{load.buffer} + (v{load.guard} ? {address_text(kernel, parts[0])} : 0)"
                self._out(depth, f"const {kind}* const q{value} = {start};")

    def _body(
        self, depth: int, number: int, work: Work, base: str | None, running: str, wholes: Container[int] = ()
    ) -> None:
        """What is done for each element. running: what the names of running results begin with."""
        position = row_position(self.kernel, base)
        position = self.lanes.held(position) if self.lanes else position
        for value in self.plan.passes[number]:
            if value in self.plan.holds and self.plan.holds[value] < number:
                kind = COMPUTED[self.kernel.body[value].dtype]
                self._out(depth, f"const {kind} v{value} = r{self.buffers[value]}[{position}];")
                continue
            if value not in self.ready:
                self._define(depth, value)
            if value in self.plan.holds:
                self._out(depth, f"r{self.buffers[value]}[{position}] = v{value};")
        for store in work.stores:
            self._store(depth, store)
        self._lines(depth, cpp_reductions.accumulate(work, running))
        for k, column in work.columns.items():
            target = f"w{k}" if k in wholes else f"{self.columns.name(k)}[{row_position(self.kernel)}]"
            self._out(depth, folded(column.op, target, f"v{column.value}"))

    def _lane(self, depth: int, number: int) -> None:
        self._body(depth, number, self._work(number), None, "b", range(len(self.kernel.columns)))

    def _row_stores(self, depth: int) -> None:
        for store in self.kernel.stores:
            if not is_element(self.kernel, self.levels, store):
                self._store(depth, store)

    def _store(self, depth: int, store: Store) -> None:
        dtype = self.kernel.parameters[store.buffer].dtype
        text = to_stored(dtype, f"v{store.value}", self.kernel.body[store.value])
        tile_element = copies.written(store) if (copies := self._copies) else None
        self._out(depth, f"{tile_element or f'p{store.buffer}[{address_text(self.kernel, store.address)}]'} = {text};")

    def _expression(self, value: int) -> str:
        instruction = self.kernel.body[value]
        if isinstance(instruction, Load):
            if (copies := self._copies) and value in copies.loads:
                return copies.read(value)
            text = loaded(instruction.dtype, self.pointers[value], address_text(self.kernel, instruction.address))
            if instruction.guard is None:
                return text
            return f"v{instruction.guard} ? {text} : {literal(instruction.other, instruction.dtype)}"
        if value in self.draws:
            return f"draws[{self.draws.index(value)}]"
        if isinstance(instruction, Constant):
            return literal(instruction.value, instruction.dtype)
        if isinstance(instruction, Position):
            return affine_text(instruction.offset)
        assert isinstance(instruction, Compute)
        operands = [self.kernel.body[v] for v in instruction.args]
        in_loop = self.levels[value] is Level.ELEMENT
        known_before = in_loop and self._is_known_before(instruction.args[0])
        text = arithmetic(instruction, [i.dtype for i in operands], in_loop, known_before)
        if instruction.dtype in NARROW and instruction.op in SELECTING:
            chosen = operands[1:] if instruction.op == "where" else operands
            if all(holds(operand, instruction.dtype) for operand in chosen):
                return text
        return rounded(instruction.dtype, text)

    def _is_known_before(self, value: int) -> bool:
        known = self.levels[value] is not Level.ELEMENT or value in self.ready
        return known and not (self.skipping and value == self.skipping.guard)  # in all rows that are left, that holds

    def _lines(self, depth: int, texts: Iterable[str]) -> None:
        for text in texts:
            self._out(depth, text)

    def _out(self, depth: int, text: str) -> None:
        self.lines.append("  " * depth + text)


def render_cpp(kernel: KernelIR) -> str:
    """A C++ function `int NAME(void* const* p, char* scratch, int num_threads)`, which is 1 for an index out of range.

    p: the parameters' memory and, where it draws, that of its `draw_numbers`, and that of its sizes, if it has any, in
    the order of `size_names`; scratch: `scratch_bytes` for each thread.
    """
    return Renderer(kernel).render()
