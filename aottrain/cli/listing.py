"""`python -m aottrain ls`: what there is to choose from, each with its meaning, as its file or its module says it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from aottrain.cli.usage import defaults_of
from aottrain.config.choices import GLOBAL_GROUPS, TASKS
from aottrain.config.documentation import head_of, keys, sections
from aottrain.config.run import RunConfig
from aottrain.config.schema import suggest
from aottrain.errors import ConfigError

# What is a folder of files; tasks are modules.
GROUPS = ("recipe", "size", "adapter", "data", "kernel", "partition", "engine", "optimizer", "lr_schedule")


def ls(folders: Sequence[Path], groups: Sequence[str]) -> int:
    """Print the options of each group, or of those named: first ours, the default with a star, then those of further
    folders."""
    known = (*GROUPS, "task")
    if wrong := [name for name in groups if name not in known]:
        raise ConfigError([f"ls {name}: unknown group{suggest(name, known)} ({', '.join(known)})" for name in wrong])
    parts = [_group(folders, name) for name in known if name in (groups or known)]
    print("\n\n".join(parts))
    return 0


def _group(folders: Sequence[Path], group: str) -> str:
    if group == "task":
        meanings = {f"{name}*" if name == RunConfig().task else name: _meaning_of_task(name) for name in TASKS}
        purpose = keys()["task"].meaning
    else:
        paths = [path for folder in folders for path in sorted((folder / group).glob("*.yaml")) if path.is_file()]
        chosen = defaults_of(folders[0] / "config.yaml")[group]
        meanings = {f"{path.stem}*" if path.stem == chosen else path.stem: head_of(path) for path in paths}
        purpose = {**sections(), **GLOBAL_GROUPS}[group]
    width = max(map(len, meanings))
    lines = [f"  {name:<{width}}  {_first_sentence(text)}".rstrip() for name, text in meanings.items()]
    return "\n".join([f"{group}=  {purpose}", *lines])


def _meaning_of_task(name: str) -> str:
    """The first line of its module, which is read and not imported: it would import torch."""
    path = Path(__file__).resolve().parents[1] / "tasks" / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].removeprefix(f"task={name}: ").replace("\n", " ")


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "." if text else ""
