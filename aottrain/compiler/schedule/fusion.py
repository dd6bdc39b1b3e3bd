"""fuse: which calls of a graph become one kernel, and why the others do not.

One pass in program order. A call joins the group of one of its producers (the latest first), or a group that reads what
it reads. It has to fit into that group's loop nest, and no path may lead from the group through other work to the call.
A group that frees memory does not wait for a call that comes much later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.schedule.groups import Group, Placement, join, place, preferred, start, too_large
from aottrain.compiler.schedule.inlining import Inlining, inline
from aottrain.ir.graph import calls, info, storage_bytes, storage_root
from aottrain.ir.ops import OpKind

# How many of the latest groups that read the same buffer are tried.
_MOST_SIBLINGS = 3
# A group that would free so many bytes does not wait for the result of a library call that runs so many library calls
# later. Else all gradients of a weight that is used several times would be held until the last one is there.
_FREED_BYTES = 1 << 20
_FAR = 8


@dataclass
class Fusion:
    """The groups of a graph."""

    groups: list[Group] = field(default_factory=list)
    group_of: dict[fx.Node, Group] = field(default_factory=dict)
    """The group of each fused call."""
    inlined: Inlining = field(default_factory=Inlining)
    """Calls that are computed where they are read."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a call and its producer are not one kernel, by the call's name."""


@dataclass
class _Dependencies:
    """Which units of work (a group, or a call on its own) depend on which, as bit sets over their numbers."""

    ancestors: list[int] = field(default_factory=list)
    """For each unit, all that it depends on."""
    unit_of: dict[fx.Node, int] = field(default_factory=dict)
    """The unit that computes each node."""

    def new(self, sources: int) -> int:
        self.ancestors.append(sources)
        return len(self.ancestors) - 1

    def closure(self, units: Iterable[int]) -> int:
        bits = 0
        for unit in units:
            bits |= self.ancestors[unit] | (1 << unit)
        return bits

    def allows(self, unit: int, sources: Iterable[int]) -> bool:
        """Whether nothing that the sources need, themselves aside, depends on the unit."""
        return all(source == unit or not (self.ancestors[source] >> unit) & 1 for source in sources)

    def floats(self, group: Group) -> bool:
        """Whether a group reads nothing of the size of what it makes, as draws, and nothing depends on it yet: it may
        as well be made where it is read."""
        return not group.reads and not any((above >> group.number) & 1 for above in self.ancestors)

    def needs(self, sources: set[int], others: Sequence[Group]) -> set[int]:
        """The sources, with what the others depend on in their place."""
        needed = sources - {other.number for other in others}
        for other in others:
            needed |= {unit for unit in range(other.number) if (self.ancestors[other.number] >> unit) & 1}
        return needed

    def add(self, unit: int, sources: set[int]) -> None:
        """The unit now also depends on these sources, and so does what depends on the unit."""
        extra = self.closure(sources - {unit}) & ~self.ancestors[unit]
        if not extra:
            return
        self.ancestors[unit] |= extra
        for other, above in enumerate(self.ancestors):
            if (above >> unit) & 1:
                self.ancestors[other] = above | extra

    def merge(self, unit: int, into: int) -> None:
        """The unit's work is done by another one that depends on it."""
        own, joined = 1 << unit, self.ancestors[into] & ~(1 << unit)
        self.ancestors[into] = joined
        for other, above in enumerate(self.ancestors):
            if above & own:
                self.ancestors[other] = (above & ~own) | joined | (1 << into)


