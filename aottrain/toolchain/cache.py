"""What is kept on disk between processes: where, and a table of measured numbers that many processes share."""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import platform
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from aottrain.errors import CompilerError
from aottrain.ir.settings.files import values_of

try:
    import fcntl
except ImportError:  # not a Unix: two processes that write at once may lose one another's numbers, never damage them
    fcntl = None  # type: ignore[assignment]


_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
_HINT = "what is compiled and measured is not kept for other processes; AOTTRAIN_CACHE_DIR names another folder"


def cache_folder() -> Path | None:
    """Where files are kept for other processes: $AOTTRAIN_CACHE_DIR, or aottrain in the user's cache. None, said once
    in a warning, where that cannot be had or others could write there: what lies in it is run."""
    folder = _named_folder()
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if problem := _distrust(folder, stat.S_ISDIR):
        say_once(f"{problem}: {_HINT}")
        return None
    return folder


def cache_obstacle() -> str:
    """Why nothing is kept on disk, in one line; empty where it is."""
    folder = cache_folder()
    named = _named_folder()
    if folder is None:
        problem = "there is no home folder" if named is None else _distrust(named, stat.S_ISDIR)
    else:
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"
    return f"{problem}: {_HINT}" if problem else ""


def private_folder() -> Path:
    """A folder that this process alone reads and writes, removed when it ends."""
    if _private and not _distrust(_private[0], stat.S_ISDIR):
        return _private[0]
    folder = Path(tempfile.mkdtemp(prefix="aottrain_"))  # its mode is 0700
    _private[:] = [folder]
    atexit.register(_remove, folder, os.getpid())
    return folder


def temporary_folder_error(error: OSError) -> CompilerError:
    """What is said where nothing can be written to `private_folder`."""
    told = f"a file of the temporary folder cannot be written: {error.strerror or error}"
    return CompilerError(f"{told} (TMPDIR names another folder)")


_private: list[Path] = []


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork leaves it to the process that made it
        shutil.rmtree(folder, ignore_errors=True)


def is_own(file: Path) -> bool:
    """Whether the file and its folder are this user's and nobody else could have written them. Asked before each
    load: a checksum says that a file is whole, not whose it is."""
    return not (_distrust(file.parent, stat.S_ISDIR) or _distrust(file, stat.S_ISREG))


def _distrust(path: Path, is_kind: Callable[[int], bool]) -> str:
    """Why what lies there may be another user's work; empty where it is this user's alone. A file must be no link."""
    try:
        status = os.stat(path) if is_kind is stat.S_ISDIR else os.lstat(path)
    except OSError as error:
        return f"{path} cannot be used ({error.strerror})"
    if not is_kind(status.st_mode):
        return f"{path} is no {'folder' if is_kind is stat.S_ISDIR else 'plain file'}"
    if hasattr(os, "geteuid"):  # elsewhere modes say nothing
        if status.st_uid != os.geteuid():
            return f"{path} belongs to another user (number {status.st_uid})"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _named_folder() -> Path | None:
    named = os.environ.get("AOTTRAIN_CACHE_DIR")
    if named:
        return Path(os.path.abspath(named))
    home = os.path.expanduser("~")
    return Path(home, ".cache", "aottrain") if os.path.isabs(home) else None  # "~" where nobody has one


def say_once(text: str) -> None:
    """A warning that a process gives once, whatever the filters of warnings say of places."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def was_said(text: str) -> bool:
    """Whether a warning of `say_once` had this in it, so that it need not be said again."""
    return any(text in warned for warned in _warned)


_warned: set[str] = set()


@cache
def processor() -> str:
    """What -march=native depends on: the instruction sets of this processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.machine() + platform.processor()


def is_number_or_group(value: object) -> bool:
    """Whether a table may have this value, where no more is known of its own."""
    return isinstance(value, dict) or _is_number(value)


class Table:
    """Numbers, or groups of them, by text, in memory and in one JSON file. Of two processes that measure the same thing
    the first to write is believed by both, so that what is decided is the same everywhere on the machine.

    A file that is missing, damaged or not writable only costs measuring again; and so does a value that is not of the
    form of its table.
    """

    def __init__(self, path: Path, is_sound: Callable[[Any], bool] = is_number_or_group) -> None:
        self.path, self._is_sound = path, is_sound
        self._values = _read(path, is_sound)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def add(self, values: Mapping[str, Any], *, replacing: bool = False) -> None:
        """Keep new ones; those that another process has written meanwhile replace them, unless these are `replacing`
        what was found to be wrong."""
        self._values.update(values)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                merged = _read(self.path, self._is_sound) | (dict(values) if replacing else {})
                self._values.update(merged)
                if replacing or any(key not in merged for key in values):
                    _write(self.path, {**values, **merged})


@cache
def _table(path: Path, is_sound: Callable[[Any], bool]) -> Table:
    return Table(path, is_sound)


def has_fields(value: object, fields: Mapping[str, type]) -> bool:
    """Whether a value is a group of just these, each of its type."""
    return isinstance(value, dict) and {name: type(each) for name, each in value.items()} == fields


def table(name: str, is_sound: Callable[[Any], bool] = is_number_or_group) -> Table:
    """The one table of this name in this process. is_sound: whether a value that the file has can be one of its own."""
    return _table((cache_folder() or private_folder()) / f"{name}.json", is_sound)


def forget_tables() -> None:
    """Read the files again at the next use."""
    _table.cache_clear()


def _read(path: Path, is_sound: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        values = values_of(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if is_sound(value)}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type]


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        written.write_text(json.dumps(values, indent=0, sort_keys=True), encoding="utf-8")
        os.replace(written, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError, also where something else than a file has this name: opening a pipe may never return."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | _AT_ONCE, 0o666), "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
