"""Where an op of the user's program comes from: module, source line, checkpointed regions."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx

import aottrain
from aottrain.ir.graph import ModuleStack


class SourceLocation(NamedTuple):
    """Where an op comes from."""

    modules: ModuleStack = ()
    """Whose calls it is within."""
    source: str = ""
    """As `file.py:line`."""
    regions: tuple[int, ...] = ()
    """Numbers of the checkpointed regions around it."""


_noted = threading.local()


def noted_location() -> SourceLocation | None:
    return getattr(_noted, "location", None)


@contextmanager
def written_at(location: SourceLocation) -> Iterator[None]:
    """Inside, this thread's ops come from there: for what runs a graph of the user's code in its stead."""
    before = noted_location()
    _noted.location = location
    try:
        yield
    finally:
        _noted.location = before


def _owners() -> dict[str, bool]:
    """Folders of code, the innermost first: whether what lies in them is the user's. Told by where the packages lie: a
    clone, a project or a home may have any name, "torch" and "aottrain" too."""
    python = sysconfig.get_path("stdlib")
    users = [os.path.join(python, name) for name in ("site-packages", "dist-packages")]
    users += [os.path.join(path, "recipes") for path in aottrain.__path__]  # a wheel carries them inside
    others = [python, *torch.__path__, *aottrain.__path__]
    folders = {os.path.join(path, ""): path in users for path in [*others, *users]}
    return dict(sorted(folders.items(), key=lambda item: -len(item[0])))


_OWNERS = _owners()
_TYPED = ("<stdin>", "<python-input", "<ipython-input", "<doctest")


def _is_users(file: str) -> bool:
    """Whether a code's file is neither torch's, nor ours, nor Python's own. Code without one ("<frozen runpy>",
    "<string>") is generated, unless it was typed at a prompt."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    return next((users for folder, users in _OWNERS.items() if file.startswith(folder)), True)


def user_line() -> str:
    """The innermost line of the stack that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        if line := line_at(frame.f_code.co_filename, frame.f_lineno):
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def raised_at(error: BaseException) -> str:
    """The innermost line of the program that an error came from, or one that it was raised for."""
    line, traceback = "", error.__traceback__
    while traceback is not None:
        line = line_at(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno) or line
        traceback = traceback.tb_next
    source = getattr(error, "source", "")
    if isinstance(source, str) and source:
        return source
    return line if line or error.__cause__ is None else raised_at(error.__cause__)


def tell_source(error: BaseException, source: str) -> None:
    """Note the line of the program that an error is about, where none is noted."""
    if not getattr(error, "source", ""):
        error.source = source  # type: ignore[attr-defined]


def line_of(code: CodeType) -> str:
    """Where a function begins."""
    return line_at(code.co_filename, code.co_firstlineno)


def line_at(path: str, number: int) -> str:
    """As "file.py:line"; "" where it is torch's or ours."""
    return f"{os.path.basename(path)}:{number}" if _is_users(path) else ""


_VARIABLE = re.compile(r"^[LG]\['(\w+)'\]")
_ITEM = re.compile(r"(?:\._modules)?\['?(\w+)'?\]")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def location_of(node: fx.Node) -> SourceLocation:
    """What TorchDynamo notes on a node of its graph. Its paths start at a variable: `L['self'].blocks.0`."""
    stack: dict[Any, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    modules = []
    for key, (text, _) in stack.items():
        number = str(key).rpartition("@")[2] if "@" in str(key) else ""
        modules.append((_path(str(text)), int(number) if number.isdigit() else 0))
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    users = [f"{os.path.basename(file)}:{line}" for file, line in lines if _is_users(file)]
    return SourceLocation(tuple(modules), users[-1] if users else "")


def first_line(graph: fx.Graph) -> str:
    """The first line of the program that is in a graph of TorchDynamo's."""
    return next((source for node in graph.nodes if (source := location_of(node).source)), "")


def _path(text: str) -> str:
    """`blocks.0` of `L['self'].blocks.0` and of `L['self']._modules['blocks']._modules['0']`."""
    variable = _VARIABLE.match(text)
    rest = text[variable.end() :] if variable else text
    names = _ITEM.sub(r".\1", rest).strip(".")
    start = "" if variable is None or variable[1] == "self" else variable[1]
    return ".".join(name for name in (start, names) if name)
