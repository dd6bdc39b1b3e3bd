"""From plain dictionaries to frozen dataclasses, strictly: every mistake is collected, instead of the first one raised.

A field's annotation is its type; its metadata, written with `setting`, is its range. Nothing is converted silently:
`"3"` is not a whole number, `true` is not `1`, `10.0` steps is not `10` steps. The only widening is int -> float, and
int -> str for names such as `logger.run_name=7`, which the command line reads as a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_NO_INTEGER = 2**63  # the first number that torch has no place for


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One wrong setting."""

    key: str
    """Its full dotted name, or a file."""
    text: str
    """What is allowed."""
    value: str | None = None
    """What was given."""

    def __str__(self) -> str:
        name = self.key if self.value is None else f"{self.key}={self.value}"
        return " ".join(f"{name}: {self.text}".split())

    @classmethod
    def from_line(cls, line: str) -> Mistake:
        """Of `key=value: what is allowed`, as other parts write their mistakes."""
        name, _, text = line.partition(": ")
        key, _, value = name.partition("=")
        return cls(key, text, value or None)


@dataclasses.dataclass(frozen=True)
class Range:
    """What values a field allows."""

    low: float | None = None
    """Allowed itself, as `high` is."""
    high: float | None = None
    above: float | None = None
    """Not allowed itself, as `below` is not."""
    below: float | None = None
    one_of: tuple[str, ...] = ()
    form: str = ""
    """In words, for values whose form is checked elsewhere."""

    @property
    def takes_path(self) -> bool:
        return re.search(r"\bpath\b", self.form) is not None

    def admits(self, value: Any) -> bool:
        if self.one_of:
            return value in self.one_of
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.one_of:
            return "one of " + ", ".join(self.one_of)
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        signs = ((">=", self.low), (">", self.above), ("<=", self.high), ("<", self.below))
        return " and ".join(f"{sign} {limit}" for sign, limit in signs if limit is not None)


def setting(default: Any, **limits: Any) -> Any:
    """A dataclass field with a default and the limits that `Range` names."""
    return dataclasses.field(default=default, metadata={"range": Range(**limits)})


def show(value: Any) -> str:
    """A value as the person would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    return str(value)


def command_line(arguments: Iterable[str]) -> str:
    """The command with these arguments, as a shell takes it."""
    return " ".join([os.environ.get("AOTTRAIN_COMMAND", "python -m aottrain"), *map(shlex.quote, arguments)])


def quoted(text: str) -> str:
    """Between double quotes, as Hydra's grammar has them: a backslash counts only before a quote."""
    return '"{}"'.format(re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + (found[2] and '\\"'), text))


def naming(key: str, directory: str | Path) -> str:
    """`key=directory` for a command that is typed in this folder."""
    near = os.path.relpath(directory)
    path = str(Path(directory).absolute()) if near.startswith("..") else near
    is_plain = re.fullmatch(r"[\w./+-]+", path)
    return f"{key}={path if is_plain else quoted(path)}"


def no_section(key: str, value: Any, names: Sequence[str] = ()) -> Mistake:
    """Of a value that is to be keys of its own; names: these, where they are known."""
    listed = ", ".join(names) or f"{key}.key=value"
    return Mistake(key, f"is a section, give its keys one by one: {listed}", show(value))


def build(cls: type, values: Any, prefix: str = "") -> tuple[Any, list[Mistake]]:
    """An instance of the dataclass `cls` from a dictionary, and every mistake found in it.

    A wrong value is replaced by the field's default, so that checks across fields can look for more mistakes; use the
    instance only if there are none. `prefix` is the section's dotted name. Fields of type `Any` are not checked.
    """
    if not isinstance(values, Mapping):
        return cls(), [no_section(prefix, values, [item.name for item in dataclasses.fields(cls)])]
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls) if item.init}
    unknown = {key: value for key, value in values.items() if key not in fields}
    mistakes = [_unknown(join(prefix, key), value, fields, prefix) for key, value in unknown.items()]
    arguments: dict[str, Any] = {}
    for name in fields.keys() & values.keys():
        key, hint = join(prefix, name), hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[name], within = build(hint, values[name], key)
            mistakes += within
            continue
        try:
            arguments[name] = _checked(values[name], hint, fields[name].metadata.get("range", Range()))
        except ValueError as error:
            mistakes.append(Mistake(key, str(error), show(values[name])))
    return cls(**arguments), mistakes


