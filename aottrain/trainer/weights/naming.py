"""Parts of a model by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from aottrain.config.schema import suggest
from aottrain.errors import ConfigError

_SHOWN = 8  # names, where none is near


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern names this, or a module that it is in: as a whole or by its last parts. `*` stands for any
    letters, dots included: "blocks.0", "attention", "*.bias"."""
    parts = name.split(".")
    above = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return any(fnmatchcase(part, pattern) or fnmatchcase(part, f"*.{pattern}") for part in above)


def chosen(names: Iterable[str], patterns: Sequence[str], key: str, what: str) -> list[str]:
    """The names that at least one pattern matches, in order. ConfigError: a pattern matches none; the nearest names are
    told. key: the setting that has the patterns; what: they choose from, as "parameter"."""
    known = list(names)
    mistakes = []
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            near = suggest(pattern, dict.fromkeys(part for name in known for part in _tails(name)))
            some = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
            mistakes.append(f"{key}={pattern}: matches no {what} of the model{near or f'; they are {some}'}")
    if mistakes:
        raise ConfigError(mistakes)
    return [name for name in known if any(matches(name, pattern) for pattern in patterns)]


def _tails(name: str) -> list[str]:
    """The name, the modules that it is in, and the last part of each."""
    parts = name.split(".")
    above = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return [*reversed(above), *reversed(parts)]
