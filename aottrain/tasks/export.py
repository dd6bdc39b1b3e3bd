"""task=export: what a run has learned, as files for other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import nn

from aottrain.config.extensions.recipes import program_errors, recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError, OutputError
from aottrain.ir.settings.files import write_whole
from aottrain.tasks.building.loading import able_recipes, load_weights, newest_of_run
from aottrain.tasks.building.model import build_model, model_options
from aottrain.trainer.reliability.signals import interruptible
from aottrain.trainer.weights.files import Parts, write_tensors
from aottrain.trainer.weights.lora import merge


@interruptible()
def run(config: RunConfig) -> int:
    """Write the model of the newest checkpoint of `export.run`, as `export.format` says; adapters are merged into it.

    ConfigError: the recipe has no such form. ResumeError: there is no checkpoint, or it is of another model.
    OutputError: a file cannot be written.
    """
    recipe = recipe_of(config.recipe)
    write = _writer(recipe, config)
    loaded = newest_of_run("export.run", config.export.run)
    with program_errors(config):
        model = build_model(recipe, model_options(config), config)
        load_weights(model, loaded, "export.weights", config.export.weights)
        folder = Path(config.export.path or Path(config.output_dir, "model"))
        try:
            write(merge(model).eval(), folder)
        except OSError as error:
            raise OutputError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    print(f"written after step {loaded.step} of {config.export.run}: {folder}")
    for file in sorted(folder.iterdir()):
        print(f"  {file.name}  {file.stat().st_size:,} bytes")
    return 0


def _writer(recipe: ModuleType, config: RunConfig) -> Callable[[nn.Module, Path], Any]:
    """A function of (model, folder). ConfigError: the recipe has not the form that is asked for."""
    form, own = config.export.format, getattr(recipe, "export", None)
    if form == "safetensors":
        return write_safetensors
    if form == "weights" or (form == "auto" and own is None):
        return write_weights
    if own is None or form not in ("auto", getattr(recipe, "EXPORTS", "")):
        others = f"recipe={config.recipe.title} has no such form (recipe={able_recipes('export')} has); try weights"
        raise ConfigError(f"export.format={form}: {others}")
    return own


def write_weights(model: nn.Module, folder: Path) -> None:
    """`weights.pt`: the model's tensors by name, for `model.load_state_dict(torch.load(path))`. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    _write_whole(folder / "weights.pt", partial(torch.save, weights))


def write_safetensors(model: nn.Module, folder: Path) -> None:
    """`weights.safetensors`: the same for other tools, tied weights once. OSError. OutputError: the format has no place
    for some value."""
    parts = Parts.of(model.state_dict())
    left = [name for name in parts.rest if name not in parts.names]
    if left:
        raise OutputError(f"export.format=safetensors: it cannot hold {', '.join(left)}; try weights")
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(folder / "weights.safetensors", lambda file: write_tensors(file.write, parts.tensors, parts.tied))


def _write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    def into(temporary: Path) -> None:
        with temporary.open("wb") as file:  # of Python, whose errors say what the disk said
            try:
                write(file)
            except RuntimeError as error:  # as torch's zip writer ends where the file has raised
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    write_whole(path, into)