def fuse(graph: fx.Graph, local: bool = False) -> Fusion:
    """Groups of calls with a rule; calls without one, and views, stay on their own.

    local: no group goes on across a matrix product or the like. What such a kernel reads and writes would be alive
    together with what the product needs: faster, and at times above the peak that was planned op by op.
    """
    fusion, dependencies = Fusion(inlined=inline(graph)), _Dependencies()
    inlined = fusion.inlined
    readers: dict[fx.Node, list[Group]] = {}
    units: list[Group | None] = []
    effects: list[fx.Node] = []
    counters: list[int] = []  # groups that began as one number made of inputs, as each norm's count of batches
    border = 0  # the first unit that may still grow
    for node in filter(inlined.needed.__contains__, calls(graph)):
        rules = inlined.rules_of(node)
        sources = {dependencies.unit_of[s] for s in inlined.sources(node) if s in dependencies.unit_of}
        if info(node).kind is OpKind.EFFECT:  # these run in program order
            sources |= {dependencies.unit_of[effect] for effect in effects[-1:]}
            effects.append(node)
        if info(node).kind in (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE):
            # Free, so it is no work of its own: what reads it depends on what it views.
            if sources:
                dependencies.unit_of[node] = max(sources)
            continue
        group = None
        if rules:
            roots = _shared(rules)
            candidates = _candidates(sources, units, roots, readers)
            single = not sources and all(math.prod(rule.shape) == 1 for rule in rules)
            if single:
                candidates += counters[-1:]
            unit_of_readers = _unit_of_readers(node, dependencies)
            if unit_of_readers in candidates:
                candidates = [unit_of_readers, *candidates]
            producers = [units[unit] for unit in sources]
            floating = [each for each in producers if each is not None and dependencies.floats(each)]
            at_hand = {dependencies.unit_of.get(o.node) for rule in rules for o in rule.operands if o.at_hand}
            candidates.sort(key=lambda unit: (units[unit] in floating, unit not in at_hand))
            for unit in candidates:
                candidate = units[unit]
                if candidate is None or unit < border:
                    continue
                others = [other for other in floating if other is not candidate]
                needs = dependencies.needs(sources, others)
                if not dependencies.allows(unit, needs):
                    continue
                if _frees_too_late(candidate, node, needs, dependencies, units, fusion):
                    continue
                if _joins_with(candidate, node, rules, others, fusion):
                    dependencies.add(unit, needs)
                    for other in others:
                        _move(other, candidate, fusion, dependencies, units, readers)
                    group = candidate
                    break
            if group is None:
                group = start(len(units), node, rules)
                if group is not None:
                    group.readers = inlined.readers
                    fusion.groups.append(group)
                    dependencies.new(dependencies.closure(sources))
                    units.append(group)
                    counters += [group.number] * single
        if group is None:
            dependencies.new(dependencies.closure(sources))
            units.append(None)
            dependencies.unit_of[node] = len(units) - 1
            if local and info(node).kind is OpKind.COMPUTE:
                border = len(units)
            continue
        fusion.group_of[node] = group
        dependencies.unit_of[node] = group.number
        for root in _shared(rules):
            groups_of_root = readers.setdefault(root, [])
            if group not in groups_of_root[-1:]:
                groups_of_root.append(group)
    _merge_pairs(fusion, dependencies, local)
    return fusion


def _merge_pairs(fusion: Fusion, dependencies: _Dependencies, local: bool) -> None:
    """Make one group of a group and one that reads what it makes, where all of both fits into one loop nest.

    Calls join groups in program order, each one group: where a value is made from two groups, one of them is written
    and read again. The reader waits for no library call that the maker does not wait for, so nothing lives longer.
    local: as of `fuse`.
    """
    groups = {group.number: group for group in fusion.groups}
    apart = [(unit, node) for node, unit in dependencies.unit_of.items() if unit not in groups]
    waiting = sum({1 << unit for unit, _ in apart})
    borders = [unit for unit, node in apart if local and info(node).kind is OpKind.COMPUTE]
    above, tried = dependencies.ancestors, set[tuple[int, int, int]]()

    def pair_of(reader: Group) -> tuple[Group, Group] | None:
        makers = {fusion.group_of[call].number for call in map(_maker, reader.reads) if call in fusion.group_of}
        for number in sorted(makers - {reader.number}, reverse=True):
            key = number, reader.number, len(reader.members)
            if key in tried:
                continue
            tried.add(key)
            between = any((above[reader.number] >> u) & (above[u] >> number) & 1 for u in range(len(above)))
            waits = above[reader.number] & ~above[number] & waiting
            if not between and not waits and not any(number < unit < reader.number for unit in borders):
                merged = _both(groups[number], reader, fusion.inlined)
                if merged is not None:
                    return groups[number], merged
        return None

    for unit in sorted(groups, reverse=True):
        while unit in groups and (pair := pair_of(groups[unit])) is not None:
            maker, merged = pair
            dependencies.merge(maker.number, unit)
            groups[unit] = merged
            del groups[maker.number]
            fusion.group_of.update((member.node, merged) for member in merged.members)
            for member in merged.members:
                makers = {_maker(storage_root(source)) for source in member.node.all_input_nodes}
                if all(fusion.group_of.get(call, merged) is merged for call in makers):
                    fusion.reasons.pop(member.node.name, None)
    fusion.groups = [groups[group.number] for group in fusion.groups if group.number in groups]


def _maker(root: fx.Node) -> fx.Node:
    """The call that makes a buffer, which may be an item of its tuple."""
    is_item = root.op == "call_function" and info(root).kind is OpKind.STRUCTURE
    return root.all_input_nodes[0] if is_item else root


def _both(maker: Group, reader: Group, inlined: Inlining) -> Group | None:
    """One group of all that both have; None where that does not fit."""
    if math.prod(maker.loops.values()) != math.prod(reader.loops.values()):
        return None
    group, apart = maker.copy(), Fusion()
    group.number, group.takes_loose = reader.number, True
    if not all(_joins(group, member.node, inlined.rules_of(member.node), apart) for member in reader.members):
        return None
    group.takes_loose = False
    return group


