"""C++ source to a loaded shared object, with the machine's own compiler; None where there is none.

Objects are kept on disk by content (source, flags, compiler, processor), so a warm start compiles nothing. Behind each
stands the checksum of its bytes: one that is damaged or another program's is made anew, not loaded. Concurrent
processes are safe: each writes a file of its own and renames it into place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aottrain.runtime.cache import cache_folders, processor

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-shared", "-fPIC")
_TIMEOUT_S = 120


class Source(NamedTuple):
    """A self-contained C++ text, and what its compiler is told beside the flags of all."""

    text: str
    flags: tuple[str, ...] = ()


class Library(NamedTuple):
    """A loaded object. compiled: whether it was made now, not found in memory or on disk."""

    functions: ctypes.CDLL
    compiled: bool


_loaded: dict[Source, Library | None] = {}


def load(text: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The shared object of a self-contained C++ source; None where no compiler works on this machine."""
    library = load_all([Source(text, flags)])[0]
    return None if library is None else library.functions


def load_all(sources: Sequence[Source]) -> list[Library | None]:
    """As `load`, for several at a time: a compiler for each processor."""
    missing = [source for source in dict.fromkeys(sources) if source not in _loaded]
    if not missing:
        return [_loaded[source] for source in sources]
    with ThreadPoolExecutor(min(len(missing), _num_processors())) as pool:
        new = dict(zip(missing, pool.map(_load, missing), strict=True))
    for source, library in new.items():
        _loaded[source] = None if library is None else library._replace(compiled=False)
    return [new[source] if source in new else _loaded[source] for source in sources]


@cache
def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, or the first of g++, clang++ and c++."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _num_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load(source: Source) -> Library | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    key = "\0".join([source.text, *_FLAGS, *source.flags, compiler, processor()])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    for folder in cache_folders():
        target = folder / name
        with suppress(OSError):
            if _is_whole(target):
                return Library(ctypes.CDLL(str(target)), False)
        with suppress(OSError, subprocess.SubprocessError):  # a folder that cannot be written: the next one is tried
            _build(compiler, source, target)
            return Library(ctypes.CDLL(str(target)), True)
    return None


def _build(compiler: str, source: Source, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        text, built = Path(scratch) / "program.cpp", Path(scratch) / "program.so"
        text.write_text(source.text, encoding="utf-8")
        command = [compiler, *_FLAGS, *source.flags, str(text), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        checksum = hashlib.sha256(built.read_bytes()).digest()
        with open(built, "ab") as file:  # loaders look at what an object's own header names, not at its end
            file.write(checksum)
        os.replace(built, target)


def _is_whole(target: Path) -> bool:
    """Whether the object's bytes are those that were written: loading the first half of one ends the process."""
    try:
        content = target.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]
