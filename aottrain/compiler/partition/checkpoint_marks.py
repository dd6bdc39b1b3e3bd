"""What the user's torch.utils.checkpoint regions, and what stands in for them, say of each value of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import fx

from aottrain.ir.graph import Mark, Marks, calls, info, marks_of, storage_root, view_source
from aottrain.ir.ops import OpKind

MarksOf = Callable[[fx.Node], Marks]


def effective_marks(graph: fx.Graph, late: set[fx.Node], marked: MarksOf = marks_of) -> dict[fx.Node, Mark]:
    """The mark of each forward value that lives and dies inside a region. late: what depends on tangents.

    A value that the forward reads outside the region that made it is the region's output, and the mark of that region
    does not hold for it; that of a region around both does. Memory that a view must keep is kept for its base.
    """
    shared: dict[fx.Node, int] = {}  # how many of the regions around a value are around all that reads it
    for node in reversed(calls(graph)):
        if node in late:
            continue
        path = [number for number, _ in marked(node)]
        for user in node.users:
            if path and user not in late:
                around = [number for number, _ in marked(user)]
                if view_source(user) is node or (user in shared and info(user).kind is OpKind.STRUCTURE):
                    around = around[: shared[user]]
                path = _common(path, around)
        shared[node] = len(path)
    marks = {node: max(mark for _, mark in marked(node)[:depth]) for node, depth in shared.items() if depth}
    for node, mark in list(marks.items()):
        root = storage_root(node)
        if mark >= Mark.PREFER_SAVE and root in marks:
            marks[root] = max(marks[root], mark)
    return marks


def edges_of_regions(
    region: Iterable[fx.Node], marks: Mapping[fx.Node, Mark], late: set[fx.Node], marked: MarksOf = marks_of
) -> dict[fx.Node, fx.Node | None]:
    """The memory that crosses into or out of a checkpointed region, with the first op inside that it enters (None: it
    only leaves). Unsaved, one region would run for the sake of the next, and all of them would be alive at once."""
    edges: dict[fx.Node, fx.Node | None] = {}
    for node in region:
        if node.op == "call_function" and node not in marks:
            inside = next((user for user in node.users if user in marks and user not in late), None)
            root = storage_root(node)
            if (inside is not None or marked(node)) and root.op == "call_function" and root not in marks:
                edges[root] = edges.get(root) or inside
    return edges


def _common(one: list[int], other: list[int]) -> list[int]:
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return one[:depth]
