"""The keys of the configuration as a person reads them: name, allowed values, default, and what each does.

The sentence of a key is the string after its field in the class. Python drops such strings, so they are read from the
source. Recipes are read so as a whole, since importing one imports torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aottrain.config.extensions.recipes import recipe_file
from aottrain.config.run import RunConfig
from aottrain.config.schema import Range, allowed_values, join
from aottrain.ir.settings.files import text_of

# The types that a recipe's options have.
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict}


@dataclass(frozen=True)
class Key:
    """What is documented of a configuration key."""

    name: str
    """Dotted, as it is typed."""
    allowed: str
    """Its values, in words."""
    default: Any
    meaning: str
    """One sentence."""
    one_of: tuple[str, ...] = ()
    """The names that it takes, where it takes names."""


def keys() -> dict[str, Key]:
    """Every key of a RunConfig by its name, in order. `recipe.model` stands for the options of the recipe."""
    return {key.name: key for key in _keys_of(RunConfig, "")}


def model_keys(recipe: str) -> dict[str, Key]:
    """Every `recipe.model` key of a recipe of ours by its name, in order; none of another."""
    by_name: dict[str, Key] = {}
    if (file := recipe_file(recipe)) is None:
        return by_name
    for field, meaning in _documented(Path(file))["Options"]:
        name = join("recipe.model", ast.unparse(field.target))
        kind, *none = ast.unparse(field.annotation).split(" | ")
        allowed = allowed_values(_TYPES[kind] | None if none else _TYPES[kind], Range())
        by_name[name] = Key(name, allowed, ast.literal_eval(field.value) if field.value else None, meaning)
    return by_name


def head_of(path: Path) -> str:
    """The comment that a YAML file begins with, without the command at its end."""
    lines = []
    for line in text_of(path).splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line.removeprefix("# ")]
    return re.sub(r" `[^`]*`$", "", " ".join(lines))


def sections() -> dict[str, str]:
    """Of each section of a RunConfig what it is for."""
    hints = typing.get_type_hints(RunConfig)
    return {name: inspect.getdoc(hint) or "" for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def _keys_of(section: Any, prefix: str) -> Iterator[Key]:
    documented = _documented(Path(inspect.getfile(section)))[section.__name__]
    meanings = {ast.unparse(field.target): meaning for field, meaning in documented}
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, hint = join(prefix, field.name), hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _keys_of(hint, name)
        elif field.name != "output_dir":  # which Hydra sets
            limits = field.metadata.get("range", Range())
            yield Key(name, allowed_values(hint, limits), field.default, meanings[field.name], limits.one_of)


@cache
def _documented(path: Path) -> dict[str, list[tuple[ast.AnnAssign, str]]]:
    """Of each class in a file its fields, each with the sentence after it; "" where there is none."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    by_class: dict[str, list[tuple[ast.AnnAssign, str]]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            after = [*node.body[1:], None]
            pairs = zip(node.body, after, strict=True)
            by_class[node.name] = [(item, _text(next_)) for item, next_ in pairs if isinstance(item, ast.AnnAssign)]
    return by_class


def _text(node: ast.stmt | None) -> str:
    """The words of a statement that is a string alone."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""
