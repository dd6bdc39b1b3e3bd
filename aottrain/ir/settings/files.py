"""Files of text and of plain values, whoever wrote them."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MOST_VALUES = 1_000_000
"""That a file of YAML may hold: the largest of ours hold a few hundred."""


def text_of(path: Path) -> str:
    """Of a file. OSError where it is none: a device or a pipe may be read for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file")
    return path.read_text(encoding="utf-8", errors="replace")


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Whole or not at all, and on the disk when this returns: a rename may get there before the data it names. write:
    is given the file that then takes the place of `path`."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a link of another's would lead elsewhere
    try:
        write(temporary)
        if not temporary.is_symlink():
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_text_whole(path: Path, text: str) -> None:
    """The same of a text: what was there stays where the disk is full. A device or a pipe (/dev/stdout) is written to
    as it is. OSError names `path`."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Rows as a file of comma-separated values has them, below a line of the columns' names."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue()


def printable(text: str, kept: str = "\n\t") -> str:
    """Text that somebody else wrote, for a terminal: what would steer it (control bytes, writing directions) as
    escapes, but for the characters in `kept`."""
    return "".join(
        character if character.isprintable() or character in kept else character.encode("unicode_escape").decode()
        for character in text
    )


def yaml_of(path: Path) -> str:
    """The text of a file of YAML, once it is known to hold no more values than a person writes.

    An alias stands for what it names, so a short file can hold more values than any memory. OSError: it is no file, or
    cannot be read. ValueError: it holds too many values, or an alias within what it names. yaml.YAMLError: it is none.
    """
    import yaml  # which files of JSON do not need

    text = text_of(path)
    stream = io.StringIO(text)
    stream.name = str(path)  # which YAML's errors begin with
    root = yaml.compose(stream, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if root is not None and _num_values(root, {}) > MOST_VALUES:
        raise ValueError("has aliases that stand for too many values")
    return text


def _num_values(node: Any, known: dict[int, float]) -> float:
    """Aliases counted as what they name; infinite where one is within that."""
    if isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # met again before it is known: within itself
        items = itertools.chain.from_iterable(node.value) if node.id == "mapping" else node.value
        known[id(node)] = 1 + sum(_num_values(item, known) for item in items)
    return known[id(node)]


def values_of(path: Path) -> Any:
    """What a file of JSON holds. OSError: it is none, or cannot be read. ValueError: it holds something else, what is
    nested too deeply to be read, or a whole number that no float holds."""
    text = text_of(path)
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError("has a number that is too large")
    return int(digits)
