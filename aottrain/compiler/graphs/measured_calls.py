"""Graph nodes as calls that can be measured: the workspace of each op, for the memory timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten, tree_map
from aottrain.compiler.graphs.repetition import once_for_alike
from aottrain.compiler.graphs.under_way import within_collective
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import InputKind, JointGraph, calls, info, spec_of, storage_bytes, value_of
from aottrain.ir.ops import communicates
from aottrain.ir.sizes.expressions import concrete, hint
from aottrain.measure.calls import OpCall
from aottrain.measure.workspaces import has_rule, product_workspace_bytes, workspace_by_rule, workspace_bytes

Workspace = Callable[[fx.Node], int]
_PRODUCTS = ("matrix product", "linear and cross-entropy")


def no_workspace(node: fx.Node) -> int:
    return 0


def workspaces_of(*graphs: fx.Graph, measured: bool = True) -> Workspace:
    """Bytes that the call of a node allocates inside itself: a function of nodes, of these graphs or of any other.

    The calls of these graphs are measured now, those of others when asked for. What cannot be measured counts what its
    rule says, or 0; so do all calls where nothing is to be measured.
    """
    if not measured:
        return _ruled
    alike = once_for_alike(call_of)
    bytes_by_call: dict[int, int] = {}

    def measure(nodes: Iterable[fx.Node]) -> None:
        found = {id(call): call for call in map(alike, nodes) if call is not None and id(call) not in bytes_by_call}
        bytes_by_call.update(zip(found, workspace_bytes(list(found.values())).num_bytes, strict=True))
        kept.extend(found.values())

    kept: list[OpCall] = []  # so that no other one takes its identity
    measure(node for graph in graphs for node in calls(graph))

    def workspace(node: fx.Node) -> int:
        if communicates(node.target):
            return within_collective(node)
        call = alike(node)
        if call is not None and id(call) not in bytes_by_call:
            measure([node])
        return 0 if call is None else bytes_by_call[id(call)]

    return workspace


def _ruled(node: fx.Node) -> int:
    if communicates(node.target):
        return within_collective(node)
    if node.op != "call_function" or not has_rule(node.target):
        return 0
    call = call_of(node)
    return 0 if call is None else workspace_by_rule(call)


def kept_by_libraries(joint: JointGraph) -> int:
    """Bytes that cuBLAS keeps for the program from its first call on: for the thread of the forward and for that of the
    backward, which autograd has one of for each device, where they do matrix products."""
    device = joint.signature.inputs[joint.signature.input_indices(InputKind.RNG)[0]].spec.device
    if device.type != "cuda":
        return 0
    in_backward = descendants(joint.inputs_of(InputKind.TANGENT))
    halves = {node in in_backward for node in calls(joint.graph) if info(node).label in _PRODUCTS}
    return len(halves) * product_workspace_bytes(device) if halves else 0


def call_of(node: fx.Node) -> OpCall | None:
    """The node as a call by layouts, symbolic sizes as they were traced; None for views and what is no op."""
    if node.op != "call_function" or info(node).is_free:
        return None
    args, kwargs = tree_map(_layout, (tuple(node.args), dict(node.kwargs)))
    return OpCall(node.target, args, kwargs, _result_bytes(node))


def _layout(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):
        return concrete(argument)
    spec = spec_of(argument)
    return concrete(value_of(argument)) if spec is None else replace(spec, symbolic=None)


def _result_bytes(node: fx.Node) -> int:
    if spec_of(node) is not None:
        return storage_bytes(node)
    items = [leaf for leaf in tree_flatten(value_of(node))[0] if isinstance(leaf, torch.Tensor)]
    return sum(hint(leaf.untyped_storage().nbytes()) for leaf in items)
