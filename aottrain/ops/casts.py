"""Casts of many tensors by one call, as autocast makes them of each weight and each gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aottrain.compat import copy_all
from aottrain.compat_dispatch import maker_on, register_fake

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("cast_many(Tensor[] values, ScalarType dtype) -> Tensor[]")


def _cast_many(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Dense tensors of one type, in another one and laid out alike. On CUDA a few kernels do all."""
    results = [maker_on(value.device)(tuple(value.shape), value.stride(), dtype) for value in values]
    copy_all(results, list(values))
    return results


_library.impl("cast_many", _cast_many, "CompositeExplicitAutograd")


@register_fake(_library, "cast_many")
def _(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(value, dtype=dtype) for value in values]
