"""Random operators under rng="eager": they draw from eager's own generators, bit for bit, and are functional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.errors import UnsupportedError
from aottrain.ops.random.mode import RULES

aten = torch.ops.aten
_draws = torch.ops.aottrain

# In-place draws, by name: under rng="eager" they fill fresh memory of the same layout, unseen by functionalization.
_IN_PLACE = {
    str(func): func
    for func in RULES
    if func._schema.name.endswith("_") and func not in (aten.rrelu_with_noise_.default,)
}
_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    "eager_draw(str op, SymInt[] size, SymInt[] stride, Tensor[] tensors, Scalar?[] scalars, *, ScalarType dtype,"
    " Device device) -> Tensor"
)


def _eager_draw(
    op: str, size: Sequence[int], stride: Sequence[int], tensors: Any, scalars: Any, *, dtype: Any, device: Any
) -> Tensor:
    out = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return _IN_PLACE[op](out, *tensors, *scalars)


_library.impl("eager_draw", _eager_draw, "CompositeExplicitAutograd")


@register_fake(_library, "eager_draw")
def _(op: str, size: Any, stride: Any, tensors: Any, scalars: Any, *, dtype: Any, device: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def eager_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random op under rng="eager": as it is where it is functional, else as a draw into fresh memory and a copy."""
    if kwargs.get("generator") is not None:
        raise UnsupportedError(f"{func} is given an explicit generator=; only torch's default one is compiled")
    if func is aten.rrelu_with_noise.default:
        return func(args[0].contiguous(), *args[1:], **kwargs)  # its functional form keeps the strides, the op does not
    if str(func) not in _IN_PLACE:
        return func(*args, **kwargs)
    names = [argument.name for argument in func._schema.arguments if not argument.kwarg_only]
    positional = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    destination, *rest = [*args, *positional]
    tensors = [value for value in rest if isinstance(value, Tensor)]
    scalars = [value for value in rest if not isinstance(value, Tensor)]
    drawn = _draws.eager_draw(
        str(func),
        list(destination.shape),
        list(destination.stride()),
        tensors,
        scalars,
        dtype=destination.dtype,
        device=destination.device,
    )
    return destination.copy_(drawn)