def join(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every entry that is not itself a (non-empty) dictionary."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, join(prefix, key))
        else:
            yield join(prefix, key), value


def find(values: Any, key: str) -> tuple[bool, list[str], str]:
    """Whether the dotted key is there; if not, the names at the place where it ends to be, and that place's name."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            names = [str(name) for name in values] if isinstance(values, Mapping) else []
            return False, names, ".".join(parts[:depth])
    return True, [], ""


def suggest(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean x?` for the known name nearest to `word`, in all or in the part after its last dot; or ""."""
    names = list(candidates)
    last = word.rsplit(".", 1)[-1]
    by_last: dict[str, list[str]] = {}
    for name in names:
        by_last.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    near = (
        difflib.get_close_matches(word, names, n=1, cutoff=0.85)
        or by_last.get(last, [])[:3]
        or [by_last[close][0] for close in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
        or difflib.get_close_matches(word, names, n=1, cutoff=0.95 if "." in word else 0.6)
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _unknown(key: str, value: Any, fields: Iterable[str], prefix: str) -> Mistake:
    names = [join(prefix, name) for name in fields]
    where = f"keys of {prefix}" if prefix else "keys"
    options = ", ".join(name.rsplit(".", 1)[-1] for name in names)
    return Mistake(key, f"unknown key{suggest(key, names)} ({where}: {options})", show(value))


def _checked(value: Any, hint: Any, limits: Range) -> Any:
    """The value in the hinted type, or ValueError with a sentence that says what is allowed."""
    kinds: Sequence[Any] = typing.get_args(hint) if _is_union(hint) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(item for item in kinds if item is not type(None))
    if kind is Any:
        return value
    allowed = allowed_values(hint, limits)
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, (list, tuple)) or not all(_fits(entry, item, limits) for entry in value):
            raise ValueError(f"must be {allowed}")
        return tuple(_convert(entry, item) for entry in value)
    if kind is int and limits.below is None and isinstance(value, int) and abs(value) >= _NO_INTEGER:
        raise ValueError(f"must be {allowed}, less than {_NO_INTEGER}")
    if value == "" and limits.takes_path:  # as of a shell's variable without a value; it would be the current folder
        raise ValueError(f"must be {allowed}, not empty")
    if not _fits(value, kind, limits):
        near = suggest(value, limits.one_of) if isinstance(value, str) else ""
        raise ValueError(f"must be {allowed}{near}")
    return _convert(value, kind)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value: Any, kind: Any, limits: Range) -> bool:
    if kind is Any:
        return True
    accepted = {float: (int, float), str: (str, int)}.get(kind, (typing.get_origin(kind) or kind,))
    if not all(isinstance(item, type) for item in accepted):  # a form of a recipe's own, as Literal is: it checks it
        return True
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        return False
    if kind is float and not abs(value) <= sys.float_info.max:  # a whole number may be larger
        return False
    return limits.admits(_convert(value, kind))


def _convert(value: Any, kind: Any) -> Any:
    return kind(value) if kind in (float, str) else value


def allowed_values(hint: Any, limits: Range) -> str:
    """What a field of this type and range takes, in words."""
    kinds: Sequence[Any] = typing.get_args(hint) if _is_union(hint) else (hint,)
    kind = next(item for item in kinds if item is not type(None))
    return _describe(kind, limits) + (" or null" if type(None) in kinds else "")


def _describe(kind: Any, limits: Range) -> str:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        names = ", ".join(limits.one_of) if limits.one_of else "names"
        numbers = {float: "numbers", int: "whole numbers"}.get(item)
        inner = limits.form or (f"{numbers} {limits}" if numbers else names)
        return f"a list of {inner}, written [a,b]"
    if limits.one_of or limits.form:
        return limits.form or str(limits)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "keys of its own"}
    name = names.get(kind, str(kind))
    return " ".join(part for part in (name, str(limits)) if part)
