"""Whether two views of one memory overlap: eager raises, or its answer depends on the order in which it writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from aottrain.errors import OverlapError
from aottrain.ir.tensor import is_injective

# Of larger views it is only asked whether their extents meet.
_MAX_ELEMENTS = 1 << 16


def check_overlap(func: Any, written: Sequence[Tensor], arguments: Sequence[Tensor]) -> None:
    """Raises OverlapError where an op writes memory that it also reads. An elementwise op may, element by element.

    arguments: all tensors among the op's arguments; each that it writes is one of them.
    """
    elementwise = torch.Tag.pointwise in func.tags or func._schema.name.startswith(("aten::copy_", "aten::_foreach"))
    read = list(arguments)
    for target in written:
        del read[next(i for i, value in enumerate(read) if value is target)]
    for target in written:
        if not is_injective(target):
            raise OverlapError(f"{func} writes a tensor whose elements share their memory")
        for source in read:
            if not (elementwise and _geometry(source) == _geometry(target)) and overlap(target, source):
                raise OverlapError(f"{func} reads and writes memory that overlaps")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views have an element of memory in common; True where that cannot be decided."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    if not all(isinstance(size, int) for view in (one, other) for size in (*view.shape, *view.stride())):
        return True  # symbolic
    if one.numel() == 0 or other.numel() == 0:
        return False
    first, second = _extent(one), _extent(other)
    if first[1] < second[0] or second[1] < first[0]:
        return False
    if one.dtype != other.dtype or one.numel() + other.numel() > _MAX_ELEMENTS:
        return True
    return not _addresses(one).isdisjoint(_addresses(other))


def _geometry(view: Tensor) -> tuple[object, ...]:
    return view.dtype, tuple(view.shape), tuple(view.stride()), view.storage_offset()


def _extent(view: Tensor) -> tuple[int, int]:
    """First and last byte."""
    start = int(view.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return start * view.element_size(), (last + 1) * view.element_size() - 1


def _addresses(view: Tensor) -> set[int]:
    dims = zip(view.shape, view.stride(), strict=True)
    steps = [range(0, size * stride, stride) if stride else [0] for size, stride in dims]
    return {int(view.storage_offset()) + sum(index) for index in product(*steps)}
