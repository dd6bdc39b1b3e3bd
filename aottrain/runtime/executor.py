"""Runs an fx graph op by op through ATen, freeing each value at its last use: the oracle for all generated kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

Runner = Callable[[list[Any]], list[Any]]


def aten_runner(graph: fx.Graph) -> Runner:
    """A function that takes the inputs as a list, which it empties, and returns the outputs as a list.

    Emptying the list (a boxed call) lets an input die at its last use, not when the caller returns.
    """
    source, names = render(graph)
    namespace: dict[str, Any] = dict(names)
    exec(compile(source, "<aottrain aten program>", "exec"), namespace)
    return namespace["run"]


def render(graph: fx.Graph) -> tuple[str, dict[str, Any]]:
    """Python text of the program, and the names that it reads."""
    names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
    last_use = _last_uses(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    lines = ["def run(inputs):"]
    if inputs:
        lines += [f"    {', '.join(node.name for node in inputs)}, = inputs", "    inputs.clear()"]
    unread = [node.name for node in inputs if not node.users]
    if unread:
        lines.append(f"    del {', '.join(unread)}")
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node.name} = {_call(node, names)}")
        elif node.op == "output":
            lines.append(f"    return {_value(list(node.args[0]), names)}")
            continue
        dead = [value.name for value in last_use.get(node, []) if value.op != "output"]
        if node.op == "call_function" and not node.users:
            dead.append(node.name)
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    return "\n".join(lines) + "\n", names


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nothing reads after it. Values that are returned live on."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(graph.nodes)):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if node.op != "output":
                    found.setdefault(node, []).append(source)
    return found


def _call(node: fx.Node, names: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        return f"{_value(node.args[0], names)}[{_value(node.args[1], names)}]"
    schema = getattr(node.target, "_schema", None)
    name = str(node.target).replace(".", "_") if schema is not None else f"k_{len(names)}"
    names[name] = node.target
    arguments = [_value(value, names) for value in node.args]
    # `self`, `from` and the like are legal names of ATen arguments, but not all of them of Python's.
    plain = {key: value for key, value in node.kwargs.items() if key.isidentifier() and key not in ("from", "lambda")}
    arguments += [f"{key}={_value(value, names)}" for key, value in plain.items()]
    odd = {key: value for key, value in node.kwargs.items() if key not in plain}
    if odd:
        arguments.append("**{" + ", ".join(f"{key!r}: {_value(value, names)}" for key, value in odd.items()) + "}")
    return f"{name}({', '.join(arguments)})"


def _value(value: Any, names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, names) for item in value) + "]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        name = "k_" + "".join(c if c.isalnum() else "_" for c in str(value))
    else:
        name = f"k_{len(names)}"
    names[name] = value
    return name
