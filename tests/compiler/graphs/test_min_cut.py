"""The minimum vertex cut on graphs small enough to try every cut."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from aottrain.compiler.graphs.algorithms.min_cut import _NO_CUT, min_edge_cut, min_vertex_cut


def separates(cut, edges, sources, sinks):
    """Whether every path from a source to a sink passes through the cut."""
    stack = [v for v in sources if v not in cut]
    seen = set(stack)
    while stack:
        vertex = stack.pop()
        if vertex in sinks:
            return False
        for first, second in edges:
            if first == vertex and second not in seen and second not in cut:
                seen.add(second)
                stack.append(second)
    return True


def cheapest(weights, edges, sources, sinks):
    allowed = [v for v, w in weights.items() if w is not None]
    cuts = (set(c) for n in range(len(allowed) + 1) for c in itertools.combinations(allowed, n))
    costs = [sum(weights[v] for v in cut) for cut in cuts if separates(cut, edges, sources, sinks)]
    return min(costs) if costs else None


def test_a_chain_is_cut_at_its_cheapest_vertex():
    assert min_vertex_cut({0: 5, 1: 2, 2: 9}, [(0, 1), (1, 2)], [0], [2]) == (2, {1})


def test_a_diamond_is_cut_at_both_sides_or_at_one_end():
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert min_vertex_cut({0: 9, 1: 2, 2: 3, 3: 9}, edges, [0], [3]) == (5, {1, 2})
    assert min_vertex_cut({0: 4, 1: 2, 2: 3, 3: 9}, edges, [0], [3]) == (4, {0})


def test_a_source_that_is_a_sink_is_cut_itself():
    assert min_vertex_cut({0: 7}, [], [0], [0]) == (7, {0})


def test_without_a_path_nothing_is_cut():
    assert min_vertex_cut({0: 7, 1: 3}, [(1, 0)], [0], [1]) == (0, set())
    assert min_vertex_cut({0: 7}, [], [], [0]) == (0, set())


def test_what_may_not_be_cut_is_not():
    assert min_vertex_cut({0: 5, 1: None, 2: 9}, [(0, 1), (1, 2)], [0], [2]) == (5, {0})
    with pytest.raises(ValueError, match="no vertex that may be cut"):
        min_vertex_cut({0: None, 1: None}, [(0, 1)], [0], [1])


def test_vertices_of_no_weight_are_free():
    value, cut = min_vertex_cut({0: 0, 1: 4, 2: 4}, [(0, 1), (0, 2)], [0], [1, 2])
    assert value == 0 and cut == {0}


def test_several_sources_and_sinks_share_a_cut():
    edges = [(0, 2), (1, 2), (2, 3), (2, 4)]
    assert min_vertex_cut({0: 5, 1: 5, 2: 6, 3: 5, 4: 5}, edges, [0, 1], [3, 4]) == (6, {2})


def test_weights_beyond_floating_point_are_exact():
    big = 2**60
    value, cut = min_vertex_cut({0: big + 1, 1: big, 2: big + 2}, [(0, 1), (1, 2)], [0], [2])
    assert value == big and cut == {1}


@pytest.mark.parametrize("seed", range(60))
def test_against_every_cut(seed):
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    weights = {v: rng.choice([None, 0, 1, 1, 2, 3, 10]) for v in range(count)}
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.4]
    sources = rng.sample(range(count), rng.randint(1, 2))
    sinks = rng.sample(range(count), rng.randint(1, 2))
    best = cheapest(weights, edges, sources, sinks)
    if best is None:
        with pytest.raises(ValueError):
            min_vertex_cut(weights, edges, sources, sinks)
        return
    value, cut = min_vertex_cut(weights, edges, sources, sinks)
    assert value == best == sum(weights[v] for v in cut)
    assert separates(cut, edges, sources, sinks)


def test_the_same_graph_is_always_cut_the_same_way():
    edges = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    cuts = [min_vertex_cut({v: 3 for v in range(8)}, edges, [0, 1], [6, 7]) for _ in range(5)]
    assert all(cut == cuts[0] for cut in cuts)


def reference_cut(weights, edges, sources, sinks):
    """`min_vertex_cut` by networkx's preflow-push: short and slow."""
    graph = nx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for vertex, weight in weights.items():
        # An edge without a capacity is infinite to networkx.
        graph.add_edge((vertex, 0), (vertex, 1), **({} if weight is None else {"capacity": weight}))
    graph.add_edges_from(((first, 1), (second, 0)) for first, second in edges)
    graph.add_edges_from(("source", (vertex, 0)) for vertex in sources)
    graph.add_edges_from(((vertex, 1), "sink") for vertex in sinks)
    try:
        value, (reachable, _) = nx.minimum_cut(graph, "source", "sink")
    except nx.NetworkXUnbounded as error:
        raise ValueError(_NO_CUT) from error
    return value, {vertex for vertex in weights if (vertex, 0) in reachable and (vertex, 1) not in reachable}


@pytest.mark.parametrize("seed", range(200))
def test_the_cut_is_that_of_networkx(seed):
    rng = random.Random(seed)
    num = rng.randint(2, 14)
    weights = {i: None if rng.random() < 0.15 else rng.randint(0, 9) for i in range(num)}
    edges = [(a, b) for a in range(num) for b in range(a + 1, num) if rng.random() < 0.3]
    sources, sinks = rng.sample(range(num), rng.randint(1, 2)), rng.sample(range(num), rng.randint(1, 2))

    def result(solve):
        try:
            return solve(weights, edges, sources, sinks)
        except ValueError as error:
            return str(error)

    assert result(min_vertex_cut) == result(reference_cut)


@pytest.mark.parametrize("seed", range(100))
def test_the_cut_of_edges_is_that_of_networkx(seed):
    rng = random.Random(seed)
    num = rng.randint(2, 9)
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b and rng.random() < 0.4]
    edges = [(a, b, None if rng.random() < 0.1 else rng.randint(0, 9)) for a, b in pairs]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(num))
    for a, b, weight in edges:
        graph.add_edge(a, b, **({} if weight is None else {"capacity": weight}))
    try:
        wanted = nx.minimum_cut_value(graph, 0, 1)
    except nx.NetworkXUnbounded:
        with pytest.raises(ValueError, match="no edge that may be cut"):
            min_edge_cut(edges, 0, 1)
        return
    value, behind = min_edge_cut(edges, 0, 1)
    assert value == wanted == sum(w for a, b, w in edges if a not in behind and b in behind)
    assert 1 in behind and 0 not in behind
