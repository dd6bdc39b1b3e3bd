"""Indexing: the backward of `x[mask] = values` and of `index_fill`, where autograd asks for values, as ops of known
size; the layout of `x[i]`."""

from __future__ import annotations

from collections.abc import Sequence
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
        if name.startswith("IndexPut") and func is aten.index.Tensor and _by_mask(args[1]):
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


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def layout_of_indexed(args: Sequence[Any], out: Tensor) -> Tensor:
    """A tensor with the strides of `x[i, ..., j]`, which are those of an elementwise op of all its operands.

    The kernel sees x with a stride of 0 in each dimension that indices take the place of, and the indices beside it:
    their layout counts, as in `x[i.transpose(0, 1)]`. Torch's fakes ask x alone (torch 2.11 to 2.14).
    """
    value, indices = args[0], [*args[1]]
    given = [index for index in indices if index is not None]
    if _by_mask(indices) or not given:
        return out
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    places = [i for i, index in enumerate(indices) if index is not None]
    if places[-1] - places[0] + 1 != len(places):  # those that lie apart come to the front
        value = value.permute(*places, *(i for i in range(value.dim()) if i not in places))
        places = list(range(len(places)))
    before, after = value.shape[: places[0]], value.shape[places[-1] + 1 :]
    strides = (*value.stride()[: places[0]], *(0,) * len(shape), *value.stride()[places[-1] + 1 :])
    operands = [strides]
    for index in _as_a_gpu_takes_them(given, shape) if value.is_cuda else given:
        lined_up = index.expand(shape).reshape((*(1,) * len(before), *shape, *(1,) * len(after)))
        # Of a dimension that is spread the kernel knows no stride.
        steps = zip(lined_up.stride(), lined_up.shape, out.shape, strict=True)
        operands.append(tuple(0 if size == 1 != whole else step for step, size, whole in steps))
    order = _from_inside_out(operands, out.shape)
    return torch.empty([out.shape[dim] for dim in order[::-1]], device=out.device).permute(_inverse(order[::-1]))


def _from_inside_out(operands: Sequence[Sequence[Any]], shape: Sequence[Any]) -> list[int]:
    """The dimensions by ascending stride, as elementwise kernels sort them: of two the first operand decides in which
    neither has a stride of 0, of equal strides the smaller one is inside, and what nothing decides stays."""

    def after(one: int, other: int) -> int:
        for strides in operands:
            if strides[one] == 0 or strides[other] == 0:
                continue
            if strides[one] != strides[other]:
                return 1 if strides[one] > strides[other] else -1
            if shape[one] > shape[other]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        place = i
        for other in range(i - 1, -1, -1):
            found = after(order[other], order[place])
            if found > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif found < 0:
                break
    return order


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _as_a_gpu_takes_them(indices: Sequence[Tensor], shape: Any) -> list[Tensor]:
    """Several indices are copied where their strides differ."""
    spread = [index.expand(shape) for index in indices]
    alike = all(index.stride() == spread[0].stride() for index in spread)
    return spread if alike else [index.contiguous() for index in spread]
