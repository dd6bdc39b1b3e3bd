"""Makes a call's result outside the compiled function: inputs handed back, views regenerated, constants put in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import set_view_origin
from aottrain.ir.calling import OutputInfo, Source


def assemble(
    outputs: Sequence[OutputInfo],
    leaves: Sequence[Any],
    is_tensor: Sequence[bool],
    computed: Sequence[Tensor],
    primals: Sequence[Tensor],
) -> list[Any]:
    """The flat result. Views are made here, not inside the compiled function: autograd forbids writing to views that a
    custom Function returned, and a view of an input must be one of the caller's own tensor."""
    result = list(leaves)
    known = iter(outputs)
    for place, flag in enumerate(is_tensor):
        if flag:
            info = next(known)
            source = primals if info.source is Source.PRIMAL else computed
            result[place] = _make(info, source[info.index])
    return result


def _make(info: OutputInfo, source: Tensor) -> Tensor:
    if info.geometry is None:
        return source
    size, stride, offset = info.geometry
    offset += source.storage_offset()
    if not info.requires_grad:
        return source.detach().as_strided(size, stride, offset)
    with torch.enable_grad():
        value = source.as_strided(size, stride, offset)
    set_view_origin(value, info.origin)
    return value
