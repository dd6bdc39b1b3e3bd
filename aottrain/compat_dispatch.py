"""Private parts of torch's dispatcher: which operators it would take apart before a mode sees them; and of Python's
profilers, which a mode puts aside."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_METADATA = tuple(getattr(torch.ops.aten, name).default for name in ("size", "stride", "storage_offset"))
# Before torch 2.13 tracers took every composite op apart.
_would_have_decomposed = getattr(_python_dispatch, "autograd_would_have_decomposed", lambda func, values: True)


def arrived_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd would have taken the operator apart into others, and did not: in inference mode, and for its
    tensors, a mode sees operators such as `aten.batch_norm` and `aten.dropout` themselves. `func.decompose` does it."""
    return _is_composite(func) and _would_have_decomposed(func, tree_leaves((args, kwargs)))


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is written in terms of other ops, for which autograd has formulas."""
    if func in _METADATA:
        return False
    return _COMPOSITE in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def profile_again(profiler: Any) -> None:
    """Give back what `sys.getprofile` gave. cProfile's of Python 3.11 is an object that cannot be called."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()
