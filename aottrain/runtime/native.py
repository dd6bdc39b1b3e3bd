"""C++ source to a loaded shared object, with the machine's own compiler; None where there is none.

Objects are kept on disk by content (source, flags, compiler, processor), so a warm start compiles nothing. Concurrent
processes are safe: each writes a file of its own and renames it into place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from aottrain.runtime.cache import cache_folders, processor

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-shared", "-fPIC")
_TIMEOUT_S = 120


@cache
def load(source: str, more_flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The shared object of a self-contained C++ source; None where no compiler works on this machine."""
    compiler = find_compiler()
    if compiler is None:
        return None
    for folder in cache_folders():
        try:
            return ctypes.CDLL(str(_build(compiler, source, folder, more_flags)))
        except (OSError, subprocess.SubprocessError):
            continue  # a folder that cannot be written, or a damaged object: the next one is tried
    return None


@cache
def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, or the first of g++, clang++ and c++."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _build(compiler: str, source: str, folder: Path, more_flags: tuple[str, ...]) -> Path:
    key = hashlib.sha256("\0".join([source, *_FLAGS, *more_flags, compiler, processor()]).encode()).hexdigest()[:24]
    target = folder / f"{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        text, built = Path(scratch) / "program.cpp", Path(scratch) / "program.so"
        text.write_text(source)
        command = [compiler, *_FLAGS, *more_flags, str(text), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        os.replace(built, target)
    return target
