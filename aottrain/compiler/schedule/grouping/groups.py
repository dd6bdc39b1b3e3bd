"""A group: calls that share one loop nest, and the test whether another call fits into it.

An iteration computes one element of every value of a group. A call may read a value of its group only if it needs that
very element. This is decided by positions in memory: an operand, through whatever views, has to read the position of
the buffer that the group writes in the same iteration. Views need no rules of their own for this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import fx

from aottrain.compiler.lowering import Operand, Rule
from aottrain.compiler.lowering.rules import NEIGHBOURS
from aottrain.compiler.schedule.layouts import Layout, layout_of, memory_order, result_nodes, stands_alone
from aottrain.ir.kernels.affine import ZERO, Affine, Straddles, delinearize, offset_of, row_major
from aottrain.ir.kernels.columns import MOST_APART
from aottrain.ir.sizes.polynomials import UndecidedError, is_open, likely, same

# Rows beyond this many elements are read again rather than held, so their reductions are not chained.
LONGEST_HELD_ROW = 16384
# Rows beyond this many elements are not added up for each sequence apart: what a thread adds up would leave its cache.
LONGEST_SUMMED_ROW = 8192
# Rows at least this long are also read in another order than memory's; shorter ones where the results are few enough
# that C++ need not (`by_memory`), of so many rows each. A GPU reads as many neighbours at once.
_LEAST_ANYWHERE = 256
_LEAST_APART, _FEWEST_ADDED = 32, 16
# Elements from which on sums are not made of rows across memory.
_LEAST_ALONG = 1 << 16
# Buffers that one kernel may read and write, in registers or in memory: its text stays readable, its compilation quick.
_MOST_BUFFERS = 192

Index = tuple[Affine, ...]


@dataclass(frozen=True)
class Member:
    """One call in a group."""

    node: fx.Node
    rule: Rule
    index: Index
    """Each dimension of the rule's domain as a function of the group's loops."""
    stage: int
    """How many reductions come one after the other up to this call, itself included."""


@dataclass
class Group:
    """Calls that share one loop nest."""

    number: int
    loops: dict[int, int] = field(default_factory=dict)
    """The size of each loop, by its number."""
    inner: frozenset[int] | None = None
    """The loops of a row; None while no reduction has decided it."""
    kept: frozenset[int] = frozenset()
    """The loops over rows for each of which sums over the others are apart: they come first."""
    summed: frozenset[int] = frozenset()
    """The loops of a row that sums over parts of it are over: they come last."""
    members: list[Member] = field(default_factory=list)
    values: dict[fx.Node, Affine] = field(default_factory=dict)
    """For each buffer that a member computes, where an iteration puts its element."""
    stages: dict[fx.Node, int] = field(default_factory=dict)
    """The stage of the member that computes each buffer."""
    parts: dict[fx.Node, list[Affine]] = field(default_factory=dict)
    """Of buffers that are written in parts, where an iteration puts an element of each."""
    columns: set[fx.Node] = field(default_factory=set)
    """Buffers that are complete only when all rows are done, and those that are written in parts."""
    reads: dict[fx.Node, list[Affine]] = field(default_factory=dict)
    """Positions at which members read other buffers."""
    next_loop: int = 0
    """The number that the next loop gets."""
    readers: Mapping[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    """As in `inlining.Inlining`."""
    may_be_unanchored: bool = False
    """Whether a call may join that nothing ties to the group's iterations: what ties it comes later."""
    goes_by_memory: bool = False
    """Whether a call that is tied by a vector alone, which others may read along other loops, goes as memory does."""

    def split(self, loop: int, inner_size: int) -> None:
        """Replace a loop by two; the order of iterations stays."""
        first, second = self.next_loop, self.next_loop + 1
        self.next_loop += 2
        loops: dict[int, int] = {}
        for other, size in self.loops.items():
            if other == loop:
                loops[first], loops[second] = size // inner_size, inner_size
            else:
                loops[other] = size
        self.loops = loops
        if self.inner is not None and loop in self.inner:
            self.inner = self.inner - {loop} | {first, second}
        if loop in self.kept:
            self.kept = self.kept - {loop} | {first, second}
        if loop in self.summed:
            self.summed = self.summed - {loop} | {first, second}

        def change(position: Affine) -> Affine:
            return position.split(loop, first, second, inner_size)

        self.values = {node: change(position) for node, position in self.values.items()}
        self.parts = {node: [change(position) for position in positions] for node, positions in self.parts.items()}
        self.reads = {node: [change(position) for position in positions] for node, positions in self.reads.items()}
        self.members = [
            Member(m.node, m.rule, tuple(change(position) for position in m.index), m.stage) for m in self.members
        ]

    def copy(self) -> Group:
        """A group of its own that changes of this one leave as it is."""
        reads, parts = ({n: list(positions) for n, positions in each.items()} for each in (self.reads, self.parts))
        state = dict(self.loops), self.inner, self.kept, self.summed, list(self.members)
        values = dict(self.values), dict(self.stages)
        return Group(self.number, *state, *values, parts, set(self.columns), reads, self.next_loop, self.readers)

    def restore(self, before: Group) -> None:
        """Be again what `copy` has kept."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(before, attribute.name))

    @property
    def closed(self) -> bool:
        """Whether it stays one call, which others neither join nor are joined by."""
        return stands_alone(self.members[0].node)

    @property
    def outer(self) -> frozenset[int]:
        return frozenset(self.loops) - (self.inner or frozenset())

    def row_size(self, inner: frozenset[int]) -> int:
        return math.prod(self.loops[loop] for loop in inner)


@dataclass(frozen=True)
class Placement:
    """How a call would sit in a group."""

    rule: Rule
    index: Index
    inner: frozenset[int] | None
    """The loops of a row from then on."""
    kept: frozenset[int]
    """As the group's, from then on."""
    summed: frozenset[int]
    """As the group's, from then on."""
    stage: int


