"""The model that a run has trained: its newest checkpoint, and the weights in it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from aottrain.config.recipes import load_recipe, recipe_names
from aottrain.errors import ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, find


def newest_of_run(key: str, run: str | None) -> Loaded:
    """The newest checkpoint that is whole of the run that the setting `key` names. ResumeError: there is none."""
    loaded = find(run, CheckpointFolder(Path(str(run), "checkpoints")), print, key)
    if loaded is None:
        raise ResumeError(f"{key}={run}: names no run")
    return loaded


def load_weights(model: nn.Module, loaded: Loaded) -> None:
    """Put the checkpoint's weights into the model. ResumeError: they are of another one."""
    try:
        model.load_state_dict(loaded.state["model"])
    except (KeyError, RuntimeError) as error:
        raise ResumeError(f"{loaded.path}: is not of this model: {str(error).splitlines()[0]}") from error


def able_recipes(function: str) -> str:
    """The recipes of ours that have this function, for a sentence."""
    return ", ".join(name for name in recipe_names() if hasattr(load_recipe(name), function))
