"""Makes a call's result outside the compiled function: inputs handed back, views regenerated, constants put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import set_view_origin
from aottrain.ir.calling import OutputInfo, Source
from aottrain.ir.sizes import SizeExpression, resolve


def assemble(
    outputs: Sequence[OutputInfo],
    leaves: Sequence[Any],
    is_tensor: Sequence[bool],
    computed: Sequence[Tensor],
    primals: Sequence[Tensor],
    sizes: Mapping[str, int],
) -> list[Any]:
    """The flat result; in `leaves`, symbolic numbers and shapes (tuples) are expressions of the sizes.

    Views are made here, not inside the compiled function: autograd forbids writing to views that a
    custom Function returned, and a view of an input must be one of the caller's own tensor."""
    result = list(leaves)
    known = iter(outputs)
    for place, flag in enumerate(is_tensor):
        if flag:
            info = next(known)
            source = primals if info.source is Source.PRIMAL else computed
            result[place] = _make(info, source[info.index], sizes)
        elif isinstance(result[place], SizeExpression):
            result[place] = result[place].of(sizes)
        elif type(result[place]) is tuple:
            result[place] = torch.Size(resolve(result[place], sizes))
    return result


def _make(info: OutputInfo, source: Tensor, sizes: Mapping[str, int]) -> Tensor:
    if info.geometry is None:
        return source
    size, stride = resolve(info.geometry[0], sizes), resolve(info.geometry[1], sizes)
    offset = resolve([info.geometry[2]], sizes)[0] + source.storage_offset()
    if not info.requires_grad and info.origin is None:
        value, layout = source.detach(), (size, stride, offset)
        is_whole = (tuple(value.shape), tuple(value.stride()), value.storage_offset()) == tuple(layout)
        return value if is_whole else value.as_strided(*layout)
    with torch.set_grad_enabled(info.requires_grad):
        value = source.as_strided(size, stride, offset)
    set_view_origin(value, info.origin)
    return value
