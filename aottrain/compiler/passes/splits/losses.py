"""split_losses: a cross-entropy's last part as a loss of each row, and sums of them.

The op itself reads other elements of the log-probabilities than it is at, and gives numbers that are known when all
rows are done: the log-probabilities would be written for it. The loss of a row shares the kernel that makes them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, laid_out_as
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, required_spec, spec_of, value_of
from aottrain.ops.losses.nll import MEAN, NONE

aten, own = torch.ops.aten, torch.ops.aottrain


def split_losses(joint: JointGraph) -> JointGraph:
    """The same program; sums are rounded otherwise than eager's. The graph itself where it has no such loss: of rows of
    fixed size."""
    return split_calls(joint, _is_split, _split)


def _is_split(node: fx.Node) -> bool:
    if node.target not in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default) or node.kwargs:
        return False
    specs = [spec_of(source) for source in node.all_input_nodes]
    plain = all(spec is not None and spec.symbolic is None and spec.numel > 0 for spec in specs)
    is_read = any(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    weighs_bytes = node.args[2] is not None and required_spec(node.args[1]).dtype is torch.uint8
    return plain and not weighs_bytes and is_read and len(required_spec(node.args[0]).shape) in (2, 4)


def _split(node: fx.Node) -> None:
    log_probabilities, target, weight, reduction, ignore = node.args
    loss_type, total_type = (value.dtype for value in value_of(node))
    with node.graph.inserting_before(node):
        rows = add_call(node, own.nll_rows.default, (log_probabilities, target, ignore))
        shares = _shares(rows, target, weight, ignore)
        if weight is not None:
            rows = add_call(node, aten.mul.Tensor, (rows, shares))
        if reduction == NONE:
            number = add_call(node, aten.full.default, ([], 0), dtype=total_type, device=required_spec(target).device)
            results = [rows, number]
        else:
            dims = list(range(len(required_spec(target).shape)))
            loss, number = (add_call(node, aten.sum.dim_IntList, (each, dims)) for each in (rows, shares))
            results = [add_call(node, aten.div.Tensor, (loss, number)) if reduction == MEAN else loss, number]
        results = [cast(each, each, dtype) for each, dtype in zip(results, (loss_type, total_type), strict=True)]
        for user in list(node.users):
            position: Any = user.args[1]
            result = laid_out_as(results[position], user)
            if result is not None:
                user.replace_all_uses_with(result)


def _shares(rows: fx.Node, target: Any, weight: Any, ignore: Any) -> fx.Node:
    """What each row counts: 1 or its class's weight, 0 where it is ignored. In the losses' type."""
    wide = required_spec(rows).dtype
    counted = add_call(rows, aten.ne.Scalar, (target, ignore))
    if weight is None:
        return cast(counted, counted, wide)
    picked = add_call(rows, aten.mul.Tensor, (target, counted))
    share = add_call(rows, aten.index.Tensor, (weight, [picked]))
    share = cast(share, share, wide)
    ignored = add_call(rows, aten.eq.Scalar, (target, ignore))
    return add_call(rows, aten.masked_fill.Scalar, (share, ignored, 0))