def place(group: Group, node: fx.Node, rule: Rule) -> Placement | str:
    """Where the call would sit in the group, or the reason why it does not fit. May split loops of the group."""
    for _ in range(12):
        try:
            return _place(group, node, rule)
        except Straddles as border:
            group.split(border.loop, border.inner)
        except UndecidedError as error:
            return str(error)
    return "its dimensions do not divide the group's loops"


def _place(group: Group, node: fx.Node, rule: Rule) -> Placement | str:
    layouts: list[Layout] = []
    for operand in rule.operands:
        layout = layout_of(operand.node)
        if layout is None:
            return "an operand is a view in another type"
        if layout.root in group.columns:
            kind = "a result in parts" if layout.root in group.parts else "a sum over the group's rows"
            return f"it reads {kind}"
        if operand.at_hand and layout.root not in group.values and layout.root not in group.reads:
            return "a row would be read for one element"
        if layout.root in group.values and operand.free:
            return "it reads another element of the group's value"
        layouts.append(layout)
    index = _find_index(group, node, rule, layouts)
    if index is None:
        return "its iterations are not the group's"
    for operand, layout in zip(rule.operands, layouts, strict=True):
        position = None if operand.free else group.values.get(layout.root)
        if position is not None and _position(operand, layout, index) != position:
            return "it reads another element of the group's value"
    stage = max((group.stages.get(layout.root, 0) for layout in layouts), default=0)
    return _with_roles(group, rule, index, stage + bool(rule.reduced))


def _with_roles(group: Group, rule: Rule, index: Index, stage: int) -> Placement | str:
    """Check the row's loops against what the rule reduces."""
    used = frozenset(loop for position in index for loop in position.loops)
    everything = frozenset(group.loops)
    inner, apart, summed = group.inner, group.kept, group.summed
    if rule.reduced:
        row = frozenset(loop for d in rule.reduced for loop in index[d].loops)
        kept = frozenset(loop for d, position in enumerate(index) if d not in rule.reduced for loop in position.loops)
        if row & kept or used != everything or (inner is not None and inner != row):
            return "it reduces other dimensions than the group's rows"
        inner = row
        if likely(group.row_size(inner)) > LONGEST_HELD_ROW and stage > 2:
            return "the rows are too long to hold between reductions"
    for output in rule.outputs:
        if output.within:
            kept = frozenset(loop for d in output.dims if d is not None for loop in index[d].loops)
            parts = everything - kept
            if inner is None or used != everything or not parts < inner or (summed and parts != summed):
                return "it adds up other parts of a row than the group's"
            summed = parts
        if output.column is None:
            continue
        kept = frozenset(loop for d in output.dims if d is not None for loop in index[d].loops)
        if kept:
            inner, rows = _parts(group, inner, kept)
            if used != everything or not inner or (rows and apart and rows != apart):
                return "it reduces other dimensions than the group's rows"
            apart = apart or rows
        elif used != everything:
            return "it reduces fewer elements than the group's"
    if used != everything and (inner is None or used != everything - inner):
        return "it has fewer iterations than the group"
    return Placement(rule, index, inner, apart, summed, stage)


