"""Comparisons of values with their own extrema are made once.

`x == x.amax()` holds at one place at least, because an extremum is a copy of an element. Where a kernel computes x
again, another order of its sums may change the last bit of x. Compared with the extremum that was saved it is then
equal nowhere, and amax's gradient, which is divided by the number of such places, is NaN. So what such a comparison
decides is saved, a byte for each element. PyTorch's own operators give the same bits twice; generated kernels need not.
"""

from __future__ import annotations

import torch
from torch import fx

from aottrain.ir.graph import JointGraph, calls, is_tuple, storage_root, value_of, view_source
from aottrain.ir.ops import packet_name

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
# What gives back elements of its operands as they are, whatever it chooses them by.
_SELECTING = {
    "amax", "amin", "max", "min", "aminmax", "topk", "sort", "kthvalue", "median", "nanmedian", "mode",
    "cummax", "cummin", "_cummax_helper", "_cummin_helper", "maximum", "minimum", "fmax", "fmin", "clamp",
    "clamp_min", "clamp_max", "scatter_reduce", "index_reduce", "linalg_vector_norm", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d",
    "max_pool_taps",
}  # fmt: skip
# What moves elements, or makes them wider, or drops a sign.
_MOVING = {"gather", "index_select", "index", "take", "flip", "roll", "cat", "stack", "clone", "abs", "_to_copy",
           "copy", "where", "masked_fill", "constant_pad_nd", "index_put", "scatter"}  # fmt: skip
# Gradient formulas that compare an operand with a result within themselves: the places of both.
_WITHIN = {"_segment_reduce_backward": 2, "_cdist_backward": (1, 2), "_pdist_backward": 1}


def decided_once(joint: JointGraph) -> frozenset[fx.Node]:
    """The values that may not be computed a second time: comparisons of values with what was selected from them, and
    values that a gradient formula compares with what was selected from them."""
    found: set[fx.Node] = set()
    for node in calls(joint.graph):
        name = packet_name(node.target)
        if name in _COMPARISONS and len(node.all_input_nodes) == 2:
            one, other = node.all_input_nodes
            if _is_selected(one, other) or _is_selected(other, one):
                found.add(node)
        elif name in _WITHIN:
            places = _WITHIN[name]
            operands = [node.args[i] for i in (places if isinstance(places, tuple) else (places,))]
            found.update(storage_root(value) for value in operands if isinstance(value, fx.Node))
    return frozenset(node for node in found if node.op == "call_function")


def _is_selected(value: fx.Node, other: fx.Node) -> bool:
    """Whether elements of `value` were chosen among those that `other` is made of, which are computed, not given."""
    wanted = _moved_from(other)
    pending, seen, chosen = [value], set(), False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if packet_name(node.target) in _SELECTING:
            chosen = True
            pending += node.all_input_nodes
        elif _moves(node):
            pending += node.all_input_nodes
    return chosen and any(node in seen and _is_computed(node) for node in wanted)


def _moved_from(value: fx.Node) -> set[fx.Node]:
    """The values whose elements it has, itself among them."""
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            if _moves(node):
                pending += node.all_input_nodes
    return seen


def _moves(node: fx.Node) -> bool:
    """Whether its elements are its operands', each as it is, wider or without its sign; items of a tuple are, too."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    is_item = is_tuple(node.all_input_nodes[0])
    return is_item or view_source(node) is not None or packet_name(node.target) in _MOVING


def _is_computed(node: fx.Node) -> bool:
    value = value_of(node)
    is_number = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return node.op == "call_function" and is_number and not _moves(node)
