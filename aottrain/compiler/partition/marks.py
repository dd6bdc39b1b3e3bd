"""What the user's torch.utils.checkpoint regions say of each value of a joint graph, for the partitioner to follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from aottrain.ir.graph import Mark, calls, info, marks_of, storage_root, view_source
from aottrain.ir.ops import OpKind


def effective_marks(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, Mark]:
    """The mark of each forward value that lives and dies inside a region. late: what depends on tangents.

    A value that the forward reads outside the region that made it is the region's output, and the mark of that region
    does not hold for it; that of a region around both does. Memory that a view must keep is kept for its base.
    """
    shared: dict[fx.Node, int] = {}  # how many of the regions around a value are around all that reads it
    for node in reversed(calls(graph)):
        if node in late:
            continue
        path = [number for number, _ in marks_of(node)]
        for user in node.users:
            if path and user not in late:
                around = [number for number, _ in marks_of(user)]
                if view_source(user) is node or (user in shared and info(user).kind is OpKind.STRUCTURE):
                    around = around[: shared[user]]
                path = _common(path, around)
        shared[node] = len(path)
    marks = {node: max(mark for _, mark in marks_of(node)[:depth]) for node, depth in shared.items() if depth}
    for node, mark in list(marks.items()):
        root = storage_root(node)
        if mark >= Mark.PREFER_SAVE and root in marks:
            marks[root] = max(marks[root], mark)
    return marks


def edges_of_regions(
    region: Iterable[fx.Node], marks: Mapping[fx.Node, Mark], late: set[fx.Node]
) -> frozenset[fx.Node]:
    """The memory that crosses into or out of a checkpointed region. Unsaved, one region would run for the sake of the
    next, and all of them would be alive at once."""
    found = set()
    for node in region:
        if node.op == "call_function" and node not in marks:
            enters = any(user in marks for user in node.users if user not in late)
            if enters or marks_of(node):
                found.add(storage_root(node))
    return frozenset(node for node in found if node.op == "call_function" and node not in marks)


def _common(one: list[int], other: list[int]) -> list[int]:
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return one[:depth]
