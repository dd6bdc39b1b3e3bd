"""Recipes: found by name or by `recipe.target`, imported, and held against what a recipe must have.

A recipe is a person's own program; see aottrain/config/extensions/targets.py for which one is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aottrain.config.choices import DATA_KINDS
from aottrain.config.extensions.own_code import import_error_text, own_errors, shown
from aottrain.config.extensions.targets import KINDS, could_take, load_target, target_file
from aottrain.errors import ConfigError

if TYPE_CHECKING:
    from aottrain.config.run import RecipeConfig, RunConfig

MUST_HAVE = {"build": ("options",), "loss": ("model", "batch")}
# The fields of a recipe's Options by which it takes a kind of data (aottrain.config.choices.DATA_KINDS).
KIND_FIELDS = {
    "tokens": ("context", "vocab_size"),
    "images": ("image_size", "num_classes"),
    "arrays": ("num_features",),
}
MAY_HAVE = {
    "prepare": ("options", "batch", "generator"),
    "make_batch": ("options", "batch_size", "generator"),
    "flops_per_token": ("options",),
    "flops_per_sample": ("options",),
    "weight": ("batch",),
    "generate": ("model", "prompt", "num_tokens", "temperature", "generator"),
    "predict": ("model", "batch"),
    "metrics": ("model", "batch"),
    "export": ("model", "folder"),
}


def load_recipe(name: str) -> ModuleType:
    """The recipe module `name`, from the installed package or from the checkout's recipes/ folder. ConfigError: there
    is none, it cannot be imported, or it lacks what a recipe must have."""
    if name not in recipe_names():
        raise ConfigError(f"recipe.name={name}: unknown recipe (recipes: {', '.join(recipe_names())})")
    try:
        recipe = importlib.import_module(f"{_recipes_package().__name__}.{name}")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise  # of an installation, not of the recipe: the command line says what to do
        raise ConfigError(f"recipe={name}: cannot be imported: {import_error_text(error)}") from error
    return _checked(recipe, f"recipe={name}")


def recipe_of(config: RecipeConfig) -> ModuleType:
    """The recipe that a configuration means: the module that its target names, or one of ours. ConfigError: see
    `load_recipe` and `load_target`."""
    if config.target is None:
        return load_recipe(config.name)
    return _checked(load_target("recipe", config.target), f"recipe.target={config.target}")


def _checked(recipe: ModuleType, given: str) -> ModuleType:
    if lacks := _lacks(recipe):
        raise ConfigError([f"{given}: {shown(str(recipe.__file__))} {text}" for text in lacks])
    return recipe


def recipe_names() -> list[str]:
    """Every recipe of ours, found without importing any."""
    modules = pkgutil.iter_modules(_recipes_package().__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def recipe_file(name: str) -> str | None:
    """Where the source of a recipe of ours is, found without importing it; None where there is no such module."""
    spec = importlib.util.find_spec(f"{_recipes_package().__name__}.{name}")
    return None if spec is None else spec.origin


@contextmanager
def program_errors(config: RunConfig) -> Iterator[None]:
    """Inside, what the code of the recipe or of another target raises becomes RecipeError; see `own_errors`."""
    with own_errors(lambda: program_files(config)):
        yield


def program_files(config: RunConfig) -> list[str]:
    """The files of the recipe and of the other targets."""
    targets = [getattr(config, group).target for group in KINDS]
    found = [recipe_file(config.recipe.name) if config.recipe.target is None else None]
    return [file for file in (*found, *(target_file(target) for target in targets if target)) if file]


def _lacks(recipe: ModuleType) -> list[str]:
    """What the module lacks of a recipe, each as the end of a sentence that begins with its file."""
    lacks = []
    options = getattr(recipe, "Options", None)
    if not (inspect.isclass(options) and dataclasses.is_dataclass(options)):
        lacks.append("has no dataclass Options with the recipe's settings")
    else:
        if not callable(getattr(options, "check", None)):
            lacks.append("has an Options without the method check(self) -> list[str]")
        fields = dataclasses.fields(options)
        unset = [i.name for i in fields if i.init and i.default is i.default_factory is dataclasses.MISSING]
        lacks += [f"has an Options whose {name} has no default" for name in unset]
    for name, parameters in (MUST_HAVE | MAY_HAVE).items():
        function = getattr(recipe, name, None)
        if function is None and name in MUST_HAVE:
            lacks.append(f"has no function {name}({', '.join(parameters)})")
        elif function is not None and not could_take(function, *parameters):
            lacks.append(f"has a {name} that cannot be called as {name}({', '.join(parameters)})")
    return lacks


def lacks_for_data(recipe: ModuleType) -> str:
    """What keeps the recipe from being trained on anything that `data` names, "" if nothing; as `_lacks` says it."""
    if hasattr(recipe, "make_batch") or kinds_taken(recipe.Options):
        return ""
    missing = sorted(set(KIND_FIELDS["tokens"]) - {item.name for item in dataclasses.fields(recipe.Options)})
    text = f"has an Options without {' and '.join(missing)}, which a recipe for text needs; "
    others = [f"one for {kind} has {' and '.join(KIND_FIELDS[kind])}" for kind in ("images", "arrays")]
    own = "one with data of its own has make_batch(options, batch_size, generator), or is given data.target"
    return text + "; ".join([*others, own])


def makes_batches(recipe: ModuleType, options: Any) -> bool:
    """Whether the recipe itself makes what it is trained on, where `data` names nothing else."""
    return hasattr(recipe, "make_batch") and not getattr(options, "reads_text", False)


def writes_text(recipe: ModuleType, options: Any) -> bool:
    """Whether the recipe with these options has text to show."""
    return hasattr(recipe, "generate") and getattr(options, "writes_text", True)


def kinds_taken(options: Any) -> tuple[str, ...]:
    """The kinds of data that a recipe takes, which its Options say by the fields or properties that they have. options:
    the class, or those of a run, which may say that they read no text now, or be without an image_size (None)."""
    of_class = options if isinstance(options, type) else type(options)
    names = {*dir(of_class), *(item.name for item in dataclasses.fields(of_class))}
    kinds = tuple(kind for kind, fields in KIND_FIELDS.items() if names.issuperset(fields))
    if of_class is options:
        return kinds
    left_out = {"tokens"} if not getattr(options, "reads_text", True) else set()
    left_out |= {"images"} if getattr(options, "image_size", 0) is None else set()
    return tuple(kind for kind in kinds if kind not in left_out)


def not_taken(name: str, options: Any) -> str:
    """Why a recipe with these options does not take the data of this name, with what it does take."""
    kinds = kinds_taken(options)
    fitting = [f"data={other}" for other, kind in DATA_KINDS.items() if kind in kinds]
    if fitting:
        return f"data={name}: the recipe takes {' or '.join(fitting)}"
    own = f"one that takes this has an Options with {' and '.join(KIND_FIELDS[DATA_KINDS[name]])}"
    return f"data={name}: the recipe takes only what it makes itself; {own}"


def _recipes_package() -> ModuleType:
    """The package `aottrain.recipes`: in a checkout the folder beside `aottrain/`, though another checkout may be
    the one that is installed; else where it is installed."""
    name, root = "aottrain.recipes", Path(__file__).resolve().parents[3]
    if name in sys.modules:
        return sys.modules[name]
    folder = root / "recipes"
    is_checkout = (root / "conf" / "config.yaml").is_file() and (folder / "__init__.py").is_file()
    if (root / "aottrain" / "recipes").is_dir() or not is_checkout:
        return importlib.import_module(name)
    places = [str(folder)]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ConfigError(f"recipe: {folder} cannot be imported")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package
