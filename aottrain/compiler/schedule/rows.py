"""choose_rows: gradients of looked-up rows, and messages along edges, that a function of our own adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import calls, spec_of, value_of
from aottrain.ir.schedule import OWN_EMBEDDING_GRADIENT, OWN_INDEX_ADD, OWN_SCATTER_ADD
from aottrain.ir.tensor import TensorSpec
from aottrain.toolchain.native import find_compiler

aten = torch.ops.aten

_REASON = "rows are added in one loop, where ATen calls an addition for each"


def choose_rows(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """For each such call its name in `ops.rows.ADDED_ROWS`, and the reason."""
    names = {node: _NAMES[node.target][0] for node in calls(graph) if node.target in _NAMES and _is_plain(node)}
    return {node: (name, _REASON) for node, name in names.items()} if names and find_compiler() else {}


def _is_plain(node: fx.Node) -> bool:
    return _NAMES[node.target][1](node)


def _adds_rows(node: fx.Node) -> bool:
    """Along the first dimension, as they are."""
    if len(node.args) != 4 or node.kwargs:
        return False
    into, index, rows = (spec_of(node.args[i]) for i in (0, 2, 3))  # type: ignore[arg-type]
    if into is None or index is None or rows is None or not _are_plain(index, into, rows) or not rows.shape:
        return False
    dim = node.args[1]
    first = isinstance(dim, int) and dim % max(len(into.shape), 1) == 0
    dense = all(value_of(node.args[i]).is_contiguous() for i in (0, 3))  # type: ignore[arg-type]
    if node.target is aten.scatter_add.default:  # as long as what is added, and the same number all along a row
        given = index.shape == rows.shape and index.stride == (1, *[0] * (len(index.shape) - 1))
    else:
        given = index.shape == rows.shape[:1] and index.stride == (1,)
    return first and given and dense and rows.shape[1:] == into.shape[1:]


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


_NAMES: dict[Any, tuple[str, Callable[[fx.Node], bool]]] = {
    aten.index_add.default: (OWN_INDEX_ADD, _adds_rows),
    aten.scatter_add.default: (OWN_SCATTER_ADD, _adds_rows),
    aten.embedding_dense_backward.default: (OWN_EMBEDDING_GRADIENT, _is_plain_embedding),
}
