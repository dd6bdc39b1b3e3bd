"""Minimum cuts, of vertices and of edges, on plain integers: no torch, so that they are tested with hand-drawn graphs.

A vertex cut is an edge cut after each vertex is split into an entry and an exit, joined by an edge of its weight
(Ford and Fulkerson, "Flows in Networks", 1962). Solved by Dinic's blocking flows ("Algorithm for solution of a problem
of maximum flow", 1970). The tests hold it to the cut by networkx.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NO_CUT = "a path from source to sink holds no vertex that may be cut"


def min_vertex_cut(
    weights: Mapping[int, int | None],
    edges: Iterable[tuple[int, int]],
    sources: Iterable[int],
    sinks: Iterable[int],
) -> tuple[int, set[int]]:
    """The cheapest set of vertices that every path from a source to a sink passes through; of several the one nearest
    to the sinks.

    weights: integer weight of each vertex; None: may not be in the cut. A source or a sink may be in the cut itself.
    Returns (total weight, cut). Raises ValueError where no finite cut exists.
    """
    number = {vertex: 2 * i for i, vertex in enumerate(weights)}  # entry; the exit is one more
    source, sink = 2 * len(number), 2 * len(number) + 1
    infinite = 1 + sum(weight for weight in weights.values() if weight is not None)
    network = _Network(2 * len(number) + 2)
    for vertex, weight in weights.items():
        network.add(number[vertex], number[vertex] + 1, infinite if weight is None else weight)
    for first, second in edges:
        network.add(number[first] + 1, number[second], infinite)
    for vertex in dict.fromkeys(sources):
        network.add(source, number[vertex], infinite)
    for vertex in dict.fromkeys(sinks):
        network.add(number[vertex] + 1, sink, infinite)
    value = network.max_flow(source, sink, infinite)
    if value >= infinite:
        raise ValueError(_NO_CUT)
    behind = network.reaching(sink)
    return value, {v for v, entry in number.items() if entry not in behind and entry + 1 in behind}


def min_edge_cut(edges: Iterable[tuple[int, int, int | None]], source: int, sink: int) -> tuple[int, set[int]]:
    """The cheapest edges that every path from the source to the sink passes through; of several cuts the one nearest to
    the sink.

    edges: (first, second, integer weight); None: may not be in the cut. Returns (total weight, the vertices behind the
    cut, the sink among them). Raises ValueError where no finite cut exists.
    """
    edges = list(edges)
    number: dict[int, int] = {}
    for vertex in (source, sink, *(vertex for first, second, _ in edges for vertex in (first, second))):
        number.setdefault(vertex, len(number))
    infinite = 1 + sum(weight for _, _, weight in edges if weight is not None)
    network = _Network(len(number))
    for first, second, weight in edges:
        network.add(number[first], number[second], infinite if weight is None else weight)
    value = network.max_flow(number[source], number[sink], infinite)
    if value >= infinite:
        raise ValueError("a path from source to sink holds no edge that may be cut")
    behind = network.reaching(number[sink])
    return value, {vertex for vertex, i in number.items() if i in behind}


class _Network:
    """Edges in pairs: edge 2k and its reverse 2k + 1, `room` what either can still carry."""

    def __init__(self, num_nodes: int):
        self.out: list[list[int]] = [[] for _ in range(num_nodes)]
        self.target: list[int] = []
        self.room: list[int] = []

    def add(self, first: int, second: int, capacity: int) -> None:
        self.out[first].append(len(self.target))
        self.out[second].append(len(self.target) + 1)
        self.target += [second, first]
        self.room += [capacity, 0]

    def max_flow(self, source: int, sink: int, enough: int) -> int:
        """The largest flow, or some flow of at least `enough`."""
        total = 0
        while total < enough and (level := self._levels(source, sink)) is not None:
            total += self._block(source, sink, level, enough)
        return total

    def _levels(self, source: int, sink: int) -> list[int] | None:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = [source]
        for node in queue:
            for edge in self.out[node]:
                following = self.target[edge]
                if self.room[edge] and level[following] < 0:
                    level[following] = level[node] + 1
                    if following == sink:  # nodes as far away as the sink are on no shortest path
                        return level
                    queue.append(following)
        return None

    def _block(self, source: int, sink: int, level: list[int], enough: int) -> int:
        """Push along shortest paths until none is left. One path is kept and cut back to where it is full."""
        out, target, room = self.out, self.target, self.room
        arc = [0] * len(out)
        total, path, node = 0, list[int](), source
        while True:
            if node == sink:
                pushed = min(room[edge] for edge in path)
                total += pushed
                for edge in path:
                    room[edge] -= pushed
                    room[edge ^ 1] += pushed
                if total >= enough:
                    return total
                keep = next(i for i, edge in enumerate(path) if not room[edge])
                node = target[path[keep] ^ 1]
                del path[keep:]
                continue
            edges = out[node]
            while arc[node] < len(edges):
                edge = edges[arc[node]]
                if room[edge] and level[target[edge]] == level[node] + 1:
                    break
                arc[node] += 1
            else:
                if not path:
                    return total
                node = target[path.pop() ^ 1]
                arc[node] += 1
                continue
            path.append(edge)
            node = target[edge]

    def reaching(self, sink: int) -> set[int]:
        """The nodes from which more could flow to the sink."""
        nodes, stack = {sink}, [sink]
        while stack:
            for edge in self.out[stack.pop()]:
                before = self.target[edge]
                if self.room[edge ^ 1] and before not in nodes:
                    nodes.add(before)
                    stack.append(before)
        return nodes
