"""What a task finds of a run that has been: its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from aottrain.config.recipes import load_recipe, recipe_names
from aottrain.errors import ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, find


def newest_of_run(key: str, run: str | None) -> Loaded:
    """The newest checkpoint that is whole of the run that the setting `key` names. ResumeError: there is none."""
    loaded = find(run, CheckpointFolder(Path(str(run), "checkpoints")), print, key)
    if loaded is None:
        raise ResumeError(f"{key}={run}: names no run")
    return loaded


def able_recipes(function: str) -> str:
    """The recipes of ours that have this function, for a sentence."""
    return ", ".join(name for name in recipe_names() if hasattr(load_recipe(name), function))
