"""Many tensors copied at once: on a device by one launch for all of one type, where each would take one of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aottrain.compat import copy_all


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each target from its source, as if one after the other."""
    if len(targets) > 1 and all(map(_is_on_cuda, (*targets, *sources))) and _are_apart(targets, sources):
        copy_by_type(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_by_type(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """In no order: no two of them share memory. Of several types together torch copies tensor by tensor."""
    for dtype in dict.fromkeys(target.dtype for target in targets):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype is dtype]
        copy_all([target for target, _ in pairs], [source for _, source in pairs])


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.layout is torch.strided


def _are_apart(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    written = {target.untyped_storage().data_ptr() for target in targets}
    return len(written) == len(targets) and all(s.untyped_storage().data_ptr() not in written for s in sources)
