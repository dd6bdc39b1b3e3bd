"""Running sums along a dimension, on a CPU by a C++ function of our own.

ATen walks along the dimension for one neighbour, or row, after the other, in scalar arithmetic. Here they are in
vectors.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from aottrain.ir.schedule import OWN_CUMSUM, OWN_LOGCUMSUMEXP
from aottrain.ops.native.scans import SCANS as _TEXT
from aottrain.toolchain.native import Source, require_all

NATIVE = Source(_TEXT, ("-fopenmp", "-fno-trapping-math", "-ffp-contract=fast"))
# Fewer elements are done by the calling thread.
_PARALLEL_FROM = 16384


def scan(name: str, x: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """aten.cumsum or aten.logcumsumexp, by its name, of contiguous float32 `x` along `dim`, into contiguous `out`.

    out: None: fresh memory. Sums are bit for bit ATen's, which are added in float64, too.
    """
    out = torch.empty_like(x) if out is None else out
    dim %= x.dim()
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    threads = torch.get_num_threads() if x.numel() >= _PARALLEL_FROM else 1
    _functions()[name](x.data_ptr(), out.data_ptr(), outer, x.shape[dim], inner, threads)
    return out


@cache
def _functions() -> dict[str, Any]:
    (library,) = require_all([NATIVE])
    functions = {name: getattr(library.functions, name) for name in ("cumsum", "logcumsumexp")}
    for function in functions.values():
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (pointer, pointer, number, number, number, ctypes.c_int)
        function.restype = None
    return functions


SCANS: dict[str, Any] = {OWN_CUMSUM: partial(scan, "cumsum"), OWN_LOGCUMSUMEXP: partial(scan, "logcumsumexp")}
