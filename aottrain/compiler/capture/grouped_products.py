"""The fake of a grouped product on a CPU: as its kernel, where torch's is that of CUDA's."""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.errors import UnsupportedError

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What a CPU's kernel gives: torch's fake takes bfloat16 alone, as one of CUDA's does, and pads no rows.

    Raises UnsupportedError where the kernel refuses (its error is eager's), and for sizes that are symbols.
    """
    sizes = (*a.shape, *b.shape, *a.stride(), *b.stride(), *(offs.shape if offs is not None else ()))
    flat = a.dim() == 2, b.dim() == 2
    fits = {a.dim(), b.dim()} <= {2, 3} and (offs is not None) == any(flat) and bias is None
    fits = fits and a.dtype == b.dtype and a.dtype in _TYPES and out_dtype in (None, a.dtype)
    fits = fits and (offs is None or (offs.dim() == 1 and offs.dtype == torch.int32))
    if not fits or not all(isinstance(size, int) for size in sizes):
        raise UnsupportedError("a grouped product of tensors that a CPU's kernel refuses, or of symbolic sizes")
    groups = {len(value) for value, is_flat in ((a, flat[0]), (b, flat[1])) if not is_flat}
    groups |= {len(offs)} if offs is not None else set()
    if len(groups) != 1 or (flat != (True, True) and a.shape[-1] != b.shape[-2]):
        raise UnsupportedError("a grouped product of tensors whose sizes do not fit together")
    if not (_is_aligned(a) and _is_aligned(b)):
        raise UnsupportedError("a grouped product of rows that do not begin at multiples of 16 bytes")
    shape = [groups.pop(), a.shape[-2], b.shape[-1]][0 if flat[0] == flat[1] else 1 :]
    each = 16 // a.itemsize
    row = -(-shape[-1] // each) * each
    return torch.empty_strided(shape, [shape[-2] * row, row, 1][-len(shape) :], dtype=a.dtype)


def _is_aligned(value: Tensor) -> bool:
    """Whether rows or columns lie one after the other, each from a multiple of 16 bytes on."""
    (rows, columns), (down, across) = value.shape[-2:], value.stride()[-2:]
    each = 16 // value.itemsize
    if down == 1 and across >= max(1, rows):
        return across % each == 0
    return across == 1 and down >= max(1, columns) and down % each == 0
