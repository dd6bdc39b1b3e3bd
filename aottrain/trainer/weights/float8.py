"""Products of linear layers in float8: `trainer.precision=fp8`, by torch's scaled products.

Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433: weights and what is multiplied by them in
e4m3, which has more digits, gradients in e5m2, which reaches further. Each tensor is divided by a number of its own, by
which its largest element becomes the type's largest, and the product is multiplied by both numbers again.

A layer stays in its place, under its name, with its weight in float32. All else runs under autocast to bfloat16.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.compat_dispatch import scaled_product
from aottrain.errors import ConfigError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# The libraries multiply rows of whole groups of 16 bytes.
_GROUP = 16
_RESULT = torch.bfloat16
# Of tensors that are zero.
_LEAST = 1e-12


class Float8(nn.Linear):
    """A linear layer; what `use_float8` makes of one that is there."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows == 0 or rows % _GROUP:
            return super().forward(x)  # such as one token that a sample goes on by
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):  # on a CPU the product calls others, which would round for it
            result = multiply(x.reshape(rows, x.shape[-1]), self.weight).to(dtype)
        result = result if self.bias is None else result + self.bias.to(dtype)
        return result.reshape(*x.shape[:-1], result.shape[-1])


class _Product(torch.autograd.Function):
    """x (rows, inputs) and weight (outputs, inputs) -> x times the transposed weight, in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        small_x, x_scale = _rounded(x, FORWARD)
        small_weight, weight_scale = _rounded(weight, FORWARD)
        ctx.save_for_backward(small_x, x_scale, small_weight, weight_scale)
        ctx.types = x.dtype, weight.dtype
        return scaled_product(small_x, small_weight.T, x_scale, weight_scale, _RESULT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        small, scale = _rounded(gradient, BACKWARD)
        of_x = of_weight = None
        # The second operand of a product goes along its columns.
        if ctx.needs_input_grad[0]:
            of_x = scaled_product(small, weight.T.contiguous().T, scale, weight_scale, _RESULT).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            turned = small.T.contiguous(), x.T.contiguous().T
            of_weight = scaled_product(*turned, scale, x_scale, _RESULT).to(ctx.types[1])
        return of_x, of_weight


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, inputs), weight (outputs, inputs), each of which is a multiple of 16 -> (rows, outputs), bfloat16."""
    result: Tensor = _Product.apply(x, weight)
    return result


def _rounded(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The value over its scale, in the type, and the scale. What is not finite leaves nothing finite."""
    scale = value.detach().abs().amax().float().clamp(min=_LEAST) / torch.finfo(dtype).max
    return (value.float() / scale).to(dtype), scale


def use_float8(model: nn.Module) -> nn.Module:
    """`model` with the products of its linear layers in float8, but for the last one, by whose results a loss is
    computed, those whose weight is another module's too, and those with a number of inputs or outputs that is no
    multiple of 16. ConfigError: none is left."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    chosen = [
        layer
        for layer in layers[:-1]
        if uses[id(layer.weight)] == 1 and not (layer.in_features % _GROUP or layer.out_features % _GROUP)
    ]
    if not chosen:
        wanted = f"beside the last one with inputs and outputs in multiples of {_GROUP}"
        raise ConfigError(f"trainer.precision=fp8: the model has no linear layer {wanted}")
    for layer in chosen:
        layer.__class__ = Float8
    return model
