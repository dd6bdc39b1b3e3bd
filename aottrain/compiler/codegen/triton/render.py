"""Render a KernelIR as a Triton module: one kernel, and one for each reduction over rows that sums its partial results.

A kernel without reductions has one flat loop over all elements. Otherwise a tile is a number of rows by their elements:
values of a row are (rows, 1), and what rows share is (1, width), so that plain broadcasting joins them. Rows that fit
are loaded into registers once. Longer rows are looped over, pass by pass, and computed again in each pass. Reductions
over rows are deterministic: each program adds its own rows into a partial result in a scratch buffer, and a second
kernel adds these in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from aottrain.compiler.codegen.row_passes import is_element, plan_passes
from aottrain.compiler.codegen.triton.columns import Columns
from aottrain.compiler.codegen.triton.index import COL, ROW, Axes, Indices
from aottrain.compiler.codegen.triton.text import (
    COMPUTED,
    STORED,
    arithmetic,
    filling,
    folded,
    identity,
    literal,
    option,
    reduced,
    rounded,
    stored,
)
from aottrain.compiler.codegen.triton.tiles import choose_tile
from aottrain.ir.kernels.kernel import (
    DRAWS,
    Address,
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
    operands,
    stages,
)
from aottrain.ir.kernels.open_sizes import size_names
from aottrain.ir.sizes.polynomials import PREFIX, likely, same

# Values of a row that are there at once between its reductions, on the way to others.
_BETWEEN = 4
HEADER = """\
import triton
import triton.language as tl

from aottrain.ops.triton import functions as fn

