"""How a result that shares memory with another tensor is made from it again, and where that is not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import view_origin
from aottrain.compat_dispatch import same_version
from aottrain.errors import UnsupportedError
from aottrain.ir.calling import OutputInfo, ResultSource, is_pair
from aottrain.ir.sizes.expressions import hint, size_of
from aottrain.ir.tensor import is_injective


def is_whole(value: Tensor) -> bool:
    """Whether a value is all that lies in its memory, without gaps: a copy with its strides has the same elements at
    the same places."""
    size = hint(value.numel()) * value.itemsize
    return bool(value.storage_offset() == 0) and size == hint(value.untyped_storage().nbytes()) and is_injective(value)


def _through_custom_function(value: Tensor, base: Tensor) -> bool:
    """Whether a gradient of the value reaches its base through the backward of a custom Function, or not as a view."""
    node = value.grad_fn
    while node is not None and node is not base.grad_fn:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return base_of(value) is not base_of(base)


def base_of(value: Tensor) -> Tensor:
    return value._base if value._base is not None else value


def _unsafe_split(value: Tensor, base: Tensor) -> tuple[Any, int, int] | None:
    """(sizes, dim, which) where the value is a part of its base that autograd does not take for a view."""
    node = value.grad_fn
    if node is None or not node.name().startswith("UnsafeSplit") or value._base is not None:
        return None
    source = node.next_functions[0][0]
    if source is not base.grad_fn and getattr(source, "variable", None) is not base:
        return None
    attributes = {name: getattr(node, name) for name in dir(node) if name.startswith("_saved_split_size")}
    (sizes,) = attributes.values()
    if any(isinstance(size, torch.SymInt) for size in (sizes if isinstance(sizes, tuple) else [sizes])):
        return None
    dim = node._saved_dim  # type: ignore[attr-defined]
    return sizes, dim - 2**64 if dim >= 2**63 else dim, value.output_nr


def _is_cut_off(value: Tensor, base: Tensor) -> bool:
    """Whether a gradient of the view does not reach all of the memory that it shows: where it was made under no_grad,
    or by as_strided from a view that shows less."""
    node = value.grad_fn
    while node is not None and node is not base.grad_fn and node.next_functions:
        following = node.next_functions[0][0]
        last = following is base.grad_fn or getattr(following, "variable", None) is base
        if node.name() == "AsStridedBackward0" and not last:
            return True
        node = following
    return node is None or getattr(node, "variable", base) is not base


def view_of(source: ResultSource, index: int, value: Tensor, base: Tensor) -> OutputInfo:
    if (split := _unsafe_split(value, base)) is not None and source is ResultSource.PRIMAL:
        return OutputInfo(source, index, True, split=split)
    if value.requires_grad and _through_custom_function(value, base):
        raise UnsupportedError("a custom autograd.Function returns its input or a view of it")
    if value.requires_grad and _is_cut_off(value, base):
        raise UnsupportedError(
            "an output is a view of which gradients reach less than it shows: under no_grad, or by as_strided"
        )
    if value.requires_grad and not is_injective(base):  # as_strided, by which it is put together, shares gradients out
        raise UnsupportedError(
            "an output is a view of a tensor whose elements share memory, through which gradients go"
        )
    # From where the base starts: TorchDynamo's programs serve inputs at any offset in their memory.
    start = value.storage_offset() * value.itemsize - base.storage_offset() * base.itemsize
    geometry = tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride())), size_of(start // value.itemsize)
    origin = view_origin(value) if value._base is base else None
    hidden = not (value.requires_grad or same_version(value, base))
    info = OutputInfo(source, index, value.requires_grad, geometry, origin, hidden=hidden)
    if value.dtype != base.dtype:
        if not is_pair(value.dtype, base.dtype) and value.itemsize != base.itemsize:
            raise UnsupportedError(f"a {base.dtype} is returned as a view in {value.dtype}, of another size")
        info = replace(info, dtype=value.dtype)
    return replace(info, conj=value.is_conj() != base.is_conj(), neg=value.is_neg() != base.is_neg())
