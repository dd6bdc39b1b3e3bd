"""Documents within a file: lines of JSON, and tables read by the library `datasets` (the extra `aottrain[data]`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from aottrain.errors import ConfigError

BETWEEN = b"\n\n"  # documents, as files of a folder


def of_json_lines(content: bytes, file: Path, key: str) -> bytes:
    """The texts under `key` of a file that has one JSON object a line; empty lines are passed over. ConfigError names
    the first line that is something else."""
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise ConfigError(f"data.path={file}: line {number:,} is no JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"data.path={file}: line {number:,} is no JSON object: {type(entry).__name__}")
        texts.append(_text_of(entry.get(key), f"data.path={file}: line {number:,}", key, entry))
    return BETWEEN.join(text for text in texts if text)


def _text_of(value: Any, where: str, key: str, names: Iterable[str]) -> bytes:
    """ConfigError: there is no text under this key."""
    if not isinstance(value, str):
        found = f"{type(value).__name__} under it" if key in names else f"the keys {', '.join(map(str, names))}"
        raise ConfigError(f"{where} has no text under data.key={key}, but {found}")
    return value.encode("utf-8", errors="surrogatepass")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote this folder (`save_to_disk`)."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def of_table(path: Path, key: str) -> bytes:
    """The texts in the column `key` of a .parquet file, or of the folder of a saved dataset (its split `train` where it
    has several). ConfigError: it cannot be read, or has no such column of text."""
    datasets = imported("datasets", f"data.path={path}")
    try:
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
            table = table["train"] if "train" in getattr(table, "keys", tuple)() else table
            columns, rows = table.column_names, table
        else:
            parquet = importlib.import_module("pyarrow.parquet")
            columns, rows = parquet.read_schema(path).names, None
        if isinstance(columns, dict) or key not in columns:
            found = f"splits: {', '.join(columns)}" if isinstance(columns, dict) else f"columns: {', '.join(columns)}"
            raise ConfigError(f"data.path={path}: has no column data.key={key} ({found})")
        values = rows[key] if rows is not None else parquet.read_table(path, columns=[key])[key].to_pylist()
        return BETWEEN.join(
            text
            for number, value in enumerate(values, 1)
            if (text := _text_of(value, f"data.path={path}: row {number:,}", key, columns))
        )
    except ConfigError:
        raise
    except Exception as error:  # arrow, datasets and the system each have their own
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"data.path={path}: cannot be read as a table: {first}") from error


def imported(name: str, what: str, install: str | None = None) -> ModuleType:
    """A library that only some data needs. ConfigError says what to install, and `what` needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = install or name
        raise ConfigError(f"{what}: needs {package}, which is not installed: pip install 'aottrain[data]'") from error
