"""rows_in_padding: a kernel of rows that only padding reads, as the gradient of x[:, :-1] does, becomes one with it.

`fuse` joins calls of equal loops, and padding has more rows than what it pads: so the rows would be written, and copied
into memory with room for zeros. The kernel that pads runs over all rows instead, and computes those that are there:
of the others nothing is read, and the padding's number is stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from aottrain.compiler.schedule.simplification import rewired
from aottrain.ir.graph import results, storage_root
from aottrain.ir.kernels.affine import Affine, Straddles, delinearize
from aottrain.ir.kernels.kernel import (
    Address,
    Compute,
    Constant,
    Instruction,
    KernelIR,
    Load,
    Position,
    Reduce,
)
from aottrain.ir.kernels.verify import verify_kernel
from aottrain.ir.schedule import KernelCall, touched_by
from aottrain.ir.sizes.polynomials import is_open

# Rows of padding are computed, too, if from nothing: more of them would cost more than the copy.
_MOST_PADDING = 1.25


def rows_in_padding(graph: fx.Graph, calls: Sequence[KernelCall | fx.Node]) -> list[KernelCall | fx.Node]:
    """The calls, each kernel of rows one with the next one, where that is all that reads it, to pad it."""
    kept = {storage_root(node) for node in results(graph) if node is not None}
    uses = Counter(storage_root(node) for call in calls for node in set(touched_by(call)))
    found: list[KernelCall | fx.Node] = []
    for call in calls:
        while isinstance(call, KernelCall) and found and isinstance(maker := found[-1], KernelCall):
            alone = len(maker.writes) == 1 and uses[maker.writes[0]] == 2 and maker.writes[0] not in kept
            both = _both(maker, call) if alone and maker.writes[0] in call.reads else None
            if both is None:
                break
            found.pop()
            call = both
        found.append(call)
    return found


@dataclass(frozen=True)
class _Padded:
    """How a kernel reads what another one makes."""

    value: int
    """Of the reader's body the load."""
    index: tuple[Affine, ...]
    """Each loop of the maker as a function of the reader's."""
    num_outer: int
    """How many of the reader's loops are then those over rows."""


def _both(maker: KernelCall, reader: KernelCall) -> KernelCall | None:
    """One kernel; None where the reader does other than pad the maker's rows."""
    padded = _padded(maker, reader)
    if padded is None:
        return None
    result = maker.writes[0]
    own = [node for node in maker.buffers if node is not result]
    buffers = [*own, *(node for node in reader.buffers if node is not result and node not in own)]
    parameters = dict(zip(maker.buffers, maker.kernel.parameters, strict=True))
    for node, parameter in zip(reader.buffers, reader.kernel.parameters, strict=True):
        known = parameters.get(node, parameter)
        parameters[node] = replace(parameter, span=max(parameter.span, known.span))
    body, numbers = _body(maker, reader, padded, {node: number for number, node in enumerate(buffers)})
    place = {number: buffers.index(node) for number, node in enumerate(reader.buffers) if node is not result}
    kernel = replace(
        reader.kernel,
        num_outer=padded.num_outer,
        parameters=tuple(parameters[node] for node in buffers),
        body=tuple(body),
        stores=tuple(replace(s, buffer=place[s.buffer], value=numbers[s.value]) for s in reader.kernel.stores),
        sources=(*maker.kernel.sources, *reader.kernel.sources),
    )
    verify_kernel(kernel)
    return KernelCall(kernel, tuple(buffers))


def _padded(maker: KernelCall, reader: KernelCall) -> _Padded | None:
    """Where the reader's loads of what the maker stores lie; None where rows are not padded by whole rows."""
    rows, wide = maker.kernel, reader.kernel
    sums = rows.sums or wide.sums
    if is_open(*rows.ranges, *wide.ranges) or sums or len(rows.stores) != 1:
        return None
    if any(isinstance(i, Reduce) for i in wide.body) or not any(isinstance(i, Reduce) for i in rows.body):
        return None
    if math.prod(wide.ranges) > _MOST_PADDING * math.prod(rows.ranges):
        return None
    number = reader.buffers.index(maker.writes[0])
    loads = [(v, i) for v, i in enumerate(wide.body) if isinstance(i, Load) and i.buffer == number]
    (store,) = rows.stores
    if len(loads) != 1 or loads[0][1].guard is None or loads[0][1].address.indirect or store.address.indirect:
        return None
    ((value, load),) = loads
    box = _box(wide, value)
    if box is None or rows.body[store.value].dtype is not load.dtype:
        return None
    index = _index(rows, wide, load.address.offset, box)
    if index is None:
        return None
    inner = {loop for position in index[rows.num_outer :] for loop in position.loops}
    num_outer = len(wide.ranges) - len(inner)
    whole = all(box.get(loop, (0, wide.ranges[loop])) == (0, wide.ranges[loop]) for loop in inner)
    trailing = inner == set(range(num_outer, len(wide.ranges)))
    return _Padded(value, index, num_outer) if whole and trailing and inner else None


