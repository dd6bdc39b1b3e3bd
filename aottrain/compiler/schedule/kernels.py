"""lower: one group of calls becomes one KernelIR."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

import aottrain.ops.random.philox  # noqa: F401  # defines operators
from aottrain.compiler.lowering import Builder
from aottrain.compiler.schedule.demand import is_read
from aottrain.compiler.schedule.grouping.alike import once_for_alike, sources_of
from aottrain.compiler.schedule.grouping.groups import Group, Member
from aottrain.compiler.schedule.layouts import layout_of, result_nodes, results_of
from aottrain.compiler.schedule.simplification import simplified
from aottrain.ir.graph import may_raise, required_spec, spec_of, value_of
from aottrain.ir.kernels.affine import ZERO, Affine, offset_of
from aottrain.ir.kernels.columns import moved, steps
from aottrain.ir.kernels.kernel import (
    Address,
    Column,
    Compute,
    KernelIR,
    Load,
    Parameter,
    Part,
    Position,
    Store,
    extent,
    is_draw,
    is_run,
)
from aottrain.ir.kernels.verify import verify_kernel
from aottrain.ir.schedule import KernelCall
from aottrain.ir.sizes.polynomials import is_open, likely, same

# Of the rows that a long loop is cut into: they stay in the nearest cache.
_LONGEST_ROW = 4096
# Rows of draws that fit into fast memory, and those that are as fast as a longer one.
_LONGEST_RUN, _SHORT_RUN = 1 << 16, 256
# Elements of one type that a processor handles at once: of float32 in 64 bytes.
_VECTOR = 16


class _Buffers:
    """Parameters in the order in which they are met."""

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []
        self.numbers: dict[fx.Node, int] = {}

    def number(self, node: fx.Node) -> int:
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]


def lower(group: Group, name: str = "kernel") -> KernelCall:
    """The group as one loop nest. What nothing outside the group reads never leaves the kernel's registers."""
    escapes = _escaping(group)
    return once_for_alike(lambda: _lowered(group, name, escapes), group, name, escapes)


def _lowered(group: Group, name: str, escapes: set[fx.Node]) -> KernelCall:
    builder, buffers = Builder(), _Buffers()

    def resolve(node: fx.Node, index: Sequence[Affine]) -> tuple[int, Affine]:
        layout = layout_of(node)
        assert layout is not None
        return buffers.number(layout.root), offset_of(index, layout.stride, layout.start)

    builder.resolve = resolve
    values: dict[fx.Node, int] = {}
    stores: list[tuple[fx.Node, Affine, int]] = []
    columns: list[tuple[fx.Node, Member, int, int]] = []
    parts: list[tuple[fx.Node, Affine, int, torch.dtype]] = []
    for member in group.members:
        builder.index = member.index
        arguments = [_operand(builder, buffers, group, member, i, values) for i in range(len(member.rule.operands))]
        computed = member.rule.formula(builder, arguments)
        for k, (item, value) in enumerate(zip(result_nodes(member.node, member.rule), computed, strict=True)):
            if item is None:
                continue
            values[item] = value
            if item not in escapes:
                continue
            output = member.rule.outputs[k]
            position = group.parts[item][k] if member.rule.in_parts else group.values[item]
            if output.column is not None:
                columns.append((item, member, k, value))
            elif output.within:
                parts.append((item, position, value, output.dtype))
            else:
                stores.append((item, position, value))
    written = [*(item for item, *_ in stores), *(item for item, *_ in columns), *(item for item, *_ in parts)]
    for item in written:
        buffers.number(item)
    kernel = KernelIR(
        name=name,
        ranges=tuple(group.loops.values()),
        num_outer=0,
        parameters=(),
        body=tuple(builder.body),
        stores=tuple(Store(buffers.number(item), Address(position), value) for item, position, value in stores),
        columns=tuple(_column(group, buffers.number(item), item, m, k, value) for item, m, k, value in columns),
        parts=tuple(Part(buffers.number(item), Address(at), value, dtype) for item, at, value, dtype in parts),
        sources=sources_of(group),
    )
    kernel = _ordered(simplified(kernel), group)
    loaded = {load.buffer for load in kernel.body if isinstance(load, Load)}
    used = sorted(loaded | {buffers.number(n) for n in written})
    kernel = _renumbered(kernel, used)
    nodes = tuple(buffers.nodes[i] for i in used)
    spans = [_span(kernel, buffer, node, node in written) for buffer, node in enumerate(nodes)]
    parameters = [_parameter(node, span, node in written) for node, span in zip(nodes, spans, strict=True)]
    kernel = replace(kernel, parameters=tuple(parameters))
    verify_kernel(kernel)
    return KernelCall(kernel, nodes)


