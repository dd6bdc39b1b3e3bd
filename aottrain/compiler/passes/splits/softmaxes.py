"""split_softmaxes: a softmax over the first dimension in memory, if it is long, as maxima, exponentials and sums.

Its rows lie across memory, and are too long to be taken side by side. The parts are reductions over rows as memory has
them, and pointwise ops. So is one of a transposed view, whose result lies in its own rows: as the second half of a
contrastive loss, whose logits are compared by rows and by columns. And so is a variance over that dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, is_call, laid_out_as, reads_alike
from aottrain.compiler.lowering import rules_for
from aottrain.compiler.lowering.reductions import reduced_dims
from aottrain.compiler.lowering.rules import LONGEST_SIDE_BY_SIDE, NEIGHBOURS, argument
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, required_spec, spec_of, value_of
from aottrain.ops.losses.nll import MEAN

aten = torch.ops.aten

_FORWARDS = (aten._softmax.default, aten._log_softmax.default)
_VARIANCES = (aten.var.correction, aten.std.correction)
_BACKWARDS = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
# How many times as many elements a value has as each of what it is made of, so that it is made of little.
_LITTLE = 8
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}


def split_softmaxes(joint: JointGraph) -> JointGraph:
    """The same program, rounded otherwise than eager's. The graph itself where it has no such softmax."""
    return split_calls(joint, _is_split, _split)


