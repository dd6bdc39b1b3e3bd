"""Documents within a file: lines of JSON, and tables of Arrow (pyarrow, of the extra `aottrain[data]`)."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from aottrain.errors import ConfigError

BETWEEN = b"\n\n"  # documents, as files of a folder


def of_json_lines(content: bytes, file: Path, key: str) -> list[bytes]:
    """The texts under `key` of a file that has one JSON object a line; empty lines are passed over. ConfigError names
    the first line that is something else."""
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one; brackets in brackets without end
            raise ConfigError(f"data.path={file}: line {number:,} is no JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"data.path={file}: line {number:,} is no JSON object: {type(entry).__name__}")
        texts.append(_text_of(entry.get(key), f"data.path={file}: line {number:,}", key, entry))
    return [text for text in texts if text]


def _text_of(value: Any, where: str, key: str, names: Iterable[str]) -> bytes:
    """ConfigError: there is no text under this key."""
    if not isinstance(value, str):
        found = f"{type(value).__name__} under it" if key in names else f"the keys {', '.join(map(str, names))}"
        raise ConfigError(f"{where} has no text under data.key={key}, but {found}")
    return value.encode("utf-8", errors="surrogatepass")


def files_below(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Those below a folder whose names end so, in the order of their paths, without what is hidden, as `.git` is; links
    to folders are not followed. ConfigError: a folder cannot be read, or a link leads nowhere: files would be missing.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(f"data.path={error.filename}: cannot be read: {error.strerror}") from error

    found = []
    for folder, names, files in os.walk(root, onerror=refuse):
        names[:] = [name for name in names if not name.startswith(".")]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        found += existing([path for path in paths if path.suffix.lower() in suffixes])
    return sorted(found)


def existing(paths: Iterable[Path]) -> list[Path]:
    """Those that are files. ConfigError: one is a link that leads nowhere."""
    found = list(paths)
    if broken := next((path for path in found if path.is_symlink() and not os.path.exists(path)), None):
        raise ConfigError(f"data.path={broken}: is a link that leads nowhere ({os.readlink(broken)})")
    return [path for path in found if path.is_file()]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets` wrote this folder (`save_to_disk`)."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def of_table(path: Path, key: str) -> list[bytes]:
    """The texts in the column `key` of a .parquet file, or of the folder of a saved dataset (its split `train` where it
    has several). ConfigError: it cannot be read, or has no such column of text."""
    try:
        if path.is_dir():
            tables = _saved(path)
            columns = tables[0].column_names
        else:
            file = imported("pyarrow.parquet", f"data.path={path}").ParquetFile(path)
            columns = file.schema_arrow.names
            tables = [file.read(columns=[key])] if key in columns else []
        if key not in columns:
            raise ConfigError(f"data.path={path}: has no column data.key={key} (columns: {', '.join(columns)})")
        values = [value for table in tables for value in table[key].to_pylist()]
    except ConfigError:
        raise
    except Exception as error:  # arrow, JSON and the system each have their own
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"data.path={path}: cannot be read as a table: {first}") from error
    texts = (
        _text_of(value, f"data.path={path}: row {number:,}", key, columns) for number, value in enumerate(values, 1)
    )
    return [text for text in texts if text]


def _saved(folder: Path) -> list[Any]:
    """The tables of a saved dataset, in order: streams of Arrow, which its state.json names."""
    ipc = imported("pyarrow.ipc", f"data.path={folder}")
    if (splits := folder / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        if "train" not in names:
            raise ConfigError(f"data.path={folder}: has no split train ({', '.join(names)}); name the folder of one")
        folder = folder / "train"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    tables = []
    for entry in state["_data_files"]:
        with (folder / entry["filename"]).open("rb") as file, ipc.open_stream(file) as stream:
            tables.append(stream.read_all())
    return tables


def imported(name: str, what: str, install: str | None = None) -> ModuleType:
    """A library that only some data needs. ConfigError says what to install, and `what` needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = install or name
        raise ConfigError(f"{what}: needs {package}, which is not installed: pip install 'aottrain[data]'") from error