def _parts(group: Group, inner: frozenset[int] | None, kept: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The loops that a sum over rows keeps, as those of the row and those over rows; nothing where that may not be.

    Where no reduction has decided what a row is, it is what lies within all that is added up. Rows are long enough to
    be added as vectors, and to be read one by one where the order of memory is another."""
    order, reduced = list(group.loops), [i for i, loop in enumerate(group.loops) if loop not in kept]
    if inner is None:
        inner = frozenset(order[max(reduced, default=-1) + 1 :])
    rows = kept - inner
    if not inner or not inner <= kept:
        return frozenset(), rows
    if rows:
        if is_open(*group.loops.values()):  # the text cuts rows at numbers
            return frozenset(), rows
        natural = max(order.index(loop) for loop in rows) < min(reduced, default=0)
        num_rows, num_apart = (math.prod(group.loops[i] for i in loops) for loops in (set(order) - kept, rows))
        few = num_apart * group.row_size(inner) <= MOST_APART and num_rows >= _FEWEST_ADDED
        least = NEIGHBOURS if natural else _LEAST_APART if few else _LEAST_ANYWHERE
        if not reduced or not least <= group.row_size(inner) <= LONGEST_SUMMED_ROW:
            return frozenset(), rows
    return inner, rows


def _position(operand: Operand, layout: Layout, index: Index) -> Affine:
    """Where an aligned operand is read."""
    dims = [ZERO if d is None else index[d] for d in operand.dims]
    return offset_of(dims, layout.stride, layout.start)


def _find_index(group: Group, node: fx.Node, rule: Rule, layouts: Sequence[Layout]) -> Index | None:
    """The domain's index from what its operands are to the group: its values first, then what it reads as well."""
    partial: list[Affine | None] = [None if size > 1 else ZERO for size in rule.shape]
    for source in (group.values, None):
        for operand, layout in zip(rule.operands, layouts, strict=True):
            if operand.free:
                continue
            if source is not None:
                positions = [source[layout.root]] if layout.root in source else []
            else:
                is_tie = None in partial and (not group.goes_by_memory or _is_whole(operand, rule))
                positions = group.reads.get(layout.root, []) if is_tie else []
                # Other parts of one buffer, as the gates of a recurrent step, are read side by side.
                positions = positions + [
                    position + Affine((), layout.start - position.constant) for position in positions
                ]
            for position in positions:
                if _fill(partial, operand, layout, position, group):
                    break
    loose = all(position is None or position is ZERO for position in partial)
    if loose and group.loops and not group.may_be_unanchored and any(not operand.free for operand in rule.operands):
        return None  # nothing ties it to one of the group's iterations; what reads nothing may take any that fit
    if rule.operands and all(operand.free for operand in rule.operands):
        # What is read at other places does not tie it to the loops: as another call of its shape does.
        partial = next((list(m.index) for m in group.members if m.rule.shape == rule.shape), partial)
    if None in partial and not _fill_rest(partial, node, rule, group):
        return None
    index = tuple(position for position in partial if position is not None)
    covered = math.prod(group.loops[loop] for loop in {loop for position in index for loop in position.loops})
    return index if same(covered, math.prod(rule.shape)) else None


def _is_whole(operand: Operand, rule: Rule) -> bool:
    return same(math.prod(rule.shape[d] for d in operand.dims if d is not None), math.prod(rule.shape))


def _fill(partial: list[Affine | None], operand: Operand, layout: Layout, position: Affine, group: Group) -> bool:
    """Take from one operand the index of the dimensions that it has; `_place` checks that the operands agree. False
    where the position is no index of the operand."""
    parts = delinearize(position, group.loops, layout.shape, layout.stride, layout.start)
    if parts is None:
        return False
    for size, stride, d, part in zip(layout.shape, layout.stride, operand.dims, parts, strict=True):
        if d is None or size == 1 or stride == 0:
            continue
        if partial[d] is None:
            partial[d] = part
    return True


def _fill_rest(partial: list[Affine | None], node: fx.Node, rule: Rule, group: Group) -> bool:
    """The dimensions that no operand has take the loops that are left, in the order in which results lie in memory."""
    used = {loop for position in partial if position is not None for loop in position.loops}
    open_dims = [d for d, position in enumerate(partial) if position is None]
    missing = math.prod(rule.shape[d] for d in open_dims)
    left = [(loop, size) for loop, size in group.loops.items() if loop not in used]
    if not same(math.prod(size for _, size in left), missing):
        outer = [(loop, size) for loop, size in left if loop in group.outer]
        if group.inner is None or not same(math.prod(size for _, size in outer), missing):
            return False
        left = outer
    ordered = [d for d in memory_order(node, rule) if d in open_dims]
    steps: dict[int, int] = {}
    step = 1
    for d in reversed(ordered):
        steps[d] = step
        step *= rule.shape[d]
    shape = [rule.shape[d] for d in ordered]
    parts = delinearize(row_major(left), group.loops, shape, [steps[d] for d in ordered])
    if parts is None:
        return False
    for d, part in zip(ordered, parts, strict=True):
        partial[d] = part
    return True


def join(group: Group, node: fx.Node, placed: Placement) -> None:
    """Add a call that fits."""
    group.inner, group.kept, group.summed = placed.inner, placed.kept, placed.summed
    rule, index = placed.rule, placed.index
    group.members.append(Member(node, rule, index, placed.stage))
    for operand in rule.operands:
        layout = layout_of(operand.node)
        assert layout is not None
        if not operand.free and layout.root not in group.values:
            position = _position(operand, layout, index)
            positions = group.reads.setdefault(layout.root, [])
            if position not in positions:
                positions.append(position)
    for item, output in zip(result_nodes(node, rule), rule.outputs, strict=True):
        if item is None:
            continue
        layout = layout_of(item)
        assert layout is not None
        dims = [ZERO if d is None else index[d] for d in output.dims]
        group.values[item] = offset_of(dims, layout.stride, output.start or 0)
        group.stages[item] = placed.stage
        if output.start is not None:
            group.parts.setdefault(item, []).append(group.values[item])
        if output.column is not None or output.start is not None or output.within:
            group.columns.add(item)


def too_large(group: Group) -> bool:
    return len(group.reads) + len(group.values) > _MOST_BUFFERS


def start(number: int, node: fx.Node, rules: Sequence[Rule]) -> Group | None:
    """A group of one call. A reduction over leading dimensions in memory sums columns, another one rows."""
    try:
        return _start(number, node, rules)
    except UndecidedError:
        return None


def _start(number: int, node: fx.Node, rules: Sequence[Rule]) -> Group | None:
    for rule in preferred(node, rules):
        group = Group(number)
        for d in memory_order(node, rule):
            if rule.shape[d] > 1:
                group.loops[d] = rule.shape[d]
        group.next_loop = len(rule.shape)
        index = tuple(Affine(((d, 1),)) if size > 1 else ZERO for d, size in enumerate(rule.shape))
        if any(layout_of(operand.node) is None for operand in rule.operands):
            continue
        placed = _with_roles(group, rule, index, int(bool(rule.reduced)))
        if isinstance(placed, Placement):
            join(group, node, placed)
            return group
    return None


def preferred(node: fx.Node, rules: Sequence[Rule]) -> list[Rule]:
    """The rules, that of the kind first that reads memory in its order where nothing else has decided it. Of much
    memory it is the only one: rows that lie across it are read at a tenth of its speed."""
    if len(rules) < 2 or not rules[0].reduced:
        return list(rules)
    order = memory_order(node, rules[0])
    reduced = [order.index(d) for d in rules[0].reduced if rules[0].shape[d] > 1]
    kept = [order.index(d) for d in range(len(order)) if d not in rules[0].reduced and rules[0].shape[d] > 1]
    size = likely(math.prod(rules[0].shape))
    leading = bool(reduced) and (max(reduced) < min(kept) if kept else size > LONGEST_HELD_ROW)
    if leading and kept and size >= _LEAST_ALONG and any(rule.columns for rule in rules):
        return [rule for rule in rules if rule.columns]
    return sorted(rules, key=lambda rule: rule.columns != leading)