def _box(kernel: KernelIR, value: int) -> dict[int, tuple[int, int]] | None:
    """For each loop that a load's guard asks about where it is done, from and to; None where it asks otherwise."""
    guard = kernel.body[value]
    assert isinstance(guard, Load) and guard.guard is not None
    box: dict[int, tuple[int, int]] = {}
    stack = [guard.guard]
    while stack:
        test = kernel.body[stack.pop()]
        if not isinstance(test, Compute) or len(test.args) != 2:
            return None
        if test.op == "and":
            stack += test.args
            continue
        position, bound = (kernel.body[v] for v in test.args)
        if not (isinstance(position, Position) and isinstance(bound, Constant) and test.op in ("ge", "lt")):
            return None
        if len(position.offset.terms) != 1 or position.offset.terms[0][1] != 1:
            return None
        loop, end = position.offset.terms[0][0], int(bound.value) - position.offset.constant
        low, high = box.get(loop, (0, kernel.ranges[loop]))
        box[loop] = (max(low, end), high) if test.op == "ge" else (low, min(high, end))
    return box if all(low < high for low, high in box.values()) else None


def _index(
    rows: KernelIR, wide: KernelIR, read: Affine, box: Mapping[int, tuple[int, int]]
) -> tuple[Affine, ...] | None:
    """Each loop of the rows as a function of the wider kernel's loops, within the box; None where there is none, or
    it leaves out some of either."""
    sizes = {loop: high - low for loop, (low, high) in box.items()}
    sizes = {loop: sizes.get(loop, size) for loop, size in enumerate(wide.ranges)}
    starts = {loop: low for loop, (low, _) in box.items()}
    within = Affine(read.terms, read.constant + sum(c * starts.get(loop, 0) for loop, c in read.terms))
    written = rows.stores[0].address.offset
    steps = [written.coefficient(loop) for loop in range(len(rows.ranges))]
    try:
        found = delinearize(within, sizes, rows.ranges, steps, written.constant)
    except Straddles:
        return None
    if found is None or any(not step for step, size in zip(steps, rows.ranges, strict=True) if size > 1):
        return None
    covered = [math.prod(sizes[loop] for loop in position.loops) for position in found]
    used = [loop for position in found for loop in position.loops]
    left_out = [loop for loop, size in enumerate(wide.ranges) if size > 1 and loop not in used]
    if tuple(covered) != rows.ranges or left_out or len(used) != len(set(used)):
        return None
    return tuple(p + Affine((), -sum(c * starts.get(loop, 0) for loop, c in p.terms)) for p in found)


def _body(
    maker: KernelCall, reader: KernelCall, padded: _Padded, buffers: Mapping[fx.Node, int]
) -> tuple[list[Instruction], dict[int, int]]:
    """The reader's instructions with the maker's in the place of the load, and where each of the reader's now is."""
    body: list[Instruction] = []
    numbers: dict[int, int] = {}
    for value, instruction in enumerate(reader.kernel.body):
        if value != padded.value:
            numbers[value] = len(body)
            body.append(_moved(instruction, numbers, reader.buffers, buffers))
            continue
        assert isinstance(instruction, Load) and instruction.guard is not None
        guard, own = numbers[instruction.guard], dict[int, int]()
        for place, made in enumerate(maker.kernel.body):
            changed = _moved(made, own, maker.buffers, buffers)
            if isinstance(changed, Load):
                offset = _at(changed.address.offset, padded.index)
                changed = replace(changed, address=Address(offset, changed.address.indirect))
                if changed.guard is not None:
                    body.append(Compute("and", (guard, changed.guard), reader.kernel.body[instruction.guard].dtype))
                changed = replace(changed, guard=guard if changed.guard is None else len(body) - 1)
            elif isinstance(changed, Position):
                changed = replace(changed, offset=_at(changed.offset, padded.index))
            own[place] = len(body)
            body.append(changed)
        body.append(Constant(instruction.other, instruction.dtype))
        rows = own[maker.kernel.stores[0].value]
        numbers[value] = len(body)
        body.append(Compute("where", (guard, rows, len(body) - 1), instruction.dtype))
    return body, numbers


def _moved(
    instruction: Instruction, numbers: Mapping[int, int], nodes: Sequence[fx.Node], buffers: Mapping[fx.Node, int]
) -> Instruction:
    """With the values that it reads, and its buffer, where they are now."""
    moved = rewired(instruction, numbers)
    return replace(moved, buffer=buffers[nodes[moved.buffer]]) if isinstance(moved, Load) else moved


def _at(offset: Affine, index: Sequence[Affine]) -> Affine:
    """With loops in the place of which stand functions of others."""
    total = Affine((), offset.constant)
    for loop, c in offset.terms:
        total = total + index[loop] * c
    return total
