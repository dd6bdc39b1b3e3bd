"""New calls in a graph, with all that a later stage reads of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import fx

from aottrain.compat import tree_flatten, tree_map
from aottrain.ir.graph import copy_provenance, set_value, value_of


def add_call(like: fx.Node, target: Any, arguments: tuple[Any, ...], name: str | None = None, **more: Any) -> fx.Node:
    """A call where the graph inserts now, with the value that it gives for fakes; written by the user where `like`,
    a node of the same graph, was."""
    node = like.graph.create_node("call_function", target, arguments, more, name)
    copy_provenance(like, node)
    set_value(node, fake_result(target, arguments, more))
    return node


def fake_result(target: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """What a call gives for the fakes of its operands."""
    given, named = tree_map(lambda v: value_of(v) if isinstance(v, fx.Node) else v, (arguments, more))
    fakes = (value for value in tree_flatten((given, named))[0] if hasattr(value, "fake_mode"))
    with getattr(next(fakes, None), "fake_mode", nullcontext()):
        return target(*given, **named)
