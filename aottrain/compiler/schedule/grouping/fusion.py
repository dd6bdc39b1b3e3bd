"""fuse: which calls of a graph become one kernel, and why the others do not.

One pass in program order. A call joins the group of one of its producers (the latest first), or a group that reads what
it reads. It has to fit into that group's loop nest, and no path may lead from the group through other work to the call.
A group that frees memory does not wait for a call that comes much later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from torch import fx

from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.schedule.grouping.again import Again, found_again, moved_by
from aottrain.compiler.schedule.grouping.groups import Group, Placement, start
from aottrain.compiler.schedule.grouping.inlining import inline
from aottrain.compiler.schedule.grouping.merging import merge_pairs, merge_sums
from aottrain.compiler.schedule.grouping.pressure import split_rows
from aottrain.compiler.schedule.grouping.units import Dependencies, Fusion, find_place, joins
from aottrain.compiler.schedule.layouts import stands_alone
from aottrain.ir.graph import calls, info, readers_of, storage_bytes, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.sizes.polynomials import same

# How many of the latest groups that read the same buffer are tried.
_MOST_SIBLINGS = 3
# A group that would free so many bytes does not wait for the result of a library call that runs so many library calls
# later. Else all gradients of a weight that is used several times would be held until the last one is there.
_FREED_BYTES = 1 << 20
_FAR = 8
# Nor is a value made beside others that only read the same, so many products before it is needed: it would be held.
_FAR_BESIDE = 3


def fuse(graph: fx.Graph, local: bool = False, apart: Set[fx.Node] = frozenset()) -> Fusion:
    """Groups of calls with a rule; calls without one, and views, stay on their own.

    local: no group goes on across a matrix product or the like. What such a kernel reads and writes would be alive
    together with what the product needs: faster, and at times above the peak that was planned op by op. apart: calls
    that stay on their own though they have a rule.
    """
    fusion, mixed = _fuse(graph, local, apart), True
    if fusion.inlined.has_mixed and not local:
        other = _fuse(graph, local, apart, mixed=False)
        if moved_by(graph, other) < moved_by(graph, fusion):
            fusion, mixed = other, False
    again = {} if local else found_again(graph, fusion)
    if again:
        other = _fuse(graph, local, apart, again, mixed)
        fusion = other if moved_by(graph, other) < moved_by(graph, fusion) else fusion
    return split_rows(fusion)


def _fuse(graph: fx.Graph, local: bool, apart: Set[fx.Node], again: Again | None = None, mixed: bool = True) -> Fusion:
    """again, mixed: as of `inline`."""
    fusion, dependencies = Fusion(inlined=inline(graph, again, mixed)), Dependencies()
    inlined = fusion.inlined
    readers: dict[fx.Node, list[Group]] = {}
    units: list[Group | None] = []
    effects, products = list[fx.Node](), list[int]()
    counters: list[int] = []  # groups that began as one number made of inputs, as each norm's count of batches
    border = 0  # the first unit that may still grow
    for node in filter(inlined.needed.__contains__, calls(graph)):
        rules = [] if node in apart else inlined.rules_of(node)
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
            single = not sources and all(same(math.prod(rule.shape), 1) for rule in rules)
            if single:
                candidates += counters[-1:]
            unit_of_readers = _unit_of_readers(node, dependencies)
            if unit_of_readers in candidates:
                candidates = [unit_of_readers, *candidates]
            producers = [units[unit] for unit in sources]
            floating = [each for each in producers if each is not None and dependencies.floats(each)]
            at_hand = {dependencies.unit_of.get(o.node) for rule in rules for o in rule.operands if o.at_hand}
            candidates.sort(key=lambda unit: (units[unit] in floating, unit not in at_hand))
            for unit in () if stands_alone(node) else candidates:
                candidate = units[unit]
                if candidate is None or candidate.closed or unit < border:
                    continue
                others = [other for other in floating if other is not candidate]
                needs = dependencies.needs(sources, others)
                beside = unit not in sources and not single
                if not dependencies.allows(unit, needs) or (beside and _far_beside(candidate, products, dependencies)):
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
            if info(node).kind is OpKind.COMPUTE:
                products.append(len(units) - 1)
                border = len(units) if local else 0
            continue
        fusion.group_of[node] = group
        dependencies.unit_of[node] = group.number
        for root in _shared(rules):
            groups_of_root = readers.setdefault(root, [])
            if group not in groups_of_root[-1:]:
                groups_of_root.append(group)
    merge_pairs(fusion, dependencies, local)
    merge_sums(fusion, dependencies, local)
    return fusion


def _frees_too_late(
    group: Group,
    node: fx.Node,
    sources: set[int],
    dependencies: Dependencies,
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
        return root.op == "call_function" and members.union((node,)).issuperset(readers_of(root))

    read = sum(storage_bytes(root) for root in group.reads if dies(root))
    kept = sum(storage_bytes(value) for value in group.values if not members.issuperset(readers_of(value)))
    if read - kept >= _FREED_BYTES:
        last = group.members[-1].node.name
        fusion.reasons[node.name] = f"not with {last}: {read - kept} bytes would be freed much later"
    return read - kept >= _FREED_BYTES


def _far_beside(group: Group, products: Sequence[int], dependencies: Dependencies) -> bool:
    """Whether products come between a group, as soon as all that it needs is there, and the latest call."""
    ready = max(group.number, dependencies.ancestors[group.number].bit_length() - 1)
    return len(products) >= _FAR_BESIDE and products[-_FAR_BESIDE] > ready


def _shared(rules: Sequence[Rule]) -> list[fx.Node]:
    """The buffers that are worth reading once for two calls: as large as the domain."""
    rule = rules[0]
    size = math.prod(rule.shape)
    return [
        storage_root(operand.node)
        for operand in rule.operands
        if not operand.free and same(math.prod(rule.shape[d] for d in operand.dims if d is not None), size)
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


def _unit_of_readers(node: fx.Node, dependencies: Dependencies) -> int:
    """The unit in which all that reads the call will be, as far as its other operands say; -1 where they do not.

    A call whose operands lie in an earlier unit is better made there, from what that unit has read anyway, than written
    by the earlier one and read again.
    """
    units: set[int] = set()
    for user in readers_of(node):
        others = [dependencies.unit_of[source] for source in user.all_input_nodes if source in dependencies.unit_of]
        units.add(max(others, default=-1))
    return units.pop() if len(units) == 1 else -1


def one_kernel(first: fx.Node, second: fx.Node) -> bool:
    """Whether a call fits into the loop nest of another, whose results it reads: what `fuse` asks of larger groups."""
    rules, more = rules_for(first), rules_for(second)
    group = start(0, first, rules) if rules and more else None
    return group is not None and isinstance(find_place(group, second, more), Placement)


def _joins_with(group: Group, node: fx.Node, rules: Sequence[Rule], others: Sequence[Group], fusion: Fusion) -> bool:
    """Whether the call joins the group, after all that the others make has; if not, the group stays as it was."""
    if not others:
        return joins(group, node, rules, fusion)
    before = group.copy()
    members = [member.node for other in others for member in other.members]
    if all(joins(group, member, fusion.inlined.rules_of(member), fusion) for member in members) and joins(
        group, node, rules, fusion
    ):
        return True
    group.restore(before)
    return False


def _move(
    other: Group,
    group: Group,
    fusion: Fusion,
    dependencies: Dependencies,
    units: list[Group | None],
    readers: dict[fx.Node, list[Group]],
) -> None:
    """The other's calls are the group's by now."""
    fusion.groups.remove(other)
    units[other.number] = None
    made = [member.node for member in other.members]
    while made:  # and views of it, views of these included
        value = made.pop()
        if dependencies.unit_of.get(value) == other.number:
            dependencies.unit_of[value] = group.number
            made += value.users
    for member in other.members:
        fusion.group_of[member.node] = group
        for operand in member.rule.operands:
            root = storage_root(operand.node)
            if root in readers:
                readers[root] = [group if reader is other else reader for reader in readers[root]]