def _escaping(group: Group) -> set[fx.Node]:
    """Results of its calls that something outside the group reads, through whatever views. What may raise is done even
    where nothing reads it."""
    members = {member.node for member in group.members}
    escapes: set[fx.Node] = set()
    for member in group.members:
        items = [item for item in results_of(member.node) if item is not None]
        escapes.update(item for item in items if _is_read(item, group, members))
        if may_raise(member.node) and not any(_is_read(item, group, set()) for item in items):
            escapes.update(items)
    return escapes


def _is_read(item: fx.Node, group: Group, apart_from: set[fx.Node]) -> bool:
    known = group.readers.get(item)
    return is_read(item, apart_from) if known is None else bool(known - apart_from)


def _operand(
    builder: Builder, buffers: _Buffers, group: Group, member: Member, i: int, values: dict[fx.Node, int]
) -> int:
    """The value of an aligned operand; of a free one its number, by which the formula loads it."""
    operand = member.rule.operands[i]
    if operand.free:
        builder.free = {**builder.free, i: operand.node}
        return i
    layout = layout_of(operand.node)
    assert layout is not None
    if layout.root in values:
        return values[layout.root]
    index = [ZERO if d is None else member.index[d] for d in operand.dims]
    position = offset_of(index, layout.stride, layout.start)
    spec = spec_of(operand.node)
    assert spec is not None
    return builder.emit(Load(buffers.number(layout.root), Address(position), spec.dtype))


def _column(group: Group, buffer: int, item: fx.Node, member: Member, k: int, value: int) -> Column:
    output = member.rule.outputs[k]
    whole = all(d is None or not member.index[d].terms for d in output.dims)
    assert output.column is not None
    return Column(output.column, buffer, Address(group.values[item]), value, output.dtype, whole, output.divisor)


def _affines(kernel: KernelIR) -> Iterable[Affine]:
    for instruction in kernel.body:
        if isinstance(instruction, Load):
            yield instruction.address.offset
        elif isinstance(instruction, Position):
            yield instruction.offset
    for store in kernel.stores:
        yield store.address.offset
    for each in kernel.sums:
        yield each.address.offset


