"""Rows added to others by their numbers, on a CPU by a C++ function of our own.

ATen calls an addition for each row. Sums are its own bit for bit: rows are added in their order. `sum_messages` looks
them up and scales them in the same loop, so that they are nowhere in memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.ir.schedule import OWN_EMBEDDING_GRADIENT, OWN_INDEX_ADD, OWN_SCATTER_ADD
from aottrain.ops.native.rows import ROWS
from aottrain.toolchain.native import Source, find_compiler, require_all

NATIVE = Source(ROWS, ("-fopenmp",))
# Fewer elements are added by the calling thread.
_PARALLEL_FROM = 16384
# Of rows that are neither looked up nor scaled: there are no others, and each is one part.
_AS_THEY_ARE = 0, 0, 1

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    "sum_messages(Tensor values, Tensor source, Tensor? scale, Tensor target, int count, bool wraps) -> Tensor"
)


def index_add_(into: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """aten.index_add_ along dimension 0 of contiguous float32 rows (count, ...) to those of `into` that the int64 index
    (count,) names. Raises IndexError, before anything is written."""
    width = rows.numel() // max(index.numel(), 1)
    _add(into, index, rows, (index.numel(), into.shape[0], width, width, -1))
    return into


def index_add(into: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """As `index_add_`, to a copy."""
    return index_add_(into.clone(memory_format=torch.contiguous_format), dim, index, rows)


def scatter_add_(into: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """aten.scatter_add_ along dimension 0 of contiguous float32 rows (count, ...) to contiguous ones, where the int64
    index (count, ...) has one number for each row. Raises as ATen does, before anything is written."""
    width = rows.numel() // max(rows.shape[0], 1)
    if _adds(into, index, rows, (rows.shape[0], into.shape[0], width, width, -1, *_AS_THEY_ARE)):
        return into
    torch.ops.aten.scatter_add_.default(into.clone(), dim, index, rows)
    raise AssertionError(f"ATen takes an index into {into.shape[0]} rows that is not one")


def scatter_add(into: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """As `scatter_add_`, to a copy."""
    return scatter_add_(into.clone(memory_format=torch.contiguous_format), dim, index, rows)


def embedding_gradient(gradient: Tensor, index: Tensor, count: int, padding: int, by_frequency: bool) -> Tensor:
    """aten.embedding_dense_backward, not by frequency: float32 (*, width), int64 (*) -> (count, width)."""
    width = gradient.shape[-1]
    rows = gradient.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = gradient.new_empty(count, width)
    _add(out, index.contiguous(), rows, (index.numel(), count, width, rows.stride(0), padding), fresh=True)
    return out


def sum_messages(
    values: Tensor, source: Tensor, scale: Tensor | None, target: Tensor, count: int, wraps: bool
) -> Tensor:
    """Of zeros (count, width) the index_add of values[source] * scale at `target`: messages along a graph's edges.

    values: contiguous float32 (rows, width); source, target: contiguous int64 (edges,); scale: contiguous float32
    (edges, groups), a number for each of as many equal parts of a row; None is 1. wraps: numbers in `source` below 0
    count from the end. Raises what the operators raise that it stands for, before anything is written.
    """
    rows, width = values.shape
    out = values.new_empty(count, width)
    lowest, groups = -rows if wraps else 0, 1 if scale is None else scale.shape[1]
    sizes = target.numel(), count, width, width, -1, rows, lowest, groups
    if find_compiler() is not None and _adds(out, target, values, sizes, fresh=True, source=source, scale=scale):
        return out
    messages = values[source] if wraps else values.index_select(0, source)
    if scale is not None:
        messages = (messages.unflatten(1, (groups, -1)) * scale.unsqueeze(2)).flatten(1)
    return out.zero_().index_add_(0, target, messages)


def _add(into: Tensor, index: Tensor, rows: Tensor, sizes: tuple[int, ...], fresh: bool = False) -> None:
    if not _adds(into, index, rows, (*sizes, *_AS_THEY_ARE), fresh):
        raise IndexError("index out of range in self")


def _adds(
    into: Tensor,
    index: Tensor,
    rows: Tensor,
    sizes: tuple[int, ...],
    fresh: bool = False,
    source: Tensor | None = None,
    scale: Tensor | None = None,
) -> bool:
    """Whether all numbers are in range; else nothing is written. sizes: as the C++ has them. fresh: rows are added to
    zeros, whatever is in the memory."""
    threads = torch.get_num_threads() if max(index.numel() * sizes[2], into.numel()) >= _PARALLEL_FROM else 1
    addresses = into.data_ptr(), index.data_ptr(), rows.data_ptr()
    others = (None if each is None else each.data_ptr() for each in (source, scale))
    return not _function()(*addresses, *others, (ctypes.c_int64 * len(sizes))(*sizes), fresh, threads)


@cache
def _function() -> Any:
    (library,) = require_all([NATIVE])
    function = library.functions.add_rows
    function.argtypes = (*[ctypes.c_void_p] * 6, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


ADDED_ROWS: dict[str, Any] = {
    OWN_INDEX_ADD: index_add,
    OWN_SCATTER_ADD: scatter_add,
    OWN_EMBEDDING_GRADIENT: embedding_gradient,
}
ADDED_IN_PLACE: dict[str, Any] = {OWN_INDEX_ADD: index_add_, OWN_SCATTER_ADD: scatter_add_}


_library.impl("sum_messages", sum_messages, "CPU")

SUM_MESSAGES = torch.ops.aottrain.sum_messages.default


@register_fake(_library, "sum_messages")
def _(values: Tensor, source: Tensor, scale: Tensor | None, target: Tensor, count: int, wraps: bool) -> Tensor:
    return values.new_empty(count, values.shape[1])
