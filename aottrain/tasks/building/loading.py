"""What a task finds of a run that has been: its newest checkpoint, and the weights in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from aottrain.config.extensions.recipes import load_recipe, recipe_names
from aottrain.config.folders import CHECKPOINTS
from aottrain.errors import ConfigError, ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, find, load_model
from aottrain.trainer.reliability.saving import check_held
from aottrain.trainer.weights.pieces import Stored


def newest_of_run(key: str, run: str | None) -> Loaded:
    """The newest checkpoint that is whole of the run that the setting `key` names; of pieces none is read yet.
    ResumeError: there is none."""
    loaded = find(run, CheckpointFolder(Path(str(run), CHECKPOINTS)), print, key, lazily=True)
    if loaded is None:
        raise ResumeError(f"{key}={run}: names no run")
    return check_held(loaded)


def load_weights(model: nn.Module, loaded: Loaded, key: str, which: str = "auto") -> None:
    """The weights of a checkpoint that `which` names (WEIGHTS of aottrain.config.choices), as the setting `key` has it.
    ConfigError: it has no averaged ones. ResumeError: it is of another model."""
    averages = loaded.state.get("averages")
    if averages is None and which == "averaged":
        raise ConfigError(f"{key}=averaged: that run kept no mean of its weights (trainer.ema)")
    taken = {} if averages is None or which == "last" else averages["values"]
    weights = {**loaded.state["model"], **taken}
    try:
        weights = {name: value.whole() if isinstance(value, Stored) else value for name, value in weights.items()}
    except Exception as error:  # safetensors has its own
        raise ResumeError(f"{loaded.path}: a piece of it cannot be read ({type(error).__name__}: {error})") from error
    load_model(model, replace(loaded, state={**loaded.state, "model": weights}))


def able_recipes(function: str) -> str:
    """The recipes of ours that have this function, for a sentence."""
    return ", ".join(name for name in recipe_names() if hasattr(load_recipe(name), function))
