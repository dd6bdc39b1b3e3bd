"""again: what a kernel reads that another one wrote, and could as well compute from what it was computed from.

What waits for a sum over all rows is a kernel of its own, and reads what the sum was made of. Where that is elementwise
work on inputs, these are read instead, and nothing is written for it. The groups of calls say what is read and written,
so they are found first, and anew with what is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.schedule.grouping.cheap import cheap_rule
from aottrain.compiler.schedule.grouping.groups import Group
from aottrain.compiler.schedule.grouping.units import Fusion
from aottrain.compiler.schedule.grouping.view_index import turned
from aottrain.ir.graph import readers_of, required_spec, results, storage_bytes, storage_root
from aottrain.ir.sizes.polynomials import likely

_MOST_STEPS = 48
# What is smaller is in a cache when it is read again.
_LEAST = 1 << 16

Again = Mapping[fx.Node, Mapping[fx.Node, frozenset[fx.Node]]]
"""By call the operands that it computes itself, or of which they are views, with what is read for each."""


def found_again(graph: fx.Graph, fusion: Fusion) -> Again:
    """What moves fewer bytes so."""
    outputs = {storage_root(node) for node in results(graph) if node is not None}
    stored = {root for group in fusion.groups for root in _read(group)}
    found: dict[fx.Node, dict[fx.Node, frozenset[fx.Node]]] = {}
    for group in fusion.groups:
        for value, leaves in _worth(group, outputs, stored, fusion).items():
            for member in group.members:
                for operand in member.rule.operands:
                    if not operand.free and storage_root(operand.node) is value:
                        found.setdefault(member.node, {})[operand.node] = frozenset(leaves)
    return found


def moved_by(graph: fx.Graph, fusion: Fusion) -> int:
    """About how many bytes the groups read and write."""
    outputs = {storage_root(node) for node in results(graph) if node is not None}
    reads = [_read(group) for group in fusion.groups]
    stored = outputs.union(*reads)
    written = sum(_bytes(stored.intersection(group.values)) for group in fusion.groups)
    return written + sum(map(_bytes, reads))


def _read(group: Group) -> set[fx.Node]:
    """What a group reads where its loops are, and elsewhere."""
    operands = (operand for member in group.members for operand in member.rule.operands)
    return {*group.reads, *(root for o in operands if o.free and (root := storage_root(o.node)) not in group.values)}


def _bytes(values: Iterable[fx.Node]) -> int:
    return sum(likely(storage_bytes(value)) for value in values)


def _worth(group: Group, outputs: Set[fx.Node], stored: Set[fx.Node], fusion: Fusion) -> dict[fx.Node, set[fx.Node]]:
    """Of what a group reads, what it better computes, with what is read for it: all that it can, or what follows from
    what it reads besides."""
    chosen = {root for root in group.reads if root not in outputs and _is_candidate(root, group, fusion)}
    while True:
        leaves = {value: each for value in chosen if (each := _leaves(value, chosen, stored)) is not None}
        if len(leaves) == len(chosen):
            break
        chosen = set(leaves)
    mine = {member.node for member in group.members}
    readers = {value: fusion.inlined.readers.get(value, readers_of(value)) for value in chosen}
    gone = {v for v in chosen if all(r in mine or fusion.group_of.get(r) is _maker(v, fusion) for r in readers[v])}
    read = set[fx.Node]().union(*leaves.values())
    present = _read(group)
    if _bytes(chosen) + _bytes(gone) > _bytes(read - present):
        return leaves
    kept = present - chosen
    return {value: each for value, each in leaves.items() if each <= kept}


def _is_candidate(value: fx.Node, group: Group, fusion: Fusion) -> bool:
    maker = _maker(value, fusion)
    large = likely(storage_bytes(value)) >= _LEAST
    if maker is None or maker is group or not large or cheap_rule(value, True) is None:
        return False
    read = (operand.node for member in group.members for operand in member.rule.operands if not operand.free)
    return all(turned(value, node) is not None for node in read if storage_root(node) is value)


def _maker(value: fx.Node, fusion: Fusion) -> Group | None:
    return fusion.group_of.get(producer_of(value))


def _leaves(value: fx.Node, chosen: Set[fx.Node], stored: Set[fx.Node]) -> set[fx.Node] | None:
    """What is read for a value that is computed; None where that is too much work, or need not be in memory."""
    found, stack, steps = set[fx.Node](), [value], 0
    while stack:
        call = stack.pop()
        known = cheap_rule(call, True)
        if known is None or required_spec(call).shape != known[0].shape:
            return None
        steps += known[1]
        for operand in known[0].operands:
            root = storage_root(operand.node)
            if likely(storage_bytes(root)) < _LEAST:
                continue
            if root.op != "call_function" or (root in stored and root not in chosen):
                found.add(root)
            elif turned(root, operand.node) is not None:
                stack.append(root)
            else:
                return None
    return found if steps <= _MOST_STEPS else None
