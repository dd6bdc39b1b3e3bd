"""Runs an fx graph op by op through ATen, freeing each value at its last use: the oracle for all generated kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from aottrain.compat import SIZE_NAMESPACE
from aottrain.ir.analysis.liveness import freed_after, last_uses
from aottrain.ir.graph import info, is_size, spec_of
from aottrain.ir.tensor import sizes_text

# Ops that the trace prepared an input's strides for: views that other strides forbid, and kernels that take two inputs
# to be laid out alike. All others get the strides that eager's would get.
_BY_STRIDES = {
    "aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default", "aten.as_strided.default",
    "aten.native_group_norm.default", "aten.native_group_norm_backward.default",
}  # fmt: skip

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
    names: dict[str, Any] = {**SIZE_NAMESPACE, "inf": float("inf"), "nan": float("nan")}
    last = last_uses(node.all_input_nodes for node in graph.nodes)
    freed = freed_after(last, graph.output_node().all_input_nodes)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    lines = ["def run(inputs):"]
    if inputs:
        lines += [f"    {', '.join(node.name for node in inputs)}, = inputs", "    inputs.clear()"]
    unread = [node.name for node in inputs if not node.users and not is_size(node)]
    if unread:
        lines.append(f"    del {', '.join(unread)}")
    for position, node in enumerate(graph.nodes):
        if node.op == "call_function":
            lines.append(f"    {node.name} = {call_text(node, names)}")
            lines += _laid_out(node, names)
        elif node.op == "output":
            lines.append(f"    return {value_text(list(node.args[0]), names)}")
            continue
        dead = [value.name for value in freed.get(position, ()) if not is_size(value)]
        if node.op == "call_function" and not node.users:
            dead.append(node.name)
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    return "\n".join(lines) + "\n", names


def _laid_out(node: fx.Node, names: dict[str, Any]) -> list[str]:
    """A statement that gives the node's value the strides that it was traced with, where a reader relies on them.

    Fake tensors and kernels disagree on some strides. A trace leaves a copy out where its input is laid out as an op
    needs it; with other strides that op would read wrong numbers.
    """
    spec = spec_of(node)
    if spec is None or not any(user.op == "call_function" and info(user).name in _BY_STRIDES for user in node.users):
        return []
    names["laid_out"] = laid_out
    if spec.symbolic is not None:
        strides = sizes_text(spec.strides)
    else:
        strides = f"k_{len(names)}"
        names[strides] = spec.stride
    return [f"    if {node.name}.stride() != {strides}: {node.name} = laid_out({node.name}, {strides})"]


def laid_out(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The value, or a copy of it with these strides; those of dimensions of size 1 do not count."""
    if value.numel() <= 1 or all(
        size == 1 or old == new for size, old, new in zip(value.shape, value.stride(), strides, strict=True)
    ):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def call_text(node: fx.Node, names: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        return f"{value_text(node.args[0], names)}[{value_text(node.args[1], names)}]"
    schema = getattr(node.target, "_schema", None)
    name = str(node.target).replace(".", "_") if schema is not None else f"k_{len(names)}"
    names[name] = node.target
    arguments = [value_text(value, names) for value in node.args]
    # `self`, `from` and the like are legal names of ATen arguments, but not all of them of Python's.
    keywords = {
        key: value for key, value in node.kwargs.items() if key.isidentifier() and key not in ("from", "lambda")
    }
    arguments += [f"{key}={value_text(value, names)}" for key, value in keywords.items()]
    others = [f"{key!r}: {value_text(value, names)}" for key, value in node.kwargs.items() if key not in keywords]
    if others:
        arguments.append("**{" + ", ".join(others) + "}")
    return f"{name}({', '.join(arguments)})"


def value_text(value: Any, names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(item, names) for item in value) + "]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        name = "k_" + "".join(c if c.isalnum() else "_" for c in str(value))
    else:
        name = f"k_{len(names)}"
    names[name] = value
    return name
