"""What a planted bug is: how it is planted, and the ordinary tests that have to fail while it is.

`BUGS` has them all, once `tests.planted_bugs` modules are imported (`all_bugs`). A bug is planted in a process of its
own, which runs the tests that it names and ends: nothing has to be taken back.
"""

from __future__ import annotations
import __future__ as future_features

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
# What code of a plant raised by mistake, as a stale signature does: nothing follows from a test that fails then.
MISTAKES: list[str] = []
EDITS: list[tuple[str, Any, str]] = []  # name, function, and the text in it that a plant changes
_MISTAKES = (TypeError, AttributeError, NameError, ImportError, LookupError)


class Stale(Exception):
    """The text to edit is no longer there: the plant says nothing about today's code."""


@dataclass(frozen=True)
class Bug:
    """area: the part of the project in which it is. tests: node ids, each of which has to fail. quick: also run by the
    test suite, as one of a sample."""

    area: str
    name: str
    plant: Plant
    tests: tuple[str, ...]
    quick: bool = False


BUGS: dict[str, Bug] = {}


def all_bugs() -> dict[str, Bug]:
    for path in sorted(Path(__file__).parent.glob("bugs_*.py")):
        importlib.import_module(f"tests.planted_bugs.{path.stem}")
    return BUGS


class TestsOf:
    """Node ids of a file: `TestsOf("tests/a/test_b.py").some_case` is `tests/a/test_b.py::test_some_case`."""

    __test__ = False

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> str:
        return f"{self._path}::test_{name}"


def add(area: str, name: str, plant: Plant, tests: str | tuple[str, ...], quick: bool = False) -> None:
    assert name not in BUGS, name
    BUGS[name] = Bug(area, name, plant, (tests,) if isinstance(tests, str) else tests, quick)


class Area:
    """The ways to plant a bug in one part of the project."""

    def __init__(self, name: str) -> None:
        self.name = name

    def plant(self, name: str, tests: str | tuple[str, ...], plant: Plant, quick: bool = False) -> None:
        add(self.name, name, plant, tests, quick)

    def bug(self, name: str, tests: str | tuple[str, ...], quick: bool = False) -> Callable[[Plant], Plant]:
        """What the decorated function does."""

        def register(plant: Plant) -> Plant:
            add(self.name, name, plant, tests, quick)
            return plant

        return register

    def attribute(
        self, name: str, tests: str | tuple[str, ...], owner: Any, key: str, value: Any, quick: bool = False
    ) -> None:
        """Another value of one attribute, which is there now."""
        add(self.name, name, lambda patch: patch.setattr(owner, key, watched(value)), tests, quick)

    def edit(
        self,
        name: str,
        tests: str | tuple[str, ...],
        function: Any,
        old: str,
        new: str,
        quick: bool = False,
    ) -> None:
        """Another text of one function: `old`, which stands there once, becomes `new`."""
        EDITS.append((name, function, old))
        add(self.name, name, lambda patch: edit(function, old, new), tests, quick)


def watched(value: Any) -> Any:
    """The same function; what it raises by mistake is noted."""
    if not isinstance(value, FunctionType):
        return value

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return value(*args, **kwargs)
        except _MISTAKES as error:
            MISTAKES.append(repr(error))
            raise

    return call


def source_of(function: Any) -> tuple[Any, str]:
    """The function itself, of a property or a class's method, too, and its text."""
    function = inspect.unwrap(getattr(function, "fget", None) or getattr(function, "__func__", function))
    return function, textwrap.dedent(inspect.getsource(function))


def edit(function: Any, old: str, new: str) -> None:
    """Change a function where it is, so that all who hold it run the new text. Raises Stale where `old` is not once."""
    function, text = source_of(function)
    if text.count(old) != 1:
        raise Stale(f"{function.__qualname__} has {text.count(old)} times: {old}")
    tree = ast.parse(text.replace(old, new))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    if function.__code__.co_freevars:
        names = ", ".join(function.__code__.co_freevars)
        outer = ast.parse(f"def outer({names}):\n    return None").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body.insert(0, definition)
        tree.body[0] = outer
    flags = future_features.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(tree), inspect.getsourcefile(function) or "", "exec", flags=flags)
    found = _code_named(code, function.__name__)
    if found.co_freevars != function.__code__.co_freevars:
        raise Stale(f"{function.__qualname__} would close over other names")
    function.__code__ = found


def _code_named(code: Any, name: str) -> Any:
    for part in code.co_consts:
        if inspect.iscode(part):
            if part.co_name == name:
                return part
            if part.co_name == "outer":
                return _code_named(part, name)
    raise Stale(name)
