"""Minimum cut over vertices, on plain integers: no torch, so that it is tested with hand-drawn graphs.

A vertex cut is an edge cut after each vertex is split into an entry and an exit, joined by an edge of its weight
(Ford and Fulkerson, "Flows in Networks", 1962); solved by networkx's preflow-push.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import networkx as nx

_SOURCE, _SINK = "source", "sink"


def min_vertex_cut(
    weights: Mapping[int, int | None],
    edges: Iterable[tuple[int, int]],
    sources: Iterable[int],
    sinks: Iterable[int],
) -> tuple[int, set[int]]:
    """The cheapest set of vertices that every path from a source to a sink passes through.

    weights: integer weight of each vertex; None: may not be in the cut. A source or a sink may be in the cut itself.
    Returns (total weight, cut). Raises ValueError where no finite cut exists.
    """
    graph = nx.DiGraph()
    graph.add_node(_SOURCE)
    graph.add_node(_SINK)
    for vertex, weight in weights.items():
        # An edge without a capacity is infinite to networkx.
        graph.add_edge(_entry(vertex), _exit(vertex), **({} if weight is None else {"capacity": weight}))
    graph.add_edges_from((_exit(first), _entry(second)) for first, second in edges)
    graph.add_edges_from((_SOURCE, _entry(vertex)) for vertex in sources)
    graph.add_edges_from((_exit(vertex), _SINK) for vertex in sinks)
    try:
        value, (reachable, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    except nx.NetworkXUnbounded as error:
        raise ValueError("a path from source to sink holds no vertex that may be cut") from error
    cut = {vertex for vertex in weights if _entry(vertex) in reachable and _exit(vertex) not in reachable}
    return value, cut


def _entry(vertex: int) -> Hashable:
    return (vertex, 0)


def _exit(vertex: int) -> Hashable:
    return (vertex, 1)
