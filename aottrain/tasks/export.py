"""task=export: what a run has learned, as files for other programs; the recipe says which."""

from __future__ import annotations

from pathlib import Path

from aottrain.config.recipes import load_recipe, program_errors, recipe_names, recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError, OutputError, ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, find, load_model


def run(config: RunConfig) -> int:
    """Write the model of the newest checkpoint of `export.run`, in the form of its recipe.

    ConfigError: the recipe has no such form. ResumeError: there is no checkpoint, or it is of another model.
    OutputError: a file cannot be written.
    """
    recipe = recipe_of(config.recipe)
    if not hasattr(recipe, "export"):
        able = ", ".join(other for other in recipe_names() if hasattr(load_recipe(other), "export"))
        lacks = "has no export(model, folder), which task=export needs"
        raise ConfigError(f"recipe={config.recipe.title}: {lacks}; there is {able}")
    loaded = find(config.export.run, CheckpointFolder(Path(str(config.export.run), "checkpoints")), print)
    if loaded is None:
        raise ResumeError(f"export.run={config.export.run}: the folder has no checkpoint")
    with program_errors(config):
        model = recipe.build(config.recipe.model if config.recipe.model is not None else recipe.Options())
        load_model(model, loaded)
        folder = Path(config.export.path or Path(config.output_dir, "model"))
        try:
            recipe.export(model.eval(), folder)
        except OSError as error:
            raise OutputError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    print(f"written after step {loaded.step} of {config.export.run}: {folder}")
    for file in sorted(folder.iterdir()):
        print(f"  {file.name}  {file.stat().st_size:,} bytes")
    return 0
