"""Whether two views of one memory overlap: eager raises, or its answer depends on the order in which it writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import same_version
from aottrain.errors import OverlapError, UnsupportedError
from aottrain.ir.tensor import is_injective

SPLITS = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
WRITTEN_PARTS = "memory of which torch.unsafe_split has made parts is written by one name and read by another"
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


def check_lists(func: Any, arguments: Iterable[Any]) -> None:
    """Raises UnsupportedError where an op on lists writes an item that it also reads or writes at another place.

    Eager goes through the lists item by item, and finds there what it has written before; as one op it finds what was
    there at first.
    """
    if not func._schema.name.startswith("aten::_foreach"):
        return
    lists = [value for value in arguments if isinstance(value, (list, tuple))]
    items: dict[int, list[tuple[int, Tensor]]] = {}  # by their memory
    for values in lists:
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                items.setdefault(_memory(value), []).append((i, value))
    for i, target in enumerate(lists[0]):
        if any(i != j and overlap(target, value) for j, value in items[_memory(target)]):
            raise UnsupportedError(f"{func} writes an item of a list that it reads or writes at another place, too")


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


class SplitParts:
    """Tensors that torch.unsafe_split made parts of, and the parts: they share memory, and neither autograd nor what
    removes mutation knows of it. A write by the name of one is not seen in the others, which are outdated from then on.
    """

    def __init__(self) -> None:
        self._families: dict[int, list[tuple[Tensor, Sequence[Tensor]]]] = {}  # by their memory
        self._outdated: dict[int, list[Tensor]] = {}
        self.outdated: set[int] = set()
        """Memory whose whole is, though its parts are not."""

    def add(self, whole: Tensor, parts: Sequence[Tensor]) -> None:
        self._families.setdefault(_memory(whole), []).append((whole, parts))

    def write(self, targets: Iterable[Tensor]) -> None:
        for target in targets:
            for whole, parts in self._families.get(_memory(target), ()):
                if _same(target, whole):
                    self._outdate(parts)
                    continue
                self.outdated.add(_memory(target))
                others = () if any(_same(target, part) for part in parts) else parts
                self._outdate([whole, *others])

    def check_read(self, values: Iterable[Tensor]) -> None:
        """Raises UnsupportedError for what is outdated."""
        if self._outdated:
            for value in values:
                outdated = self._outdated.get(_memory(value), ())
                # In inference mode nothing says of which of them a tensor is a view.
                unknown = value.is_inference() and bool(outdated) and not self._is_known(value)
                if unknown or any(_same(value, one) for one in outdated):
                    raise UnsupportedError(WRITTEN_PARTS)

    def _is_known(self, value: Tensor) -> bool:
        return any(value is one for whole, parts in self._families[_memory(value)] for one in (whole, *parts))

    def _outdate(self, values: Sequence[Tensor]) -> None:
        self._outdated.setdefault(_memory(values[0]), []).extend(values)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are one tensor, or views of one."""
    return one is other or (not one.is_inference() and same_version(one, other))


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata if value.layout is torch.strided else 0


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
