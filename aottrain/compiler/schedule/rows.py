"""choose_rows: gradients of looked-up rows, and messages along edges, that a function of our own adds up."""

from __future__ import annotations

import torch
from torch import fx

from aottrain.ir.graph import calls, spec_of, value_of
from aottrain.ir.schedule import OWN_EMBEDDING_GRADIENT, OWN_INDEX_ADD
from aottrain.ir.tensor import TensorSpec
from aottrain.toolchain.native import find_compiler

aten = torch.ops.aten

_REASON = "rows are added in one loop, where ATen calls an addition for each"


def choose_rows(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """For each such call its name in `ops.rows.ADDED_ROWS`, and the reason."""
    names = {
        node: OWN_INDEX_ADD if node.target is aten.index_add.default else OWN_EMBEDDING_GRADIENT
        for node in calls(graph)
        if (node.target is aten.index_add.default and _adds_rows(node))
        or (node.target is aten.embedding_dense_backward.default and _is_plain_embedding(node))
    }
    return {node: (name, _REASON) for node, name in names.items()} if names and find_compiler() else {}


def _adds_rows(node: fx.Node) -> bool:
    """Along the first dimension, as they are."""
    if len(node.args) != 4 or node.kwargs:
        return False
    into, index, rows = (spec_of(node.args[i]) for i in (0, 2, 3))  # type: ignore[arg-type]
    if into is None or index is None or rows is None or not _are_plain(index, into, rows) or len(index.shape) != 1:
        return False
    dim = node.args[1]
    first = isinstance(dim, int) and dim % max(len(into.shape), 1) == 0
    dense = all(value_of(node.args[i]).is_contiguous() for i in (0, 2, 3))  # type: ignore[arg-type]
    return first and rows.shape == (*index.shape, *into.shape[1:]) and dense


def _is_plain_embedding(node: fx.Node) -> bool:
    if len(node.args) != 5 or node.kwargs or node.args[4]:
        return False
    gradient, index, own = (spec_of(each) for each in (node.args[0], node.args[1], node))  # type: ignore[arg-type]
    if gradient is None or index is None or own is None or not _are_plain(index, gradient, own):
        return False
    return bool(index.shape) and gradient.shape == (*index.shape, own.shape[1]) and value_of(node).is_contiguous()


def _are_plain(index: TensorSpec, *values: TensorSpec) -> bool:
    """Of float32, on a CPU, of fixed sizes, with elements."""
    sound = all(spec.symbolic is None and spec.device.type == "cpu" and spec.numel for spec in (index, *values))
    return sound and index.dtype is torch.int64 and all(spec.dtype is torch.float32 for spec in values)
