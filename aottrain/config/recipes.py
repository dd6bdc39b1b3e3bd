"""Recipes: found by name, imported, held against what a recipe must have; and what their own code raises, by its line.

A recipe is a person's own program. A mistake in it is answered as one in the configuration is: in a line that names
the place, without this package's frames around it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from aottrain.errors import AottrainError, ConfigError, RecipeError

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
MUST_HAVE = {"build": ("options",), "loss": ("model", "batch")}
MAY_HAVE = {
    "prepare": ("options", "batch", "generator"),
    "make_batch": ("options", "batch_size", "generator"),
    "flops_per_token": ("options",),
    "flops_per_sample": ("options",),
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
        file = recipe_file(name)
        raise ConfigError(f"recipe={name}: cannot be imported: {_error_text(error, file) or _brief(error)}") from error
    if lacks := _lacks(recipe):
        file = _shown(str(recipe.__file__))
        raise ConfigError([f"recipe={name}: {file} {text}" for text in lacks])
    return recipe


def reads_text(recipe: ModuleType, options: Any) -> bool:
    """Whether the recipe is trained on text: where it makes no batches, or its options say that it does not now."""
    return not hasattr(recipe, "make_batch") or getattr(options, "reads_text", False)


def recipe_names() -> list[str]:
    """Every recipe there is, found without importing any."""
    modules = pkgutil.iter_modules(_recipes_package().__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def recipe_file(name: str) -> str | None:
    """Where the source of a recipe is, found without importing it; None where there is no such module."""
    spec = importlib.util.find_spec(f"{_recipes_package().__name__}.{name}")
    return None if spec is None else spec.origin


@contextmanager
def recipe_errors(name: str) -> Iterator[None]:
    """Inside, what the code of recipe `name` raises becomes RecipeError; all other errors stay as they are."""
    try:
        yield
    except AottrainError:
        raise
    except Exception as error:
        file = recipe_file(name)
        if (text := _error_text(error, file)) is None:
            raise
        raise RecipeError(text) from error


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
        names = {item.name for item in fields}
        unset = [i.name for i in fields if i.init and i.default is i.default_factory is dataclasses.MISSING]
        lacks += [f"has an Options whose {name} has no default" for name in unset]
        if not hasattr(recipe, "make_batch") and (missing := sorted({"context", "vocab_size"} - names)):
            text = f"has an Options without {' and '.join(missing)}, which a recipe for text needs; "
            lacks.append(text + "one with data of its own has make_batch(options, batch_size, generator)")
    for name, parameters in (MUST_HAVE | MAY_HAVE).items():
        function = getattr(recipe, name, None)
        if function is None and name in MUST_HAVE:
            lacks.append(f"has no function {name}({', '.join(parameters)})")
        elif function is not None and not _takes(function, len(parameters)):
            lacks.append(f"has a {name} that cannot be called as {name}({', '.join(parameters)})")
    return lacks


def _takes(function: Callable[..., Any], count: int) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin, which does not say what it takes
        return True
    return True


def _error_text(error: Exception, file: str | None) -> str | None:
    """The error with the line of the recipe, or of a module that it uses, that raised it.

    None where the recipe is not to blame: it was not running, or code of this package that it called raised.
    """
    if isinstance(error, SyntaxError) and error.filename and not _is_library(error.filename):
        return f"{_shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    at = max((i for i, frame in enumerate(frames) if file and _same(frame.filename, file)), default=None)
    if at is None or any(_is_ours(frame.filename) and not _same(frame.filename, file) for frame in frames[at:]):
        return None
    frame = next(frame for frame in reversed(frames[at:]) if not _is_library(frame.filename))
    code = f", `{frame.line}`" if frame.line else ""
    return f"{_shown(frame.filename)}:{frame.lineno}, in {frame.name}{code}: {_brief(error)}"


def _brief(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _same(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _is_library(file: str) -> bool:
    return file.startswith(("<", _LIBRARIES[0])) or any(part in file for part in _LIBRARIES[1:])


def _is_ours(file: str) -> bool:
    return Path(file).resolve().is_relative_to(_PACKAGE)


def _shown(file: str) -> str:
    """A path as a person in this folder would write it."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near


def _recipes_package() -> ModuleType:
    """The package `aottrain.recipes`: where it is installed, or, in a plain checkout, the folder beside `aottrain/`."""
    name = "aottrain.recipes"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = Path(__file__).resolve().parents[2] / "recipes"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise ConfigError(f"recipe: no recipes found, neither as {name} nor in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package
