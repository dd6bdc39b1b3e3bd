"""Matrix products by a processor's bfloat16 tiles (AMX), by a C++ function of our own: `ops.native.tiles`.

Operands of bfloat16 are multiplied as they are, and a result is rounded once. Of float32 each number is the sum of
three pieces of bfloat16. The result's error is that of float32 arithmetic: against float64 about as large as ATen's.
Where `torch.set_float32_matmul_precision` allows "high" or "medium", two pieces are taken,
as PyTorch describes these: half of the work, and about 16 bits of a product. The order of sums hangs on the number of
terms alone: a result is the same, bit for bit, with any number of threads, and in a batch of any size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.errors import CompilerError
from aottrain.ir.kernels.tiles import (
    PIECES,
    left_bytes,
    num_pieces,
    panel_rows,
    part_columns,
    product_scratch_bytes,
    right_bytes,
    sums_bytes,
)
from aottrain.ops.native.tile_layer import ALLOWED
from aottrain.ops.native.tiles import tiles_source
from aottrain.toolchain.cache import processor, say_once
from aottrain.toolchain.native import Source, find_compiler, require_all

_PERMISSION = Source(ALLOWED)


def native_source(dtype: torch.dtype) -> Source:
    """What products of this type compile at their first call."""
    return _source(num_pieces(dtype))


@cache
def _source(pieces: int) -> Source:
    return Source(tiles_source(pieces), ("-fopenmp", "-std=c++17"))


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles, and the system and the C++ compiler let this process use them."""
    if "amx_bf16" not in processor().split() or find_compiler() is None:
        return False
    try:
        (library,) = require_all([_PERMISSION])
        return bool(library.functions.allowed())
    except CompilerError as error:
        say_once(f"matrices are not multiplied by the processor's tiles: {error}")
        return False


def own_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    adds: bool = False,
    scratch: Tensor | None = None,
) -> Tensor:
    """left @ right (+ bias, one number per column): (m, k), (k, n) -> (m, n), all float32 or all bfloat16.

    out: memory for the result, whose rows' elements lie beside each other; of bfloat16 operands without a bias it may
    be float32. adds: to what is in it, which is float32. It computes in `scratch`, of `product_scratch_bytes` of some
    threads, or in fresh memory. Float32 that is not finite ATen multiplies.
    """
    if left.stride(0) != 1 and left.stride(1) != 1:
        left = left.contiguous()
    if right.stride(0) != 1 and right.stride(1) != 1:
        right = right.contiguous()
    (rows, terms), columns, threads = left.shape, right.shape[1], torch.get_num_threads()
    if out is None:
        out = torch.empty(rows, columns, dtype=left.dtype)
    pieces, narrow = num_pieces(left.dtype), out.dtype == torch.bfloat16
    shape = rows, terms, columns
    if scratch is None:
        scratch = torch.empty(product_scratch_bytes(*shape, threads, pieces, narrow), dtype=torch.uint8)
    while product_scratch_bytes(*shape, threads, pieces, narrow) > scratch.numel():
        threads -= 1  # more than there were when it was planned, or fewer with larger panels; one always fits
    shared, each = right_bytes(columns, terms, pieces), left_bytes(rows, terms, threads, pieces)
    if pieces == PIECES and torch.get_float32_matmul_precision() != "highest":
        pieces = 2
    sizes = (ctypes.c_int64 * 8)(rows, terms, columns, *left.stride(), *right.stride(), out.stride(0))
    start = scratch.data_ptr()
    addresses = left.data_ptr(), right.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    sums = start + shared + threads * each if sums_bytes(*shape, narrow) else None
    parts = panel_rows(rows, threads), part_columns(columns, terms, pieces)
    memory = start, start + shared, each // 2, *parts, sums
    if _library(pieces)(*addresses, sizes, narrow, adds, *memory, threads):
        return _by_aten(left, right, bias, out, adds)
    return out


def own_biased_product(bias: Tensor, left: Tensor, right: Tensor, **memory: Any) -> Tensor:
    """bias + left @ right, as addmm has its arguments."""
    return own_product(left, right, bias, **memory)


def _by_aten(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, adds: bool) -> Tensor:
    if adds:
        return out.addmm_(left, right) if bias is None else out.addmm_(left, right).add_(bias)
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


@cache
def _library(pieces: int) -> Any:
    (library,) = require_all([_source(pieces)])
    function, pointer, integer, long = library.functions.product, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    function.argtypes = (*[pointer] * 5, integer, integer, pointer, pointer, *[long] * 3, pointer, integer)
    function.restype = integer
    return function
