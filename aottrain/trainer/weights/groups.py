"""Groups of an optimizer: which parameters decay, and at what part of the learning rate each is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from aottrain.errors import ConfigError
from aottrain.trainer.blocks import repeated_modules
from aottrain.trainer.weights.naming import chosen

if TYPE_CHECKING:
    from aottrain.config.run import OptimizerConfig

FACTOR = "lr_factor"  # in a group: what its rate is multiplied by; 1 where there is none


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> nn.Module:
    """`model`, in which the parameters that `trainer.freeze` names take no gradient. ConfigError: a pattern names
    none, or none is left."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    for name in chosen(parameters, patterns, "trainer.freeze", "parameter"):
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"trainer.freeze={','.join(patterns)}: leaves no parameter to train")
    return model


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Those that decay, then the others, each with its part of the rate where that is not 1. ConfigError:
    `optimizer.lr_factors` or `optimizer.layer_decay` does not fit the model.

    Matrices decay; vectors (biases, norm scales) do not: shrinking those changes what a layer does, not how much."""
    factors = rate_factors(model, config)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = config.decay_norms_and_biases or parameter.ndim >= 2
            groups.setdefault((decays, factors.get(name, 1.0)), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decays else 0.0,
            **({} if factor == 1 else {FACTOR: factor}),
        }
        for (decays, factor), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def rate_factors(model: nn.Module, config: OptimizerConfig) -> Mapping[str, float]:
    """By the names of parameters; of several patterns that match one the last counts, times what its depth gives."""
    factors = depth_factors(model, config.layer_decay) if config.layer_decay is not None else {}
    names, key = [name for name, _ in model.named_parameters()], "optimizer.lr_factors"
    own: dict[str, float] = {}
    for entry in config.lr_factors:
        pattern, factor = parsed(entry)
        own |= dict.fromkeys(chosen(names, [pattern], key, "parameter"), factor)
    return {name: own.get(name, 1.0) * factors.get(name, 1.0) for name in {**own, **factors}}


def parsed(entry: str) -> tuple[str, float]:
    """Pattern and factor of "blocks.0:0.1". ConfigError: it is something else."""
    pattern, _, text = entry.rpartition(":")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not pattern or not 0 < factor < math.inf:
        raise ConfigError(f"optimizer.lr_factors={entry}: each must be pattern:factor, a factor above 0")
    return pattern, factor


def depth_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """decay^d for each parameter: d is 0 behind the repeated blocks, 1 in the last of them, and so on to the first, and
    one more before them (Clark et al., 2020, "ELECTRA", arXiv:2003.10555). ConfigError: there is no repeated block."""
    blocks = repeated_modules(model)
    if not blocks:
        text = "the model repeats no block (an nn.ModuleList or nn.Sequential of one class)"
        raise ConfigError(f"optimizer.layer_decay={decay}: {text}")
    numbers = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    factors, depth = {}, len(blocks) + 1
    for name, parameter in model.named_parameters():
        if (number := numbers.get(id(parameter))) is not None:
            depth = len(blocks) - number
        elif depth <= len(blocks):  # it was in a block, and this is behind them
            depth = 0
        factors[name] = decay**depth
    return factors
