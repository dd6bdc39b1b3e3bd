"""Between Hydra's values and plain ones: overrides as text, configurations as dictionaries, errors as sentences."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from aottrain.cli.preflight import unwritable
from aottrain.config.choices import GLOBAL_GROUPS
from aottrain.config.schema import Mistake, join, quoted, show

# Sections whose keys another package defines, which checks them: Hydra knows none of them.
FOREIGN = ("recipe.model.config.", "sweep.options.")
# What Hydra's entry points are given: 1.3 takes the defaults of 1.1, and warns, where it is not named; later ones have
# their own alone, and warn where one is named.
HYDRA_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
# Keys whose value is any text.
FREE_TEXT = ("generate.prompt",)


def text_of(item: Override) -> str:
    return str(item.input_line)


def as_hydra_takes_it(text: str) -> str:
    """An override, with the sign by which Hydra adds a key that it does not know, or chooses nothing of a group."""
    group, _, value = text.partition("=")
    if value == "null" and group in GLOBAL_GROUPS:
        return f"~{group}"
    return f"++{text}" if text.startswith(FOREIGN) else text


def resolved(composed: DictConfig) -> tuple[dict[str, Any], list[Mistake]]:
    """Our part of the configuration as plain values, and a mistake for each value that refers to nothing."""
    if "hydra" in composed:  # where `${hydra:...}` is looked up
        HydraConfig.instance().set_config(composed)
    mistakes: list[Mistake] = []

    def plain(node: Any, prefix: str) -> Any:
        if isinstance(node, ListConfig):
            return [plain(item, prefix) for item in node]
        if not isinstance(node, DictConfig):
            return node
        values = {}
        for key in node:
            name = join(prefix, key)
            try:
                if name != "hydra":
                    values[key] = plain(node[key], name)
            except OmegaConfBaseException as error:
                mistakes.append(Mistake(name, one_line(error)))
        return values

    return plain(composed, ""), mistakes


def found(composed: DictConfig | None, key: str) -> Any:
    """What stands under a key; None where it refers to nothing, which is said where all values are looked at."""
    with suppress(OmegaConfBaseException):
        return None if composed is None else OmegaConf.select(composed, key)
    return None


def dangling(composed: DictConfig, names: Iterable[str]) -> list[Mistake]:
    """A mistake for each of these keys of Hydra's whose value refers to nothing. What refers to a value that comes
    later, as a job's number, is none. Ours are looked at by `resolved`."""
    HydraConfig.instance().set_config(composed)
    mistakes = []
    for key in names:
        try:
            OmegaConf.select(composed, key)
        except InterpolationKeyError as error:
            mistakes.append(Mistake(key, one_line(error)))
        except OmegaConfBaseException:
            continue
    return mistakes


def directory_of(composed: DictConfig, key: str) -> tuple[str, list[Mistake]]:
    """The output directory that `key` names, and what keeps it from being made."""
    HydraConfig.instance().set_config(composed)
    try:
        value = OmegaConf.select(composed, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return "", [Mistake(key, one_line(error))]
    path = "" if value is None else str(value)
    if not path.strip():
        return "", [Mistake(key, "must name a folder; . is the current one", show(value))]
    return os.path.abspath(path), unwritable(key, path)


def unnamed_log(composed: DictConfig) -> list[Mistake]:
    """That the log cannot have the name of the job."""
    key = "hydra.job.name"
    name = None
    with suppress(OmegaConfBaseException):  # said of whatever cannot be resolved
        name = OmegaConf.select(composed, key)
    is_name = name is None or not {"/", "\0"} & {*str(name)}
    return [] if is_name else [Mistake(key, "names the log, a file in the run's folder: it has no /", show(name))]


def one_line(error: BaseException) -> str:
    """What an error of Hydra, OmegaConf or YAML says, without advice that does not hold here."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnicodeDecodeError):
            return f"its file is not UTF-8: {cause.reason} at byte {cause.start:,}"
        mark = getattr(cause, "problem_mark", None)
        if mark is not None:
            return f"{mark.name}, line {mark.line + 1}: not valid YAML: {getattr(cause, 'problem', '')}"
        cause = cause.__cause__ or cause.__context__
    text = str(error) or str(error.__cause__ or type(error).__name__)
    if text.startswith("Error merging override") and error.__cause__:  # which says the override once more, not why
        text = str(error.__cause__)
    dropped = ("See https://", "To append to your config", "full_key:", "object_type=")
    return " ".join(line for line in text.splitlines() if not line.strip().startswith(dropped))


def verbatim(text: str) -> str:
    """An argument whose value is any text, quoted as Hydra wants it, so that blanks at its ends, commas and brackets
    are kept; as it is where the value is quoted already or null."""
    key, equals, value = text.partition("=")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return text if not equals or key not in FREE_TEXT or is_quoted or value == "null" else f"{key}={quoted(value)}"


def at_home(text: str) -> str:
    """An argument whose value begins with the person's own folder, `~/`: shells put that in for words of their own
    alone, and Hydra takes the sign for another thing."""
    key, _, value = text.partition("=")
    is_plain = value.startswith("~/") and not set(value) & set(",'\"")
    return f"{key}={quoted(os.path.expanduser(value))}" if is_plain else text


def override(key: str, value: Any) -> str:
    """`key=value` as a person would type it; text is quoted, so that none of it is taken for a number or a list."""

    def written(item: Any) -> str:
        if isinstance(item, str):
            return quoted(item)
        return "[" + ",".join(map(written, item)) + "]" if isinstance(item, list) else show(item)

    return f"{key}={written(value)}"


def is_within(key: str, name: str) -> bool:
    """Whether the dotted key is `name` or lies in the section of that name."""
    return key == name or key.startswith(f"{name}.")


def value_at(values: Any, key: str) -> Any:
    """What stands under a dotted key that is there."""
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values
