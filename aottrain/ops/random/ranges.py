"""The types and ranges in which eager wants the arguments of random operators, which have no part in how we draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_modes
from aottrain.ops.random.generator import generators_kept

aten = torch.ops.aten

_taken: set[Any] = set()  # the operators, with the types of their tensors, that eager has taken


def check_types(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what eager raises where a random operator does not take these types: it draws one number of each, once.

    A formula of ours takes more: torch.randn gives no integers in eager, and a comparison with a number gives any type.
    """
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    device = torch.device(arguments.get("device") or next((value.device for value in tensors.values()), "cpu"))
    types = tuple((name, value.dtype) for name, value in tensors.items())
    key = (func, types, arguments.get("dtype"), torch.get_default_dtype(), device.type)
    is_elsewhere = device.type == "cuda" and not torch.cuda.is_available()  # it is planned for alone
    if key in _taken or device.type == "meta" or is_elsewhere:
        return
    # What a range is about, is checked elsewhere: it may be another at each call, or a symbol.
    few = {name: value for name, value in _ONE.items() if name in arguments}
    some = {name: arguments[name] for name in ("dtype", "device", "train", "training") if name in arguments}
    with disable_modes(), torch.no_grad():
        ones = {name: torch.ones(1, dtype=value.dtype, device=value.device) for name, value in tensors.items()}
        with generators_kept(device):
            func(**{**few, **some, **ones})
    _taken.add(key)


# One number, of whichever distribution.
_ONE: dict[str, Any] = {
    "size": [1], "n": 1, "num_samples": 1, "p": 0.5, "high": 1, "low": 0, "from": 0, "to": 1, "mean": 0.0, "std": 1.0,
    "lambd": 1.0, "median": 0.0, "sigma": 1.0, "lower": 0.1, "upper": 0.3,
}  # fmt: skip


def check_number(holds: bool, message: str) -> None:
    """Of an argument that is the same in each call of a program; one that cannot be traced runs eagerly."""
    if not holds:
        raise RuntimeError(message)


def check_values(flag: Tensor, message: str) -> None:
    """Part of the program: it raises a RuntimeError in each call in which the flag is False."""
    aten._assert_async.msg(flag, message)


def check_integers(low: int, high: int, dtype: torch.dtype) -> None:
    """Of draws in [low, high) that a tensor of this type is to hold."""
    check_number(low < high, f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if dtype == torch.bool:
        least, most = 0, 1
    else:
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)
    check_number(least <= low and high - 1 <= most, f"random_ expects {low}..{high} to lie within {dtype}")
