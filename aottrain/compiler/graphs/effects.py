"""Effects are never dead code: what eager raises, a compiled program raises, in the forward or backward as eager does.

An effect (an assertion, a check of a factorisation) runs because of what it is. An operator that also computes, such as
a lookup, is anchored: an effect reads its result, so that no pass takes it for dead, and the forward runs it though the
backward alone may read it. Once a program is simplified, anchors of what is read anyway go.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import aottrain.ops.checks  # noqa: F401  (the ops)
from aottrain.compiler.graphs.rewriting import add_call
from aottrain.ir.analysis.reach import ancestors, descendants
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    InputKind,
    JointGraph,
    OutputKind,
    calls,
    effects_of,
    is_tuple,
    made_in_backward,
    may_raise,
    value_of,
)

_ANCHOR = torch.ops.aottrain.anchor.default
_HELD_BACK = torch.ops.aottrain.held_back.default


def anchor_checks(joint: JointGraph) -> None:
    """Anchor, in place, every call that may raise; and hold effects of the backward back until it runs."""
    for node in calls(joint.graph):
        if may_raise(node) and (result := _tensor_of(node)) is not None:
            with joint.graph.inserting_after(result):
                add_call(node, _ANCHOR, (result,))
    _hold_back(joint)


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """The result, or of several the first."""
    if not is_tuple(node):
        return node if isinstance(value_of(node), torch.Tensor) else None
    items = [user for user in node.users if isinstance(value_of(user), torch.Tensor)]
    place = next((i for i, item in enumerate(value_of(node)) if isinstance(item, torch.Tensor)), None)
    if items or place is None:
        return items[0] if items else None
    with node.graph.inserting_after(node):
        return add_call(node, operator.getitem, (node, place))


def _hold_back(joint: JointGraph) -> None:
    """What a gradient formula or a hook checks of the forward's values alone is made to depend on the tangents: it
    stays in the backward, as in eager."""
    tangents = joint.inputs_of(InputKind.TANGENT)
    from_tangents = descendants(tangents)
    for node in effects_of(joint.graph):
        if node in from_tangents or not made_in_backward(node) or not tangents:
            continue
        operands = [source for source in node.all_input_nodes if isinstance(value_of(source), torch.Tensor)]
        if operands:
            with joint.graph.inserting_before(node):
                node.replace_input_with(operands[0], add_call(node, _HELD_BACK, (operands[0], tangents)))


def drop_anchors(joint: JointGraph) -> None:
    """Remove, in place, each anchor of what its graph, forward or backward, computes anyway."""
    in_backward = descendants(joint.inputs_of(InputKind.TANGENT))
    anchors = [node for node in calls(joint.graph) if node.target is _ANCHOR]
    others = [node for node in effects_of(joint.graph) if node.target is not _ANCHOR]
    in_forward = ancestors([*joint.outputs_of(*FORWARD_OUTPUTS), *(node for node in others if node not in in_backward)])
    backward = ancestors([*joint.outputs_of(OutputKind.GRADIENT), *(node for node in others if node in in_backward)])
    for anchor in reversed(anchors):
        needed = backward if anchor in in_backward else in_forward
        source = _held(anchor)
        if source in needed or (made_in_backward(anchor) and source in backward):
            _erase(anchor)
        else:
            needed |= ancestors([anchor])


def _held(anchor: fx.Node) -> fx.Node:
    """What it anchors."""
    source: Any = anchor.args[0]
    return source.args[0] if source.target is _HELD_BACK else source


def _erase(anchor: fx.Node) -> None:
    source: Any = anchor.args[0]
    anchor.graph.erase_node(anchor)
    if source.target is _HELD_BACK and not source.users:
        anchor.graph.erase_node(source)
