"""split_products: a product that is narrow somewhere becomes multiplications and sums, which kernels share.

A library's product of one term, or of a few, moves memory: what comes before and after it are passes of their own. The
weighted sum over a mixture's experts is such a product, and so is its gradient, an outer product.
"""

from __future__ import annotations

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, laid_out_as
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, required_spec, spec_of

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.bmm.default)
_DTYPES = (torch.float32, torch.float64)  # a product of a narrower type is summed in a wider one
# Of so few terms each is added on its own, wherever it lies.
_FEW = 8


def split_products(joint: JointGraph) -> JointGraph:
    """The same program, whose sums may be rounded otherwise. The graph itself where no product is so narrow."""
    return split_calls(joint, _is_narrow, _split)


def _is_narrow(node: fx.Node) -> bool:
    """One term: an outer product. Or one row or column of each matrix of many, as sums of few terms, or of such as lie
    side by side in both."""
    if node.target not in _PRODUCTS or node.kwargs:
        return False
    specs = [spec_of(source) for source in (node, *node.args) if isinstance(source, fx.Node)]
    if len(specs) < 3 or any(spec is None or spec.symbolic is not None or not spec.numel for spec in specs):
        return False
    own, left, right = (required_spec(source) for source in (node, *node.args))
    if own.dtype not in _DTYPES:
        return False
    terms = left.shape[-1]
    if terms == 1:
        return True
    is_vector = node.target is aten.bmm.default and own.shape[0] > 1 and 1 in own.shape[1:]
    return is_vector and (terms <= _FEW or (left.stride[-1] == 1 and right.stride[-2] == 1))


def _split(node: fx.Node) -> None:
    left, right = node.args
    terms = required_spec(left).shape[-1]
    with node.graph.inserting_before(node):
        if terms <= _FEW:
            result = _outer(node, 0)
            for i in range(1, terms):
                result = add_call(node, aten.add.Tensor, (result, _outer(node, i)))
        else:
            wide = required_spec(node).shape[-1] > 1  # else the result is a column
            across = left if wide else right
            turned = add_call(node, aten.permute.default, (across, [0, 2, 1]))
            factors = (turned, right) if wide else (left, turned)
            product = add_call(node, aten.mul.Tensor, factors)
            result = add_call(node, aten.sum.dim_IntList, (product, [1 if wide else 2], True))
        placed = laid_out_as(result, node)
    if placed is not None:
        node.replace_all_uses_with(placed)


def _outer(node: fx.Node, term: int) -> fx.Node:
    """Of one term: a column of the left matrix by a row of the right one."""
    left, right = node.args
    column, row = left, right
    if required_spec(left).shape[-1] > 1:
        dims = len(required_spec(left).shape)
        column = add_call(node, aten.slice.Tensor, (left, dims - 1, term, term + 1))
        row = add_call(node, aten.slice.Tensor, (right, dims - 2, term, term + 1))
    return add_call(node, aten.mul.Tensor, (column, row))
