"""Stable printing of graphs: one line a node, the same text for the same program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import info, module_of, spec_of


def graph_text(graph: fx.Graph) -> str:
    """`name: dtype[shape] = op(args)  # module`, in program order."""
    return "\n".join(node_text(node) for node in graph.nodes)


def node_text(node: fx.Node) -> str:
    """One line for one node."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    spec = spec_of(node)
    kind = f": {spec}" if spec is not None else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = input"
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    name = info(node).name.removeprefix("aten.").removesuffix(".default")
    module = module_of(node)
    return f"{node.name}{kind} = {name}({', '.join(arguments)})" + (f"  # {module}" if module else "")


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return str(value)
