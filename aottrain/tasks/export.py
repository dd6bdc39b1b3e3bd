"""task=export: what a run has learned, as files for other programs; the recipe says which."""

from __future__ import annotations

from pathlib import Path

from aottrain.config.extensions.recipes import program_errors, recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError, OutputError
from aottrain.tasks.building.loading import able_recipes, load_weights, newest_of_run
from aottrain.tasks.building.model import build_model, model_options
from aottrain.trainer.weights.lora import merge


def run(config: RunConfig) -> int:
    """Write the model of the newest checkpoint of `export.run`, in the form of its recipe; adapters are merged into it.

    ConfigError: the recipe has no such form. ResumeError: there is no checkpoint, or it is of another model.
    OutputError: a file cannot be written.
    """
    recipe = recipe_of(config.recipe)
    if not hasattr(recipe, "export"):
        lacks = "has no export(model, folder), which task=export needs"
        raise ConfigError(f"recipe={config.recipe.title}: {lacks}; there is {able_recipes('export')}")
    loaded = newest_of_run("export.run", config.export.run)
    with program_errors(config):
        model = build_model(recipe, model_options(config), config)
        load_weights(model, loaded, "export.weights", config.export.weights)
        folder = Path(config.export.path or Path(config.output_dir, "model"))
        try:
            recipe.export(merge(model).eval(), folder)
        except OSError as error:
            raise OutputError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    print(f"written after step {loaded.step} of {config.export.run}: {folder}")
    for file in sorted(folder.iterdir()):
        print(f"  {file.name}  {file.stat().st_size:,} bytes")
    return 0
