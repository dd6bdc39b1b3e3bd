"""The rewrite of single calls, which all splits are."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls


def split_calls(joint: JointGraph, is_split: Callable[[fx.Node], bool], split: Callable[[fx.Node], None]) -> JointGraph:
    """The program with each such call rewritten in a copy of its graph; the same object where it has none."""
    if not any(map(is_split, calls(joint.graph))):
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        if is_split(node):
            split(node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)
