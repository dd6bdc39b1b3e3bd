"""split_rows: groups that keep more of a row than a GPU's registers hold, as several groups. On a CPU rows lie in a
cache, and nothing is done.

A group is cut where the fewest bytes cross, as between two blocks of a model: a value that one part makes and another
reads is written and read again, which costs less than registers that go to memory and come back at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from aottrain.compiler.schedule.grouping.groups import Group, Member, Placement, join
from aottrain.compiler.schedule.grouping.units import Fusion
from aottrain.compiler.schedule.layouts import layout_of, result_nodes
from aottrain.ir.graph import readers_of, spec_of, storage_bytes
from aottrain.ir.kernels.registers import LONGEST_HELD, values_that_fit, warps_of
from aottrain.ir.sizes.polynomials import is_open, likely

# How often a value that registers do not hold is moved: as measured on an H100, where it is written and read more often
# than one that crosses between two kernels.
_SPILLED = 3


def split_rows(fusion: Fusion) -> Fusion:
    """Cut each group that has to be; the fusion itself."""
    groups: list[Group] = []
    number = max((group.number for group in fusion.groups), default=0)
    for group in fusion.groups:
        parts = _parts_of(group)
        for part in parts[1:]:
            number += 1
            part.number = number
        for part in parts:
            fusion.group_of.update((member.node, part) for member in part.members)
        for earlier, later in zip(parts, parts[1:], strict=False):
            reason = f"not with {earlier.members[-1].node.name}: registers do not hold so much of a row"
            fusion.reasons[later.members[0].node.name] = reason
        groups += parts
    fusion.groups = groups
    return fusion


def _parts_of(group: Group) -> list[Group]:
    """The group, or what it is cut into: of all ways to cut its calls, in order, that which moves fewest bytes."""
    fits = _values_held(group)
    if fits is None:
        return [group]
    rows = _Rows(group)
    whole = range(len(group.members))
    if rows.num_held(whole) <= fits:
        return [group]
    cuts = [0, *rows.narrow_places(), len(group.members)]
    best = {0: (0, 0)}  # bytes up to a call, and where its part begins
    for number, end in enumerate(cuts[1:], start=1):
        ways: list[tuple[int, int]] = []
        for begin in reversed(cuts[:number]):
            excess = max(0, rows.num_held(range(begin, end)) - fits)
            if excess > fits and ways:
                break
            ways.append((best[begin][0] + rows.moved(range(begin, end)) + excess * _SPILLED * rows.nbytes, begin))
        best[end] = min(ways)
    ends = [len(group.members)]
    while ends[-1]:
        ends.append(best[ends[-1]][1])
    return [_part(group, group.members[begin:end]) for end, begin in reversed(list(zip(ends, ends[1:], strict=False)))]


def _values_held(group: Group) -> int | None:
    """How many values of a row registers hold; None where rows are not held: on a CPU, where they are too long, or
    where their length is each call's own."""
    if group.inner is None or not _is_on_a_gpu(group) or is_open(size := group.row_size(group.inner)):
        return None
    if size > LONGEST_HELD:
        return None
    width = 1 << max(0, likely(size) - 1).bit_length()
    return values_that_fit(width, warps_of(width))


def _is_on_a_gpu(group: Group) -> bool:
    node = group.members[0].node
    specs = map(spec_of, (node, *node.all_input_nodes))
    return any(spec is not None and spec.device.type == "cuda" for spec in specs)


class _Rows:
    """What calls of a group, by their numbers, read and make of which each iteration has an element of its own: neither
    what a row has one of, nor a weight that all rows share."""

    def __init__(self, group: Group):
        everything = frozenset(group.loops)
        whole = {
            root
            for root, positions in [*group.reads.items(), *((value, [at]) for value, at in group.values.items())]
            if any(frozenset(position.loops) == everything for position in positions)
        }
        members = {member.node for member in group.members}
        self.reads, self.makes = list[set[fx.Node]](), list[set[fx.Node]]()
        self.sums = list[int]()
        self.reduces = [bool(member.rule.reduced) for member in group.members]
        for member in group.members:
            layouts = (layout_of(operand.node) for operand in member.rule.operands if not operand.free)
            made = [item for item in result_nodes(member.node, member.rule) if item is not None]
            self.reads.append({layout.root for layout in layouts if layout is not None} & whole)
            self.makes.append(set(made) & whole)
            self.sums.append(sum(item in group.columns and bool(group.values[item].loops) for item in made))
        self.last = {root: position for position, read in enumerate(self.reads) for root in read}
        self.own = {value for made in self.makes for value in made if members.issuperset(readers_of(value))}
        self.nbytes = max(map(storage_bytes, whole), default=0)
        """Of the largest of these."""

    def num_held(self, part: range) -> int:
        """The most values of an element that live across a reduction over its row, and half of the sums over rows,
        which have as many elements: those are added to once for each row, and may be in memory."""
        first, last = dict[fx.Node, int](), dict[fx.Node, int]()
        for position in part:
            for root in self.reads[position]:
                first.setdefault(root, position)
                last[root] = position
            for value in self.makes[position]:
                first.setdefault(value, position)
        held = [
            len(self.reads[at] | {value for value in last if first[value] < at < last[value]})
            for at in part
            if self.reduces[at]
        ]
        return max(held, default=0) + sum(self.sums[position] for position in part) // 2

    def moved(self, part: range) -> int:
        """Bytes of rows that a part would read, and of those that it would write for later parts alone."""
        made = {value for position in part for value in self.makes[position]}
        read = {root for position in part for root in self.reads[position]} - made
        written = {value for value in made & self.own if self.last.get(value, -1) >= part.stop}
        return sum(map(storage_bytes, read)) + sum(map(storage_bytes, written))

    def narrow_places(self) -> list[int]:
        """Where no fewer bytes cross from the calls before to those after at either neighbour."""
        count = len(self.reads)
        crossing, made = [0], set[fx.Node]()
        for position in range(1, count):
            made |= self.makes[position - 1]
            crossing.append(sum(storage_bytes(value) for value in made if self.last.get(value, -1) >= position))
        crossing.append(0)
        return [p for p in range(2, count - 1) if crossing[p] <= min(crossing[p - 1], crossing[p + 1])]


def _part(group: Group, members: Sequence[Member]) -> Group:
    part = Group(group.number, dict(group.loops), group.inner, group.kept, group.summed)
    part.next_loop, part.readers = group.next_loop, group.readers
    roles = group.inner, group.kept, group.summed
    for member in members:
        join(part, member.node, Placement(member.rule, member.index, *roles, member.stage))
    return part