def _ordered(kernel: KernelIR, group: Group) -> KernelIR:
    """Loops in the order of memory, rows first, with loops merged that run through everything as one."""
    loops = dict(group.loops)
    far = steps(kernel)
    weights = {loop: far.get(loop, 0) for loop in loops}
    inner = group.inner
    if inner is None:
        # No reduction: the innermost loop in memory is the row, the others only count rows.
        order = sorted(loops, key=lambda loop: (-weights[loop], loop))
        outer_order, inner_order = order, []
    else:
        outer = [loop for loop in loops if loop not in inner]
        outer_order = sorted(outer, key=lambda loop: (loop not in group.kept, -weights[loop], loop))
        inner_order = _order_of_row(kernel, {loop: loops[loop] for loop in inner}, weights)
        inner_order.sort(key=lambda loop: loop in group.summed)
    affines = list(dict.fromkeys(_affines(kernel)))
    outer_order, merged_into = _merge(outer_order, loops, affines, {})
    inner_order, merged_into = _merge(inner_order, loops, affines, merged_into)
    cut: tuple[int, int, int, int] | None = None
    if inner is None and outer_order:
        outer_order, inner_order = outer_order[:-1], outer_order[-1:]
        if rows := _row_of(kernel, loops[inner_order[0]], not outer_order):
            number = max(loops) + 1
            cut = inner_order[0], number, number + 1, rows
            loops |= {number: loops[inner_order[0]] // rows, number + 1: rows}
            outer_order, inner_order = [*outer_order, number], [number + 1]
    order = outer_order + inner_order
    numbers = {loop: i for i, loop in enumerate(order)}

    def change(position: Affine) -> Affine:
        position = Affine.of({loop: c for loop, c in position.terms if loop not in merged_into}, position.constant)
        if cut is not None:
            position = position.split(*cut)
        return Affine.of({numbers[loop]: c for loop, c in position.terms}, position.constant)

    ordered = moved(kernel, tuple(loops[loop] for loop in order), len(outer_order), change)
    return replace(ordered, columns=tuple(_placed(column, len(outer_order)) for column in ordered.columns))


def _placed(column: Column, num_outer: int) -> Column:
    """In the ordered loops, of which those that it keeps come first."""
    return replace(column, kept=sum(loop < num_outer for loop in column.address.offset.loops))


def _row_of(kernel: KernelIR, size: int, is_all: bool) -> int | None:
    """The length of the rows that a long loop is cut into, where that pays: threads share the rows of a sum over
    everything, and a row of draws is made at once. is_all: whether there is no other loop."""
    draws = any(map(is_draw, kernel.body))
    if is_open(size) or size <= _LONGEST_ROW or not (is_all if kernel.columns else draws):
        return None
    return next((row for row in range(_LONGEST_ROW, _LONGEST_ROW // 16, -1) if size % row == 0), None)


def slow_draws(group: Group, call: KernelCall) -> list[fx.Node]:
    """A group's draws of normal numbers on a CPU that its kernel would make one by one, each from four words, or in
    short rows, which end in the midst of what is made at once. A call makes them several times as fast."""
    kernel = call.kernel
    numbers = [value for value, i in enumerate(kernel.body) if isinstance(i, Compute) and i.op == "philox_normal"]
    size = likely(kernel.row_size)
    is_slow = not all(is_run(kernel, value) for value in numbers)
    is_slow |= size > _LONGEST_RUN or (kernel.num_outer > 0 and size < _SHORT_RUN and size % 64 > 0)
    draws = [member.node for member in group.members if member.node.target is torch.ops.aottrain.philox_normal.default]
    return [node for node in draws if required_spec(node).device.type == "cpu"] if numbers and is_slow else []


def _order_of_row(kernel: KernelIR, inner: Mapping[int, int], steps: dict[int, int]) -> list[int]:
    """The loops of a row in the order in which most of its accesses go through memory: of results once, of operands
    twice, for a row is passed over more than once. But one fills a vector, where any does. inner: how long they are;
    steps: of the order that is taken where none has more."""
    default = sorted(inner, key=lambda loop: (-steps[loop], loop))
    votes = {tuple(default): 0}
    accesses = [(store.address.offset, 1) for store in kernel.stores]
    accesses += [(load.address.offset, 2) for load in kernel.body if isinstance(load, Load)]
    for offset, weight in accesses:
        own = {loop: abs(likely(c)) for loop, c in offset.terms if loop in inner}
        if len(own) == len(inner):
            order = tuple(sorted(inner, key=lambda loop: (-own[loop], loop)))
            votes[order] = votes.get(order, 0) + weight
    most = max(votes, key=lambda order: (min(likely(inner[order[-1]]), _VECTOR) if order else 0, votes[order]))
    return list(most)


def _merge(
    order: list[int], loops: dict[int, int], affines: Iterable[Affine], merged_into: dict[int, int]
) -> tuple[list[int], dict[int, int]]:
    """Merge a loop into the next one where every position steps over it as over one longer loop."""
    merged: list[int] = []
    for loop in order:
        while merged:
            before = merged[-1]
            if not all(same(p.coefficient(before), p.coefficient(loop) * loops[loop]) for p in affines):
                break
            loops[loop] *= loops[before]
            merged_into[before] = loop
            merged.pop()
        merged.append(loop)
    return merged, merged_into


def _renumbered(kernel: KernelIR, used: Sequence[int]) -> KernelIR:
    numbers = {old: new for new, old in enumerate(used)}
    return replace(
        kernel,
        body=tuple(replace(i, buffer=numbers[i.buffer]) if isinstance(i, Load) else i for i in kernel.body),
        stores=tuple(replace(s, buffer=numbers[s.buffer]) for s in kernel.stores),
        columns=tuple(replace(c, buffer=numbers[c.buffer]) for c in kernel.columns),
        parts=tuple(replace(part, buffer=numbers[part.buffer]) for part in kernel.parts),
    )


def _span(kernel: KernelIR, buffer: int, node: fx.Node, written: bool) -> int:
    """Elements from a buffer's start that the kernel may touch; of an input, whose views may reach its whole storage,
    up to the last one that they do."""
    spec, value = spec_of(node), value_of(node)
    assert spec is not None
    own = spec.span
    if spec.dtype.is_complex:  # read as reals
        return 2 * own
    if written or node.op != "placeholder" or spec.symbolic is not None:
        return own
    room = spec.storage_bytes // spec.dtype.itemsize - int(value.storage_offset())
    loads = [i for i in kernel.body if isinstance(i, Load) and i.buffer == buffer]
    if any(load.guard is not None for load in loads):
        return max(own, room)
    highest = 0
    for load in loads:
        looked_up = sum(step * (size - 1) for _, step, size in load.address.indirect)
        highest = max(highest, extent(load.address.offset, kernel.ranges)[1] + looked_up)
    return min(max(own, room), 1 + highest)


def _parameter(node: fx.Node, span: int, written: bool) -> Parameter:
    spec = spec_of(node)
    assert spec is not None
    dtype = spec.dtype.to_real() if spec.dtype.is_complex else spec.dtype
    return Parameter(node.name, dtype, written, span)