def _split(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        if node.target in _VARIANCES:
            made = _variance(node)
        else:
            made = (_forward if node.target in _FORWARDS else _backward)(node)
        placed = made if all(reads_alike(user, {node: made}) for user in node.users) else laid_out_as(made, node)
    if placed is not None:
        node.replace_all_uses_with(placed)


def _is_split(node: fx.Node) -> bool:
    """Whether its rows are long and lie across memory."""
    if node.target in _FORWARDS:
        source, dim = node.args[:2]
        return _is_across(source, dim, LONGEST_SIDE_BY_SIDE if _lie_alike(node, source) else NEIGHBOURS)
    if node.target in _VARIANCES:
        dims = reduced_dims(node.args[0], argument(node, "dim", 1)) if isinstance(node.args[0], fx.Node) else ()
        return len(dims) == 1 and _count(node) > 0 and _is_across(node.args[0], dims[0], LONGEST_SIDE_BY_SIDE)
    if node.target not in _BACKWARDS:
        return False
    gradient, result, dim = node.args[:3]
    if _lie_alike(node, gradient) and _lie_alike(node, result):
        return _is_across(result, dim, LONGEST_SIDE_BY_SIDE)
    return _is_across(result, dim, NEIGHBOURS) and (_lie_alike(gradient, result) or _is_made_of_little(gradient))


def _lie_alike(one: Any, other: Any) -> bool:
    first, second = (spec_of(each) if isinstance(each, fx.Node) else None for each in (one, other))
    return first is not None and second is not None and first.same_layout(second)


def _is_made_of_little(value: Any) -> bool:
    """Whether its elements follow from far fewer, as the gradient of what was looked up in each row: they are as well
    made in any order."""
    read = [operand.node for rule in rules_for(value)[:1] for operand in rule.operands]
    return bool(read) and all(_LITTLE * required_spec(each).numel <= required_spec(value).numel for each in read)


def _is_across(source: Any, dim: Any, least: int) -> bool:
    """Whether this dimension is longer, and what else is larger than one lies closer together."""
    spec = spec_of(source) if isinstance(source, fx.Node) else None
    if spec is None or spec.symbolic is not None or spec.dtype not in _WIDE or spec.device.type != "cpu":
        return False
    if not spec.shape or spec.shape[dim] <= least:
        return False
    others = [(spec.stride[d], size) for d, size in enumerate(spec.shape) if d != dim % len(spec.shape) and size > 1]
    if not others or max(others)[0] > spec.stride[dim]:
        return False
    nearest, size = min(others)
    return nearest == 1 and size >= NEIGHBOURS


def _forward(node: fx.Node) -> fx.Node:
    source, dim = node.args[:2]
    x = _widened(node, source)
    shifted = add_call(node, aten.sub.Tensor, (x, add_call(node, aten.amax.default, (x, [dim], True))))
    power = add_call(node, aten.exp.default, (shifted,))
    total = add_call(node, aten.sum.dim_IntList, (power, [dim], True))
    if node.target is aten._log_softmax.default:
        result = add_call(node, aten.sub.Tensor, (shifted, add_call(node, aten.log.default, (total,))))
    else:
        result = add_call(node, aten.div.Tensor, (power, total))
    return cast(node, result, required_spec(node).dtype)


def _backward(node: fx.Node) -> fx.Node:
    """y * (g - sum(g * y)) of a softmax, g - exp(y) * sum(g) of its logarithm."""
    gradient, result, dim = node.args[:3]
    y = _widened(node, result)
    if node.target is aten._log_softmax_backward_data.default:
        known = None if _lie_alike(gradient, result) else _of_targets(node, gradient, dim)
        g, total = known or _with_sum(node, _widened(node, gradient), dim)
        product, shares = g, add_call(node, aten.exp.default, (y,))
    else:
        product = add_call(node, aten.mul.Tensor, (_widened(node, gradient), y))
        (product, total), shares = _with_sum(node, product, dim), y
    out = add_call(node, aten.sub.Tensor, (product, add_call(node, aten.mul.Tensor, (shares, total))))
    return cast(node, out, required_spec(node).dtype)


def _variance(node: fx.Node) -> fx.Node:
    """The sum of squared distances from the mean, less what the mean's rounding adds, as ATen's function for rows has
    it, over their number; or its root."""
    source: Any = node.args[0]
    x, dims = _widened(node, source), list(reduced_dims(source, argument(node, "dim", 1)))
    keeps, size = bool(argument(node, "keepdim", 9, False)), required_spec(source).shape[dims[0]]
    distance = add_call(node, aten.sub.Tensor, (x, add_call(node, aten.mean.dim, (x, dims, True))))
    squares = add_call(node, aten.mul.Tensor, (distance, distance))
    total, rest = (add_call(node, aten.sum.dim_IntList, (each, dims, keeps)) for each in (squares, distance))
    excess = add_call(node, aten.div.Scalar, (add_call(node, aten.mul.Tensor, (rest, rest)), size))
    result = add_call(node, aten.div.Scalar, (add_call(node, aten.sub.Tensor, (total, excess)), _count(node)))
    if node.target is aten.std.correction:
        result = add_call(node, aten.sqrt.default, (result,))
    return cast(node, result, required_spec(node).dtype)


def _count(node: fx.Node) -> Any:
    """What a variance along one dimension is divided by."""
    correction, source = argument(node, "correction", 9, 1), node.args[0]
    dim = reduced_dims(source, argument(node, "dim", 1))[0]  # type: ignore[arg-type]
    return required_spec(source).shape[dim] - (1 if correction is None else correction)


def _with_sum(node: fx.Node, value: fx.Node, dim: Any) -> tuple[fx.Node, fx.Node]:
    return value, add_call(node, aten.sum.dim_IntList, (value, [dim], True))


def _of_targets(node: fx.Node, gradient: Any, dim: Any) -> tuple[fx.Node, fx.Node] | None:
    """What a negative log-likelihood gives as the gradient, laid out as columns, and its sum over each row, which is
    the one number that is not zero; None of another gradient."""
    if not is_call(gradient, aten.nll_loss_backward.default):
        return None
    upstream, _, target, weight, reduction, ignore, count = gradient.args
    own, shape = required_spec(gradient).dtype, required_spec(gradient).shape
    if weight is not None or len(shape) != 2 or dim % 2 != 1:
        return None
    step = add_call(node, aten.neg.default, (_widened(node, upstream),))
    if reduction == MEAN:
        step = add_call(node, aten.div.Tensor, (step, _widened(node, count)))
    step = cast(node, cast(node, step, own), _WIDE[own])
    ignored = add_call(node, aten.eq.Scalar, (target, ignore))
    each = add_call(node, aten.expand.default, (step, [shape[0]]))
    total = add_call(node, aten.masked_fill.Scalar, (each, ignored, 0))
    places = add_call(node, aten.arange.default, (shape[1],), dtype=torch.int64, device=value_of(target).device)
    places = add_call(node, aten.unsqueeze.default, (places, 1))
    others = add_call(node, aten.ne.Tensor, (places, add_call(node, aten.unsqueeze.default, (target, 0))))
    row = add_call(node, aten.unsqueeze.default, (total, 0))
    columns = add_call(node, aten.expand.default, (row, [shape[1], shape[0]]))
    columns = add_call(node, aten.masked_fill.Scalar, (columns, others, 0))
    return add_call(node, aten.t.default, (columns,)), add_call(node, aten.unsqueeze.default, (total, 1))


def _widened(node: fx.Node, value: Any) -> fx.Node:
    return cast(node, value, _WIDE[required_spec(value).dtype])
