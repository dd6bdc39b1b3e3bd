"""The model that a run trains: what the recipe builds, and of its weights those that are trained."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from aottrain.config.choices import BF16_WEIGHTS, FP8, RUN_TASKS
from aottrain.config.extensions.recipes import recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import RecipeError
from aottrain.tasks.building.loading import load_weights, newest_of_run
from aottrain.trainer.weights.float8 import use_float8
from aottrain.trainer.weights.groups import freeze
from aottrain.trainer.weights.lora import adapt
from aottrain.trainer.weights.rounding import round_matrices


def model_options(config: RunConfig) -> Any:
    """The recipe's Options, as they are given or its own."""
    return config.recipe.model if config.recipe.model is not None else recipe_of(config.recipe).Options()


def build_model(recipe: ModuleType, options: Any, config: RunConfig) -> nn.Module:
    """The model with its adapters and frozen parts, new weights drawn from torch's default generator.

    RecipeError: the recipe gives no model that could be trained. ConfigError: the configuration names weights that it
    has not. ResumeError: `adapter.base` has no checkpoint of this model."""
    model = recipe.build(options)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"build(options) must return a torch.nn.Module, it returned {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError("the model that build(options) returned has no parameter that takes a gradient")
    if reads_base(config) and torch.get_default_device().type != "meta":  # where only sizes are asked for
        load_weights(model, newest_of_run("adapter.base", config.adapter.base), "adapter.base")
    if config.adapter.name != "none":
        adapt(model, config.adapter)
    if config.trainer.precision == BF16_WEIGHTS:
        round_matrices(model)
    if config.trainer.precision == FP8:
        use_float8(model)
    return freeze(model, config.trainer.freeze)


def reads_base(config: RunConfig) -> bool:
    """Whether `adapter.base` is looked at: a run's own checkpoint has the base, too."""
    return config.adapter.base is not None and config.task not in RUN_TASKS and config.resume in (None, "auto")
