"""The gradient of a full `max`, `min` or `median` as eager has it on a CPU.

PyTorch's formula (`evenly_distribute_backward`) has two forms. On a CPU it fills the places of the extremum, of zeros
that lie contiguously; for tensor subclasses, as a trace's stand-ins are, it multiplies the mask by each place's share.
The product is -0.0 beside a negative share, and NaN beside one that is infinite or NaN, where eager's gradient is 0.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call
from aottrain.ir.graph import calls, required_spec

aten = torch.ops.aten


def spread_as_eager(graph: fx.Graph) -> None:
    """Fill what the trace multiplied, in place. Where the values are on other devices eager multiplies, too."""
    for node in list(calls(graph)):
        if not _is_spread(node):
            continue
        mask, share = node.args
        spec = required_spec(node)
        with graph.inserting_before(node):
            contiguous = torch.contiguous_format
            zeros = add_call(node, aten.zeros_like.default, (mask,), dtype=spec.dtype, memory_format=contiguous)
            filled = add_call(node, aten.masked_fill.Tensor, (zeros, mask, share))
        node.replace_all_uses_with(filled)
        graph.erase_node(node)


def _is_spread(node: fx.Node) -> bool:
    """Whether it is mask * (gradient / mask.sum()), with the mask that the formula makes: equal, or both NaN."""
    if node.target is not aten.mul.Tensor or required_spec(node).device.type != "cpu":
        return False
    mask, share = node.args
    if not _calls(mask, aten.logical_or_.default) or not _calls(share, aten.div.Tensor):
        return False
    equal, both_nan = mask.args
    if not _calls(equal, aten.eq.Tensor) or not _calls(both_nan, aten.logical_and.default):
        return False
    nan = all(_calls(operand, aten.isnan.default) for operand in both_nan.args)
    count = share.args[1]
    return nan and _calls(count, aten.sum.default) and count.args == (mask,) and required_spec(share).shape == ()


def _calls(node: object, target: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.target is target
