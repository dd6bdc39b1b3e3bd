"""is_quick: calls that a CPU runs again in the time in which it would read what the last of them gave."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from aottrain.compiler.partition.again.outputs import is_large
from aottrain.compiler.schedule.grouping.cheap import cheap_rule
from aottrain.ir.graph import required_spec

aten = torch.ops.aten

_GRADIENTS = {aten.threshold_backward.default, aten.hardtanh_backward.default}
_COMPARISONS = {aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar}


def is_quick(nodes: Sequence[fx.Node], forward: Set[fx.Node]) -> bool:
    """Exponentials take longer than memory, and so do roundings to half precision.

    forward: what is read there as well.
    """
    large = [node for node in nodes if any(map(is_large, (node, *node.all_input_nodes)))]
    return all(cheap_rule(node) is not None and not _is_rounded(node, nodes, forward) for node in large)


def _is_rounded(node: fx.Node, again: Sequence[fx.Node], forward: Set[fx.Node]) -> bool:
    """Whether a call that runs again rounds its result. One that is compared alone need not be rounded for that."""
    if required_spec(node).dtype.itemsize != 2:
        return False
    readers = [user for user in node.users if user.op != "output" and (user in again or user not in forward)]
    return not all(_compares(user, node) or (user in again and user.target is aten.relu.default) for user in readers)


def _compares(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call asks alone on which side of a number each element lies."""
    if user.target in _GRADIENTS:
        return user.args[1] is node and user.args[0] is not node
    return user.target in _COMPARISONS
