"""Groups that become one once all calls have theirs: pairs of a maker and a reader, and what reads the same."""

from __future__ import annotations

import math

from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.schedule.grouping.groups import Group
from aottrain.compiler.schedule.grouping.inlining import Inlining
from aottrain.compiler.schedule.grouping.units import Dependencies, Fusion, joins
from aottrain.ir.graph import info, readers_of, storage_bytes, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.sizes.polynomials import likely, same

# Calls of a group that moves to another one which reads what it reads.
_MOST_MOVED = 24
# What is read twice, and so large, is worth one kernel.
_WORTH_MERGING = 1 << 16


def merge_pairs(fusion: Fusion, dependencies: Dependencies, local: bool) -> None:
    """Make one group of a group and one that reads what it makes, where all of both fits into one loop nest.

    Calls join groups in program order, each one group: where a value is made from two groups, one of them is written
    and read again. The reader waits for no library call that the maker does not wait for, so nothing lives longer; or
    no more bytes do than are no longer written, as where a norm is computed again beside its gradient.
    local: as of `fuse`.
    """
    groups = {group.number: group for group in fusion.groups}
    apart = [(unit, node) for node, unit in dependencies.unit_of.items() if unit not in groups]
    waiting = sum({1 << unit for unit, _ in apart})
    borders = [unit for unit, node in apart if local and info(node).kind is OpKind.COMPUTE]
    above, tried = dependencies.ancestors, set[tuple[int, int, int]]()

    def pair_of(reader: Group) -> tuple[Group, Group] | None:
        makers = {fusion.group_of[call].number for call in map(producer_of, reader.reads) if call in fusion.group_of}
        for number in sorted(makers - {reader.number}, reverse=True):
            key = number, reader.number, len(reader.members)
            if key in tried:
                continue
            tried.add(key)
            between = dependencies.lies_between(number, reader.number)
            waits = above[reader.number] & ~above[number] & waiting
            if waits and (local or not _is_worth_waiting(groups[number], reader)):
                continue
            if not between and not any(number < unit < reader.number for unit in borders):
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
            _made_one(merged, fusion)
    fusion.groups = [groups[group.number] for group in fusion.groups if group.number in groups]


def _is_worth_waiting(maker: Group, reader: Group) -> bool:
    """Whether one kernel moves fewer bytes, and what lives until the reader runs, for the maker's sake alone, is no
    more than what the reader alone reads of the maker's results."""
    makes, reads = ({member.node for member in group.members} for group in (maker, reader))
    last = [root for root in maker.reads if root not in reader.reads and makes.issuperset(readers_of(root))]
    gone = [value for value in maker.values if reads.union(makes).issuperset(readers_of(value))]
    saved = sum(storage_bytes(value) for value in gone if value in reader.reads)
    shared = sum(storage_bytes(root) for root in maker.reads if root in reader.reads)
    return shared + saved >= _WORTH_MERGING and sum(map(storage_bytes, last)) <= saved


def _made_one(merged: Group, fusion: Fusion) -> None:
    """Its calls are this group's from now on, and what is no longer true of them is no reason."""
    fusion.group_of.update((member.node, merged) for member in merged.members)
    for member in merged.members:
        makers = {producer_of(storage_root(source)) for source in member.node.all_input_nodes}
        if all(fusion.group_of.get(call, merged) is merged for call in makers):
            fusion.reasons.pop(member.node.name, None)


def merge_sums(fusion: Fusion, dependencies: Dependencies, local: bool) -> None:
    """A group that only adds up what another one reads is made there, where neither waits for the other, or for a
    library call that the other does not wait for. So is one that reads little else than the other one, and makes
    something of its own. local: as of `fuse`."""
    above = dependencies.ancestors
    waiting = sum({1 << unit for unit in dependencies.unit_of.values()} - {1 << g.number for g in fusion.groups})

    def apart(one: Group, other: Group) -> bool:
        between = (above[one.number] >> other.number) & 1 or (above[other.number] >> one.number) & 1
        return not between and not (above[one.number] ^ above[other.number]) & waiting

    def may_move(group: Group) -> bool:
        return all(member.rule.columns for member in group.members) or len(group.members) <= _MOST_MOVED

    for group in () if local else [group for group in fusion.groups if may_move(group)]:
        if not any(known is group for known in fusion.groups):
            continue
        read = {root for root in group.reads if storage_bytes(root) >= _WORTH_MERGING}
        for other in [other for other in fusion.groups if other is not group and _reads_as_much(group, other, read)]:
            merged = _both(other, group, fusion.inlined) if apart(group, other) else None
            if merged is not None:
                dependencies.add(group.number, {other.number})
                dependencies.merge(other.number, group.number)
                fusion.groups = [merged if g is group else g for g in fusion.groups if g is not other]
                _made_one(merged, fusion)
                break


def _reads_as_much(group: Group, other: Group, large: set[fx.Node]) -> bool:
    """Whether the other group reads some of what is large of what this one reads; and most of it, if this one makes
    more than sums."""
    shared = large.intersection(other.reads)
    if not shared or all(member.rule.columns for member in group.members):
        return bool(shared)
    return 2 * sum(map(_likely_bytes, shared)) >= sum(map(_likely_bytes, large))


def _likely_bytes(value: fx.Node) -> int:
    return likely(storage_bytes(value))


def _both(maker: Group, reader: Group, inlined: Inlining) -> Group | None:
    """One group of all that both have; None where that does not fit."""
    if maker.closed or reader.closed or not same(math.prod(maker.loops.values()), math.prod(reader.loops.values())):
        return None
    orders = _orders(maker, reader)
    for loops, goes_by_memory in [*((each, False) for each in orders), *((each, True) for each in orders)]:
        group, apart = maker.copy(), Fusion()
        group.number, group.loops = reader.number, loops
        group.may_be_unanchored, group.goes_by_memory = True, goes_by_memory
        if all(joins(group, member.node, inlined.rules_of(member.node), apart) for member in reader.members):
            group.may_be_unanchored = group.goes_by_memory = False
            return group
    return None


def _orders(maker: Group, reader: Group) -> list[dict[int, int]]:
    """The maker's loops as they are, and in the order in which what the reader reads lies in memory: a call that
    nothing ties to the maker's iterations takes them in order, as it goes through memory."""
    places = [maker.values[root] for root in reader.reads if root in maker.values]
    orders = [maker.loops]
    for place in places[:1]:
        order = sorted(maker.loops, key=lambda loop: -likely(place.coefficient(loop)))
        if order != list(maker.loops):
            orders.append({loop: maker.loops[loop] for loop in order})
    return orders
