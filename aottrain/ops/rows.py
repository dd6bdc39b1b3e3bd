"""Rows added to others by their numbers, on a CPU by a C++ function of our own.

ATen calls an addition for each row. Sums are its own bit for bit: rows are added in their order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.ir.schedule import OWN_EMBEDDING_GRADIENT, OWN_INDEX_ADD, OWN_SCATTER_ADD
from aottrain.ops.native.rows import ROWS
from aottrain.toolchain.native import Source, require_all

NATIVE = Source(ROWS, ("-fopenmp",))
# Fewer elements are added by the calling thread.
_PARALLEL_FROM = 16384


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
    if _adds(into, index, rows, (rows.shape[0], into.shape[0], width, width, -1)):
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


def _add(into: Tensor, index: Tensor, rows: Tensor, sizes: tuple[int, ...], fresh: bool = False) -> None:
    if not _adds(into, index, rows, sizes, fresh):
        raise IndexError("index out of range in self")


def _adds(into: Tensor, index: Tensor, rows: Tensor, sizes: tuple[int, ...], fresh: bool = False) -> bool:
    """Whether all of the index is in range; else nothing is written. sizes: as the C++ has them. fresh: rows are added
    to zeros, whatever is in the memory."""
    threads = torch.get_num_threads() if max(rows.numel(), into.numel()) >= _PARALLEL_FROM else 1
    addresses = into.data_ptr(), index.data_ptr(), rows.data_ptr()
    return not _function()(*addresses, (ctypes.c_int64 * len(sizes))(*sizes), fresh, threads)


@cache
def _function() -> Any:
    (library,) = require_all([NATIVE])
    function = library.functions.add_rows
    function.argtypes = (*[ctypes.c_void_p] * 4, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


ADDED_ROWS: dict[str, Any] = {
    OWN_INDEX_ADD: index_add,
    OWN_SCATTER_ADD: scatter_add,
    OWN_EMBEDDING_GRADIENT: embedding_gradient,
}
ADDED_IN_PLACE: dict[str, Any] = {OWN_INDEX_ADD: index_add_, OWN_SCATTER_ADD: scatter_add_}
