"""What is kept on disk between processes: where, and a table of measured numbers that many processes share."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: two processes that write at once may lose one another's numbers, never damage them
    fcntl = None  # type: ignore[assignment]


def cache_folders() -> list[Path]:
    """Where to keep files, best first: $AOTTRAIN_CACHE_DIR or the user's cache, then a folder of this process."""
    home = os.environ.get("AOTTRAIN_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "aottrain")
    return [Path(home), Path(tempfile.gettempdir()) / f"aottrain_{os.getpid()}"]


@cache
def processor() -> str:
    """What -march=native depends on: the instruction sets of this processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.machine() + platform.processor()


class Table:
    """Numbers by text, in memory and in one JSON file. Of two processes that measure the same thing the first to write
    is believed by both, so that what is decided from the numbers is the same everywhere on the machine.

    A file that is missing, damaged or not writable only costs measuring again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = _read(path)

    def get(self, key: str) -> float | None:
        return self._values.get(key)

    def add(self, values: Mapping[str, float]) -> None:
        """Keep new numbers; those that another process has written meanwhile replace them."""
        self._values.update(values)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                known = _read(self.path)
                self._values.update(known)
                if any(key not in known for key in values):
                    _write(self.path, {**values, **known})


@cache
def _table(path: Path) -> Table:
    return Table(path)


def table(name: str) -> Table:
    """The one table of this name in this process."""
    return _table(cache_folders()[0] / f"{name}.json")


def forget_tables() -> None:
    """Read the files again at the next use."""
    _table.cache_clear()


def _read(path: Path) -> dict[str, float]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type]


def _write(path: Path, values: Mapping[str, float]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        written.write_text(json.dumps(values, indent=0, sort_keys=True), encoding="utf-8")
        os.replace(written, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "wb") as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
