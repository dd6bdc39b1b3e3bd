"""Ops that a trace cannot have as they are, written out.

Those that update an argument though their schema denies it: a new value, then a copy of it in place. Those whose
results have sizes that depend on values, where larger ones hold the same. And zeros that have no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import aottrain.ops.libraries.bincount  # noqa: F401  (the ops)
import aottrain.ops.libraries.lstm  # noqa: F401  (the ops)
import aottrain.ops.libraries.lstsq  # noqa: F401  (the ops)
import aottrain.ops.losses.ctc  # noqa: F401  (the ops)
from aottrain.ir.ops import hidden_mutation

aten = torch.ops.aten


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    mean, var = arguments["running_mean"], arguments["running_var"]
    if not arguments["training"] or mean is None:
        return func(*args, **kwargs)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, arguments["momentum"], arguments["eps"]
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_invstd


def _batch_norm_with_update(func: Any, args: Any, kwargs: Any) -> Any:
    out, save_mean, save_invstd, reserve, mean, var = aten._batch_norm_with_update_functional(*args, **kwargs)
    args[3].copy_(mean)
    args[4].copy_(var)
    return out, save_mean, save_invstd, reserve


def _cudnn_batch_norm(_: Any, args: Any, kwargs: Any) -> Any:
    """As the native op, whose results it shares but for what cuDNN's own backward would read."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    arguments = {**dict(zip(names, args, strict=False)), **_native_names(kwargs)}
    values = tuple(arguments[name] for name in names)
    if arguments["training"] and arguments["running_mean"] is None:
        results = aten._native_batch_norm_legit.no_stats(*values[:3], *values[5:])
    else:
        results = _batch_norm(aten.native_batch_norm.default, values, {})
    return (*results, values[0].new_empty(0, dtype=torch.uint8))


def _native_names(kwargs: Any) -> dict[str, Any]:
    new_names = {"exponential_average_factor": "momentum", "epsilon": "eps"}
    return {new_names.get(name, name): value for name, value in kwargs.items()}


def _cudnn_batch_norm_backward(_: Any, args: Any, kwargs: Any) -> Any:
    """Of training alone: elsewhere autograd calls the native op."""
    names = ("input", "grad_output", "weight", "running_mean", "running_var", "save_mean", "save_var", "epsilon")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    x, gradient, weight, *statistics, epsilon = (arguments[name] for name in names)
    return aten.native_batch_norm_backward(gradient, x, weight, *statistics, True, epsilon, [True, True, True])


def _ctc_loss(func: Any, args: Any, kwargs: Any) -> Any:
    """On a CPU: elsewhere other libraries may compute it."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "zero_infinity")
    arguments = {"blank": 0, "zero_infinity": False, **dict(zip(names, args, strict=False)), **kwargs}
    if arguments["log_probs"].device.type != "cpu":
        return func(*args, **kwargs)
    lengths = [torch.tensor(v) if isinstance(v, (list, tuple)) else v for v in (arguments[name] for name in names[2:4])]
    rest = arguments["blank"], arguments["zero_infinity"]
    return torch.ops.aottrain.ctc_loss.default(arguments["log_probs"], arguments["targets"], *lengths, *rest)


def _ctc_loss_backward(func: Any, args: Any, kwargs: Any) -> Any:
    if args[1].device.type != "cpu":
        return func(*args, **kwargs)
    zero_infinity = args[8] if len(args) > 8 else kwargs.get("zero_infinity", False)
    lengths = [torch.tensor(v) if isinstance(v, (list, tuple)) else v for v in args[3:5]]
    return torch.ops.aottrain.ctc_loss_backward.default(*args[:3], *lengths, *args[5:8], zero_infinity)


def _lstsq(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("self", "b", "rcond", "driver")
    arguments = {"rcond": None, "driver": None, **dict(zip(names, args, strict=False)), **kwargs}
    a, b, driver = arguments["self"], arguments["b"], arguments["driver"] or "gelsy"
    if a.device.type != "cpu" or b.dim() != a.dim() or b.shape[:-1] != a.shape[:-1]:
        return func(*args, **kwargs)
    return torch.ops.aottrain.lstsq.default(a, b, arguments["rcond"], driver)


def _bincount(func: Any, args: Any, kwargs: Any) -> Any:
    """Of as many counts as the program asks for at least; where it asks for none the longest is not to be guessed."""
    names = ("self", "weights", "minlength")
    arguments = {"weights": None, "minlength": 0, **dict(zip(names, args, strict=False)), **kwargs}
    numbers, weights, minlength = (arguments[name] for name in names)
    if numbers.dim() != 1 or numbers.numel() == 0 or minlength < 1:
        return func(*args, **kwargs)
    return torch.ops.aottrain.bincount.default(numbers, weights, minlength)


def _lstm_layer(_: Any, args: Any, kwargs: Any) -> Any:
    return torch.ops.aottrain.lstm_layer.default(*args, **kwargs)


def _lstm_layer_backward(_: Any, args: Any, kwargs: Any) -> Any:
    return torch.ops.aottrain.lstm_layer_backward.default(*args, **kwargs)


def _zeros(_: Any, args: Any, kwargs: Any) -> Any:
    """With memory: what is added to zeros without is handed on as the sum, and no trace says that a gradient of zeros
    came too."""
    return aten.zeros.default(*args, **kwargs)


def hidden_writes(func: Any, args: Any) -> tuple[int, ...]:
    """Positions of the arguments that a call of a mutating op writes behind its schema: none outside training."""
    training = func is aten._batch_norm_with_update.default or (len(args) > 5 and args[5] is True)
    return hidden_mutation(func) if func in MUTATION_RULES and training else ()


MUTATION_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._batch_norm_with_update.default: _batch_norm_with_update,
    # Fused and checked as the native op, which a library's own state between forward and backward would prevent.
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
PURE_VARIANTS = {aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default}
# Of ops whose results have sizes that depend on values, or no memory.
RESULT_RULES: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten.bincount.default: _bincount,
    aten.linalg_lstsq.default: _lstsq,
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    aten._efficientzerotensor.default: _zeros,
}
