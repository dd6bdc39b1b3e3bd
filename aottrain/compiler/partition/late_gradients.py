"""late_gradients: large gradients of weights are computed last where what they are made of takes less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from torch import fx

from aottrain.ir.analysis.liveness import freed_after, last_uses
from aottrain.ir.graph import (
    allocations,
    calls,
    is_size,
    is_tuple,
    placeholders,
    results,
    storage_bytes,
    storage_root,
)
from aottrain.ir.ops import OpKind, communicates, ends_flight, op_info

# Bytes of a gradient from which it is worth a place of its own; and how many times its operands' bytes it has at least,
# for these are read from memory then, and no longer from a cache.
_SMALLEST, _TIMES = 1 << 16, 2
# Of the highest bytes; a smaller gain is not worth another order.
_GAIN = 0.01


def late_gradients(graph: fx.Graph, throughout: Set[fx.Node]) -> None:
    """Put calls of a backward graph to its end where its peak, op by op, is lower by it. Values stay bitwise the same.

    A gradient that nothing reads is there until the step ends. Of few rows and a large weight its operands are smaller:
    where they wait for the end, the gradients of later layers do not lie beside what earlier layers keep.

    throughout: inputs that are alive whatever is read of them.
    """
    if any(map(is_size, placeholders(graph))):
        return
    returned = Counter(node for node in results(graph) if node is not None)
    found = [_made_of_less(node, throughout) for node, count in returned.items() if count == 1]
    waiting = sorted(filter(None, found), key=lambda cone: -_held_bytes(cone, throughout))  # the last with the fewest
    if not waiting:
        return
    before = calls(graph)
    moved = set().union(*waiting)
    after = [node for node in before if node not in moved] + [n for cone in waiting for n in before if n in cone]
    if _peak_bytes(graph, after, throughout) > (1 - _GAIN) * _peak_bytes(graph, before, throughout):
        return
    for node in after:
        graph.output_node().prepend(node)


def _made_of_less(gradient: fx.Node, throughout: Set[fx.Node]) -> set[fx.Node]:
    """The calls that make this gradient alone, from its own back to where the fewest bytes are held; none where these
    are more than half of its own."""
    chosen, cone, waiting = set[fx.Node](), set[fx.Node](), [gradient]
    fewest = storage_bytes(gradient) // _TIMES
    if fewest * _TIMES < _SMALLEST:
        return chosen
    while waiting:
        node = waiting.pop()
        if not _may_wait(node) or any(user not in cone and user.op != "output" for user in node.users):
            continue
        cone.add(node)
        if (held := _held_bytes(cone, throughout)) <= fewest:
            chosen, fewest = set(cone), held
        waiting += node.all_input_nodes
    return chosen


def _may_wait(node: fx.Node) -> bool:
    if node.op != "call_function" or is_tuple(node) or op_info(node.target).kind in (OpKind.EFFECT, OpKind.STRUCTURE):
        return False
    return not (communicates(node.target) or ends_flight(node.target))


def _held_bytes(cone: Set[fx.Node], throughout: Set[fx.Node]) -> int:
    """Of what these calls read from outside."""
    roots = {storage_root(source) for node in cone for source in node.all_input_nodes if source not in cone}
    return sum(storage_bytes(root) for root in roots if root not in throughout)


def _peak_bytes(graph: fx.Graph, order: Sequence[fx.Node], throughout: Set[fx.Node]) -> int:
    """The most bytes of storages beside those alive throughout."""
    touched = [{storage_root(node), *map(storage_root, node.all_input_nodes)} for node in order]
    kept = {storage_root(node) for node in results(graph) if node is not None}
    freed = freed_after(last_uses(touched), kept)
    alive = {node: storage_bytes(node) for node in placeholders(graph) if node not in throughout}
    live = most = sum(alive.values())
    for position, node in enumerate(order):
        new = dict(allocations(node))
        alive |= new
        live += sum(new.values())
        most = max(most, live)
        live -= sum(alive.pop(root, 0) for root in freed.get(position, ()))
    return most
