"""Which test runs which block of which module: what a mutant of that block has to be shown to.

A block is a function's body or the body of a branch or a loop in it, named by module and first line. As modules are
imported, a note is put at the start of each; a pytest plugin collects the notes of each test.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

ROOTS = ("aottrain", "recipes")
# Their functions are Triton's source: a note in them would be compiled too.
LEFT_OUT = "/ops/triton/"
_NOTE = "__block_was_run__"
_BODIES = ("body", "orelse", "finalbody")


def blocks(tree: ast.Module) -> Iterator[tuple[int, list[ast.stmt]]]:
    """(first line, statements) of every block inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _blocks_in(function)


def _blocks_in(node: ast.AST) -> Iterator[tuple[int, list[ast.stmt]]]:
    for name in _BODIES:
        body = getattr(node, name, None)
        if isinstance(body, list) and body:
            yield body[0].lineno, body
            for statement in body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from _blocks_in(statement)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from _blocks_in(part)


def block_of(tree: ast.Module, line: int) -> int | None:
    """The first line of the innermost block with this line; None outside of functions."""
    around = [first for first, body in blocks(tree) if first <= line <= (body[-1].end_lineno or first)]
    return max(around, default=None)


def _noted(tree: ast.Module, name: str) -> ast.Module:
    for first, body in list(blocks(tree)):
        note = ast.parse(f"{_NOTE}(({name!r}, {first}))").body[0]
        for part in ast.walk(note):
            ast.copy_location(part, body[0])
        starts = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        body.insert(1 if starts else 0, note)
    return ast.fix_missing_locations(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(_noted(tree, fullname), path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] not in ROOTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if (
            spec is not None
            and spec.origin
            and Path(spec.origin).suffix == ".py"
            and LEFT_OUT not in Path(spec.origin).as_posix()
        ):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class Recorder:
    """A pytest plugin: a line of JSON for each test, with what it ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: set[tuple[str, int]] = set()
        self.passed = True
        setattr(builtins, _NOTE, self.seen.add)
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.start, self.passed = time.process_time(), True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed = self.passed and report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        ran: dict[str, list[int]] = {}
        for module, line in sorted(self.seen):
            ran.setdefault(module, []).append(line)
        entry = {"test": nodeid, "s": round(time.process_time() - self.start, 3), "ran": ran, "passed": self.passed}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self.seen.clear()


class Coverage:
    """What `Recorder` wrote: the tests that run a block, the cheapest first."""

    def __init__(self, folder: Path) -> None:
        self.tests: dict[tuple[str, int], list[str]] = {}
        self.seconds: dict[str, float] = {}
        for path in sorted(folder.glob("*.cover")):
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["passed"]:
                    self.seconds[entry["test"]] = entry["s"]
                    for module, first in ((module, first) for module, ran in entry["ran"].items() for first in ran):
                        self.tests.setdefault((module, first), []).append(entry["test"])

    def of_block(self, module: str, first: int) -> list[str]:
        return sorted(self.tests.get((module, first), ()), key=lambda test: (self.seconds[test], test))

    def of_module(self, module: str) -> list[str]:
        found = {test for (name, _), tests in self.tests.items() if name == module for test in tests}
        return sorted(found, key=lambda test: (self.seconds[test], test))