def _frees_too_late(
    group: Group,
    node: fx.Node,
    sources: set[int],
    dependencies: _Dependencies,
    units: Sequence[Group | None],
    fusion: Fusion,
) -> bool:
    """Whether memory that dies in the group would be held until what the call reads is there, long after."""
    ready = dependencies.ancestors[group.number].bit_length()
    latest = dependencies.closure(sources - {group.number}).bit_length()
    if sum(unit is None for unit in units[ready:latest]) < _FAR:
        return False
    members = {member.node for member in group.members}

    def dies(root: fx.Node) -> bool:
        return root.op == "call_function" and members.union((node,)).issuperset(_readers(root))

    read = sum(storage_bytes(root) for root in group.reads if dies(root))
    kept = sum(storage_bytes(value) for value in group.values if not members.issuperset(_readers(value)))
    if read - kept >= _FREED_BYTES:
        last = group.members[-1].node.name
        fusion.reasons[node.name] = f"not with {last}: {read - kept} bytes would be freed much later"
    return read - kept >= _FREED_BYTES


def _shared(rules: Sequence[Rule]) -> list[fx.Node]:
    """The buffers that are worth reading once for two calls: as large as the domain."""
    rule = rules[0]
    size = math.prod(rule.shape)
    return [
        storage_root(operand.node)
        for operand in rule.operands
        if not operand.free and math.prod(rule.shape[d] for d in operand.dims if d is not None) == size
    ]


def _candidates(
    sources: set[int], units: list[Group | None], roots: Iterable[fx.Node], readers: dict[fx.Node, list[Group]]
) -> list[int]:
    """Groups to ask: those of the producers, the latest first, then those that read the same buffers."""
    candidates = sorted((unit for unit in sources if units[unit] is not None), reverse=True)
    for root in roots:
        for group in reversed(readers.get(root, [])[-_MOST_SIBLINGS:]):
            if group.number not in candidates:
                candidates.append(group.number)
    return candidates


def _unit_of_readers(node: fx.Node, dependencies: _Dependencies) -> int:
    """The unit in which all that reads the call will be, as far as its other operands say; -1 where they do not.

    A call whose operands lie in an earlier unit is better made there, from what that unit has read anyway, than written
    by the earlier one and read again.
    """
    units: set[int] = set()
    for user in _readers(node):
        others = [dependencies.unit_of[source] for source in user.all_input_nodes if source in dependencies.unit_of]
        units.add(max(others, default=-1))
    return units.pop() if len(units) == 1 else -1


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads it, through whatever views."""
    readers: list[fx.Node] = []
    for user in node.users:
        if user.op == "call_function" and info(user).kind in (OpKind.VIEW, OpKind.STRUCTURE):
            readers += _readers(user)
        else:
            readers.append(user)
    return readers


def one_kernel(first: fx.Node, second: fx.Node) -> bool:
    """Whether a call fits into the loop nest of another, whose results it reads: what `fuse` asks of larger groups."""
    rules, more = rules_for(first), rules_for(second)
    group = start(0, first, rules) if rules and more else None
    return group is not None and isinstance(_find_place(group, second, more), Placement)


def _joins_with(group: Group, node: fx.Node, rules: Sequence[Rule], others: Sequence[Group], fusion: Fusion) -> bool:
    """Whether the call joins the group, after all that the others make has; if not, the group stays as it was."""
    if not others:
        return _joins(group, node, rules, fusion)
    before = group.copy()
    members = [member.node for other in others for member in other.members]
    if all(_joins(group, member, fusion.inlined.rules_of(member), fusion) for member in members) and _joins(
        group, node, rules, fusion
    ):
        return True
    group.restore(before)
    return False


def _move(
    other: Group,
    group: Group,
    fusion: Fusion,
    dependencies: _Dependencies,
    units: list[Group | None],
    readers: dict[fx.Node, list[Group]],
) -> None:
    """The other's calls are the group's by now."""
    fusion.groups.remove(other)
    units[other.number] = None
    for member in other.members:
        fusion.group_of[member.node] = group
        for value in (member.node, *member.node.users):
            if dependencies.unit_of.get(value) == other.number:
                dependencies.unit_of[value] = group.number
        for operand in member.rule.operands:
            root = storage_root(operand.node)
            if root in readers:
                readers[root] = [group if reader is other else reader for reader in readers[root]]


def _joins(group: Group, node: fx.Node, rules: Sequence[Rule], fusion: Fusion) -> bool:
    if too_large(group):
        fusion.reasons[node.name] = f"group {group.number} has as many buffers as a kernel may have"
        return False
    placed = _find_place(group, node, rules)
    if isinstance(placed, Placement):
        join(group, node, placed)
        return True
    fusion.reasons[node.name] = f"not with {group.members[-1].node.name}: {placed}"
    return False


def _find_place(group: Group, node: fx.Node, rules: Sequence[Rule]) -> Placement | str:
    """Where it would sit by the first of its rules that fits, or why it does not by the last one."""
    placed: Placement | str = "it has no rule"
    for rule in preferred(node, rules) if group.inner is None else rules:
        placed = place(group, node, rule)
        if isinstance(placed, Placement):
            break
    return placed
