"""Ops that update an argument though their schema denies it, written out: a new value, then a copy of it in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aottrain.ir.ops import hidden_mutation

aten = torch.ops.aten


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mean, var = given["running_mean"], given["running_var"]
    if not given["training"] or mean is None:
        return func(*args, **kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, given["momentum"], given["eps"]
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_invstd


def _batch_norm_with_update(func: Any, args: Any, kwargs: Any) -> Any:
    out, save_mean, save_invstd, reserve, mean, var = aten._batch_norm_with_update_functional(*args, **kwargs)
    args[3].copy_(mean)
    args[4].copy_(var)
    return out, save_mean, save_invstd, reserve


def hidden_writes(func: Any, args: Any) -> tuple[int, ...]:
    """Positions of the arguments that a call of a mutating op writes behind its schema: none outside training."""
    training = func is aten._batch_norm_with_update.default or (len(args) > 5 and args[5] is True)
    return hidden_mutation(func) if func in MUTATION_RULES and training else ()


MUTATION_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
}
KNOWN_PURE = {aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default}
