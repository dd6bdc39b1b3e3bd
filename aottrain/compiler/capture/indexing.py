"""The backward of `x[mask] = values` and of `index_fill`, where autograd asks for values: as ops of known size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import aottrain.ops.indexing  # noqa: F401  (the ops)
from aottrain.errors import UnsupportedError

aten = torch.ops.aten
_ops = torch.ops.aottrain


class IndexingGradients:
    """Sees the ops of the backward and takes the place of those that a trace cannot run.

    autograd's node of index_fill calls unique(index), index_select(grad, dim, that) and sum(that). Here the first gives
    the index itself, and the last is replaced by one op.
    """

    def __init__(self) -> None:
        self._index: Tensor | None = None
        self._selected: tuple[Tensor, tuple[Any, ...]] | None = None

    def rule(self, node: Any, func: Any, args: Any) -> Any:
        """The result of `func` within the autograd node, or None where the op runs as it is."""
        name = node.name()
        if name.startswith("IndexPut") and func is aten.index.Tensor and is_by_mask(args[1]):
            following, position = node.next_functions[-1]
            return _ops.index_put_values_grad(args[0], args[1], following._input_metadata[position].shape)
        if not name.startswith("IndexFill"):
            return None
        if func is aten._unique.default:
            self.check()
            self._index = args[0]
            return args[0], args[0]
        if func is aten.index_select.default and args[2] is self._index:
            selected = func(*args)
            self._selected = selected, args
            return selected
        if func is aten.sum.default and self._selected is not None and args[0] is self._selected[0]:
            arguments = self._selected[1]
            self._index = self._selected = None
            return _ops.index_fill_value_grad(*arguments)
        return None

    def check(self) -> None:
        """Raises UnsupportedError where autograd made something else of the distinct indices."""
        if self._index is not None:
            raise UnsupportedError("the backward of index_fill is not of the form that is known")


def is_by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
