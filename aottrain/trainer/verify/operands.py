"""Eager with the operands of its sums changed by one rounding each: what rounds inside a step, not only at its start.

Changing a step's inputs does not show the rounding of values that cancel whatever the inputs are. A softmax's gradient
is p (g - sum(p g)): where a row has one place, as the first of causal attention has, that is g - g, which one kernel
makes zero, for all inputs, and another, which takes the sum in another order or from the attention's result, about one
rounding of g. So the factors of such sums are changed independently of each other, in every operator that sums them:
eager's operands and another right program's are each within half a unit in the last place of what they would be exactly
after the operator before, so one unit (`eps` of the type, 2^-23 in float32) apart. What compares, selects or copies
gets its operands as they are, since equal values must stay equal there; nothing rounds in it either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import TorchDispatchMode
from aottrain.ops.optimizers.masters import HALVES

_aten = torch.ops.aten
# Operators that add up products or differences of their operands, forward and backward.
_SUMS = (
    _aten.mm,
    _aten.bmm,
    _aten.addmm,
    _aten.baddbmm,
    _aten.convolution,
    _aten.convolution_backward,
    _aten._softmax,
    _aten._softmax_backward_data,
    _aten._log_softmax,
    _aten._log_softmax_backward_data,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.native_group_norm,
    _aten.native_group_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten.sum,
    _aten.mean,
)
# Those that add up whole columns in the type of their operands: on a CPU eager's gradient of a norm's scale was off by
# 8 % in bfloat16. Another right program's sums are float32's.
_NARROW_SUMS = (_aten.native_layer_norm_backward, _aten.native_group_norm_backward)


@contextmanager
def changed_operands(generator: torch.Generator) -> Iterator[None]:
    """While it lasts each number that an operator of _SUMS takes is multiplied by 1 + u, with u drawn evenly from
    [-eps, eps] of its type and from the generator; zeros and infinities stay what they are. _NARROW_SUMS add up in
    float32."""
    with _ChangedOperands(generator):
        yield


class _ChangedOperands(TorchDispatchMode):
    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _SUMS:
            args = tuple(map(self._changed, args))
        if func.overloadpacket in _NARROW_SUMS and any(isinstance(arg, Tensor) and arg.dtype in HALVES for arg in args):
            results = func(*args, **(kwargs or {}))
            wide = func(*(arg.float() if isinstance(arg, Tensor) else arg for arg in args), **(kwargs or {}))
            return tuple(a if a is None else b.to(a.dtype) for a, b in zip(results, wide, strict=True))
        return func(*args, **(kwargs or {}))

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.device != self.generator.device:
            return value
        eps = torch.finfo(value.dtype).eps
        factor = torch.empty_like(value, dtype=torch.float64).uniform_(-eps, eps, generator=self.generator)
        return factor.add_(1).mul_(value).to(value.dtype)