"""


class Renderer:
    def __init__(self, kernel: KernelIR):
        assert not kernel.parts, "no rule that Triton's kernels have adds up parts of rows"
        self.kernel = kernel
        self.levels, self.stages = levels(kernel), stages(kernel)
        self.tile = choose_tile(kernel)
        self.index = Indices(kernel, self.tile)
        self.axes = self._axes()
        self.draws = draw_constants(kernel)
        self.lines: list[str] = []
        self.columns = Columns(kernel, self.tile, self.index, self._masked, self._out)

    def _axes(self) -> list[Axes]:
        """The tile's dimensions along which each value varies."""
        axes: list[Axes] = []
        for instruction in self.kernel.body:
            if isinstance(instruction, Reduce):
                axes.append(frozenset({ROW}))
                continue
            own: Axes = frozenset().union(*(axes[v] for v in operands(instruction)))
            if isinstance(instruction, Load):
                own |= self.index.axes_of(instruction.address.offset)
            elif isinstance(instruction, Position):
                own |= self.index.axes_of(instruction.offset)
            axes.append(own)
        return axes

    def render(self, name: str) -> str:
        kernel, tile, columns = self.kernel, self.tile, self.columns
        parameters = [*(f"p{i}" for i in range(len(kernel.parameters))), *columns.buffers]
        draws = [f"d{i}" for i in range(len(self.draws))]
        self._out(0, f"@triton.jit(do_not_specialize={draws!r})" if draws else "@triton.jit")
        self._out(0, f"def {name}({', '.join([*parameters, *(f'{draw}: tl.int64' for draw in draws)])}):")
        parameters += draws
        if tile.flat:
            self._flat()
        else:
            self._rows()
        launches = [(name, tile.num_programs, tile.num_warps, parameters, self._take_sizes(0))]
        first = len(self.lines)
        for launch in columns.finish(name):
            launches.append((*launch, self._take_sizes(first)))
            first = len(self.lines)
        self._out(0, "\n")
        self._out(0, "# Type and elements of each scratch buffer; each kernel, its programs and warps, its arguments.")
        if sizes := size_names(kernel):
            self._launches_of_sizes(sizes, launches)
            return tile.derived.numbered("\n".join(self.lines) + "\n")
        self._out(0, f"SCRATCH = {tuple(columns.sizes)!r}")
        self._out(0, "LAUNCHES = (")
        for kernel_name, programs, warps, names, _ in launches:
            self._out(1, f"({kernel_name}, {programs}, {warps}, {tuple(names)!r}),")
        self._out(0, ")")
        return "\n".join(self.lines) + "\n"

    def _take_sizes(self, first: int) -> list[str]:
        """Make arguments of the sizes in a function's text, which begins at a line. Returns them.

        Triton would compile another kernel for a size of 1, and for multiples of 16: of these it is told nothing.
        """
        names = self.tile.derived.used(self.lines[first:])
        if names:
            head = next(i for i in range(first, len(self.lines)) if self.lines[i].startswith("@triton.jit"))
            draws = [f"d{i}" for i in range(len(self.draws))] if head == 0 else []
            self.lines[head] = f"@triton.jit(do_not_specialize={[*draws, *names]!r})"
            self.lines[head + 1] = f"{self.lines[head + 1].removesuffix('):')}, {', '.join(names)}):"
            wide = [f"    {name} = {name}.to(tl.int64)" for name in names if self.tile.wide]
            self.lines[head + 2 : head + 2] = wide
        return names

    def _launches_of_sizes(
        self, sizes: Sequence[str], launches: Sequence[tuple[str, Any, int, list[str], list[str]]]
    ) -> None:
        """As the constants of a module for fixed sizes, as a function of a call's; a kernel's numbers follow its
        arguments."""
        self._out(0, f"def launches({', '.join(PREFIX + name for name in sizes)}):")
        self._all(1, self.tile.derived.lines)
        scratch = "".join(f"({kind!r}, {count}), " for kind, count in self.columns.sizes)
        self._out(1, f"scratch = ({scratch.rstrip()})")
        self._out(1, "return scratch, (")
        for name, programs, warps, names, numbers in launches:
            passed = "".join(f"{number}, " for number in numbers).rstrip()
            self._out(2, f"({name}, {programs}, {warps}, {tuple(names)!r}, ({passed})),")
        self._out(1, ")")

    def _flat(self) -> None:
        self._all(1, self.index.flat_lines())
        for value in range(len(self.kernel.body)):
            self._define(1, value)
        for store in self.kernel.stores:
            self._store(1, store)
        self.columns.start(1)
        for k, column in enumerate(self.kernel.columns):
            self.columns.accumulate(1, k, column)
        self.columns.end(1)

    def _rows(self) -> None:
        tile = self.tile
        self._all(1, self.index.program_lines())
        if not tile.swept:
            self._all(1, self.index.col_lines("part" if not same(tile.width_programs, 1) else None))
        early = self._early()
        for value in sorted(early):
            self._define(1, value)
        self.columns.start(1)
        depth = 1
        if not same(tile.rows_each, tile.rows):
            self._out(1, f"for step in range(0, {tile.rows_each}, {tile.rows}):")
            depth = 2
        self._all(depth, self.index.row_lines("step" if depth == 2 else None))
        if tile.swept:
            self._sweep(depth, early)
        else:
            self._at_once(depth, early)
        self.columns.end(1)

    def _early(self) -> set[int]:
        """Values that do not depend on the row, which are there before the first one, as far as registers hold them;
        the others, as a long row's many weights, are read again with each row, from a cache."""
        tile, early = self.tile, set[int]()
        left = 0 if tile.swept else (tile.left - self.columns.num_held - _BETWEEN) * tile.rows
        for value, axes in enumerate(self.axes):
            if ROW in axes or not early.issuperset(operands(self.kernel.body[value])):
                continue
            if axes and left <= 0:
                continue
            left -= bool(axes)
            early.add(value)
        return early

    def _at_once(self, depth: int, early: set[int]) -> None:
        """Rows that fit. What is stored or summed leaves its registers as soon as it is there."""
        body = self.kernel.body
        stores, columns = list(self.kernel.stores), list(enumerate(self.kernel.columns))
        # A buffer that is read again must not be written before.
        last_read = {load.buffer: position for position, load in enumerate(body) if isinstance(load, Load)}
        for value in range(len(body)):
            if value not in early:
                self._define(depth, value)
            ready = [s for s in stores if self._is_there(s, value) and last_read.get(s.buffer, -1) <= value]
            for store in ready:
                stores.remove(store)
                self._store(depth, store)
            for k, column in [(k, column) for k, column in columns if column.value == value]:
                self.columns.accumulate(depth, k, column)

    @staticmethod
    def _is_there(store: Store, value: int) -> bool:
        return max([store.value, *(index for index, _, _ in store.address.indirect)]) <= value

    def _sweep(self, depth: int, early: set[int]) -> None:
        """Passes along the rows, each after the rows' values that it needs."""
        kernel = self.kernel
        plan = plan_passes(kernel, can_hold=False)
        for stage in range(len(plan.passes) + 1):
            for value, instruction in enumerate(kernel.body):
                row = self.levels[value] is Level.ROW and not isinstance(instruction, Reduce)
                if row and self.stages[value] == stage and value not in early:
                    self._define(depth, value)
            if stage < len(plan.passes):
                self._pass(depth, stage, plan.passes[stage])
        for store in kernel.stores:
            if not is_element(kernel, self.levels, store):
                self._store(depth, store)

    def _pass(self, depth: int, stage: int, values: list[int]) -> None:
        kernel = self.kernel
        reductions = [(v, i) for v, i in enumerate(kernel.body) if isinstance(i, Reduce)]
        reductions = [(v, i) for v, i in reductions if self.stages[i.value] == stage]
        stores = [s for s in kernel.stores if is_element(kernel, self.levels, s) and self._store_stage(s) == stage]
        columns = [(k, c) for k, c in enumerate(kernel.columns) if self.stages[c.value] == stage]
        if not (reductions or stores or columns):
            return
        for value, instruction in reductions:
            start = identity(instruction.op, instruction.dtype)
            self._out(depth, f"a{value} = tl.full({self.index.shape}, {start}, {COMPUTED[instruction.dtype]})")
        self._out(depth, f"for start in range(0, {self._row_end()}, {self.tile.width}):")
        self._all(depth + 1, self.index.col_lines("start"))
        for value in values:
            self._define(depth + 1, value)
        for store in stores:
            self._store(depth + 1, store)
        for value, instruction in reductions:
            part = self._masked(instruction.value, instruction.op, frozenset({COL}))
            self._out(depth + 1, f"a{value} = {folded(instruction.op, f'a{value}', part, instruction.dtype)}")
        for k, column in columns:
            self.columns.accumulate(depth + 1, k, column)
        for value, instruction in reductions:
            self._out(depth, f"v{value} = {self._row_total(instruction, f'a{value}')}")

    def _row_end(self) -> str:
        return str(self.kernel.row_size)

    def _store_stage(self, store: Store) -> int:
        return max([self.stages[store.value], *(self.stages[v] for v, _, _ in store.address.indirect)])

    def _define(self, depth: int, value: int) -> None:
        instruction = self.kernel.body[value]
        if isinstance(instruction, Compute) and instruction.op == "checked":
            self._check(depth, value, instruction)
            return
        if isinstance(instruction, Reduce):
            part = self._masked(instruction.value, instruction.op, frozenset({COL}))
            self._out(depth, f"v{value} = {self._row_total(instruction, part)}")
            return
        self._out(depth, f"v{value} = {self._expression(value)}")

    def _check(self, depth: int, value: int, instruction: Compute) -> None:
        """A failed assertion on a device is reported by a later call, as eager's own are; nothing waits for it.

        The index is brought into range all the same, so that nothing else is read where assertions are left out.
        """
        index, size = (f"v{v}" for v in instruction.args)
        mask = self.index.mask(self.axes[value])
        self._out(depth, f"inside = ({index} >= -{size}) & ({index} < {size})")
        active = f"inside | ({mask} == 0)" if mask else "inside"
        self._out(depth, f"fn.check_index({active})")
        self._out(depth, f"v{value} = tl.where(inside, {index}, 0)")

    def _row_total(self, instruction: Reduce, text: str) -> str:
        total = f"{reduced(instruction.op, text, 1)}[:, None]"
        if not instruction.dtype.is_floating_point:
            return f"{total}.to({COMPUTED[instruction.dtype]})"
        return rounded(instruction.dtype, total)

    def _masked(self, value: int, op: str, over: Axes) -> str:
        """A value as a full tile, with what changes nothing where there is no element along the axes `over`."""
        dtype = self.kernel.body[value].dtype
        text = f"v{value}"
        if self.axes[value] != self.index.all_axes:
            text = f"tl.broadcast_to({text}, {self.index.shape})"
        mask = self.index.mask(over)
        return f"tl.where({mask}, {text}, {identity(op, dtype)})" if mask else text

    def _store(self, depth: int, store: Store) -> None:
        value = self.kernel.body[store.value].dtype
        target = self.kernel.parameters[store.buffer].dtype
        text = stored(f"v{store.value}", value, target)
        offset, axes = self._address(store.address, self.axes[store.value])
        pieces = [mask] if (mask := self.index.mask(axes)) else []
        if not same(self.tile.width_programs, 1) and not self.tile.flat and COL not in axes:
            # The first program of a row stores what the row has one of.
            pieces.append("(part + row * 0 == 0)" if ROW in axes else "(part == 0)")
        mask_text = option("mask", " & ".join(pieces))
        self._out(depth, f"tl.store(p{store.buffer} + {offset}, {text}{mask_text})")

    def _address(self, address: Address, other: Axes) -> tuple[str, Axes]:
        """Offset, of at least the shape of `other`, and the axes that it varies along."""
        parts = [self.index.text(address.offset)] if address.offset.terms or address.offset.constant else []
        axes = self.index.axes_of(address.offset)
        for value, stride, size in address.indirect:
            wrapped = f"tl.where(v{value} < 0, v{value} + {size}, v{value})"
            parts.append(wrapped if same(stride, 1) else f"{wrapped} * {stride}")
            axes |= self.axes[value]
        return self.index.shaped(" + ".join(parts) or "0", axes, other), axes | other

    def _expression(self, value: int) -> str:
        instruction = self.kernel.body[value]
        if isinstance(instruction, Load):
            return self._load(instruction)
        if value in self.draws:
            return f"d{self.draws.index(value)}.to(tl.int64)"
        if isinstance(instruction, Constant):
            return literal(instruction.value, instruction.dtype)
        if isinstance(instruction, Position):
            text = self.index.text(instruction.offset)
            if not instruction.offset.terms:
                return literal(instruction.offset.constant, torch.int64)
            return f"({text}).to(tl.int64)"
        assert isinstance(instruction, Compute)
        if instruction.op in DRAWS:
            return self._draw(instruction)
        kinds = [self.kernel.body[v].dtype for v in instruction.args]
        text = arithmetic(instruction, kinds)
        if instruction.dtype is torch.bool and not self.axes[value]:
            text = f"fn.truth({text})"
        return rounded(instruction.dtype, text)

    def _draw(self, instruction: Compute) -> str:
        seed, number_, element = instruction.args
        position = self.kernel.body[element]
        if isinstance(position, Position) and self.index.is_run(position.offset):
            block = self.index.block_text(position.offset)
            return f"fn.{instruction.op}_run(v{seed}, v{number_}, {block})"
        return f"fn.{instruction.op}(v{seed}, v{number_}, v{element})"

    def _load(self, load: Load) -> str:
        guard: Axes = frozenset() if load.guard is None else self.axes[load.guard]
        offset, axes = self._address(load.address, guard)
        pieces = [mask] if (mask := self.index.mask(axes)) else []
        if load.guard is not None:
            pieces.append(f"v{load.guard}")
        options = ""
        if pieces:
            options = f", mask={' & '.join(pieces)}, other={filling(load.other, load.dtype)}"
        text = f"tl.load(p{load.buffer} + {offset}{options})"
        return text if STORED[load.dtype] == COMPUTED[load.dtype] else f"{text}.to({COMPUTED[load.dtype]})"

    def _all(self, depth: int, lines: Iterable[str]) -> None:
        for line in lines:
            self._out(depth, line)

    def _out(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)


def kernel_title(kernel: KernelIR) -> str:
    """A function's name from the calls that the kernel does, for profiles."""
    calls = [match.group(1) for source in kernel.sources if (match := re.match(r"\S+ = \w+\.(\w+)", source))]
    names = dict.fromkeys(call.strip("_") for call in calls or ["kernel"])
    return "_".join(["triton", *names])[:60].rstrip("_")


def partial_bytes(kernel: KernelIR) -> int:
    """Of the scratch buffers that a launch allocates, for sizes that each call has its own of as they were traced."""
    sizes = Renderer(kernel).columns.sizes
    return sum(likely(count) * (1 if name == "int1" else getattr(torch, name).itemsize) for name, count in sizes)


def render_code(kernel: KernelIR) -> str:
    """The module without the comment that names the graph's values: equal for equal kernels."""
    return HEADER + "\n" + Renderer(kernel).render(kernel_title(kernel))


def render_triton(kernel: KernelIR) -> str:
    """A Python module: the kernels, SCRATCH and LAUNCHES. Its comment has the formula, the shapes and the sources."""
    comment = "".join(f"# {line}\n" for line in str(kernel).splitlines() if line.strip())
    return comment + render_code(kernel)
