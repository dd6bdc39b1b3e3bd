"""Gradients of the values that indexing writes, as ops: eager's way to them goes through a tensor whose size depends on
values, but they have a size that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("index_put_values_grad(Tensor grad, Tensor?[] indices, SymInt[] size) -> Tensor")
_library.define("index_fill_value_grad(Tensor grad, int dim, Tensor index) -> Tensor")


def _index_put_values_grad(grad: Tensor, indices: Sequence[Tensor | None], size: Sequence[int]) -> Tensor:
    return torch.ops.aten.index.Tensor(grad, indices).sum_to_size(size).contiguous()


def _index_fill_value_grad(grad: Tensor, dim: int, index: Tensor) -> Tensor:
    distinct, _ = torch.ops.aten._unique(index, sorted=False)
    return grad.index_select(dim, distinct).sum()


_library.impl("index_put_values_grad", _index_put_values_grad, "CompositeExplicitAutograd")
_library.impl("index_fill_value_grad", _index_fill_value_grad, "CompositeExplicitAutograd")


@register_fake(_library, "index_put_values_grad")
def _(grad: Tensor, indices: Sequence[Tensor | None], size: Sequence[int]) -> Tensor:
    return grad.new_empty(size)


@register_fake(_library, "index_fill_value_grad")
def _(grad: Tensor, dim: int, index: Tensor) -> Tensor:
    return grad.new_empty(())
