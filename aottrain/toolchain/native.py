"""C++ source to a loaded shared object, with the machine's own compiler.

Objects are kept on disk by content (source, flags, processor, compiler and its version), so a warm start compiles
nothing. Behind each stands a checksum of its name and bytes: one that is damaged or another program's is made anew, not
loaded, and so is one that another user could have written. Concurrent processes are safe: each writes a file of its own
and renames it into place.

A compiler is believed to work once it has made one small program that runs. One that fails or hangs is waited for once
in a process; then it counts as none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from aottrain.counted import tell
from aottrain.errors import CompilerError
from aottrain.toolchain.cache import (
    cache_folder,
    is_own,
    private_folder,
    processor,
    say_once,
    temporary_folder_error,
)
from aottrain.toolchain.threads import Pool

# Of a loop that g++ splits in two at a row whose number is compared, it makes vectors in the first half alone.
_UNSPLIT = "-fno-split-loops"
# Compilers that know an Intel processor make vectors of half its width, for the sake of older ones: a GELU in bfloat16
# took 1.5 times as long so, forward and backward (an Intel Xeon with AMX).
_WIDE = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
_FLAGS = (
    "-O3", _UNSPLIT, "-march=native", *_WIDE, "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-shared",
    "-fPIC",
)  # fmt: skip
# What g++ is told beside. Of the libraries that it links by itself, its own for C++ takes the most time to look
# through: 40 of the 50 ms that a small text takes. Kernels need none of it, and what they need of C's is in every
# process, where Linux finds it as it loads an object. Registers are given out in one pass over a function: a long
# kernel compiles in four fifths of the time. What follows a choice is not moved into that side of it where a constant
# makes it simple: a loop with such sides does not become vectors (4 M elements of a relu in bfloat16 and of what it was
# compared with took 27 ms, and take 1.1).
_GNU, _TOLD = "Free Software Foundation", ("-fira-region=one", "-fno-tree-pre")
_WITHOUT_CXX_LIBRARY, _LIBRARIES = ("-fno-exceptions", "-nostdlib"), ("-lm", "-lgcc")
# A large program takes a few seconds. What a compiler needs for a small one says whether it answers at all.
_TIMEOUT_S, _FIRST_TIMEOUT_S = 120, 15
_NONE = "no C++ compiler was found on this machine (g++, clang++, c++ or $CXX)"
_SHOWN_LINES = 4
# How lines begin that a compiler says with its version: whose it is, and that nobody answers for it.
_LICENCE = ("Copyright (C)", "This is free software", "warranty; not even for")


class Source(NamedTuple):
    """A self-contained C++ text, and what its compiler is told beside the flags of all."""

    text: str
    flags: tuple[str, ...] = ()
    needs_cxx_library: bool = False
    """Whether it throws, or takes containers of C++'s own library."""


class Library(NamedTuple):
    """A loaded object."""

    functions: ctypes.CDLL
    compiled: bool
    """Whether it was made now, not found in memory or on disk."""


_PROBE = Source(
    """\
#include <cstdint>
extern "C" int64_t probe(int64_t count) {
  int64_t sum = 0;
  #pragma omp parallel for reduction(+ : sum) num_threads(1)
  for (int64_t i = 0; i < count; i++) sum += i;
  return sum;
}
""",
    ("-fopenmp",),
)
_NO_MEMORY = (
    "annot allocate memory", "out of memory", "memory exhausted", "failed to map segment", "Killed signal",
)  # fmt: skip
_loaded: dict[Source, Library | CompilerError] = {}
_probed: dict[str, str] = {}  # by a compiler's path: what is in its way
_hanging: dict[str, CompilerError] = {}  # by a compiler's path
_running: set[subprocess.Popen[bytes]] = set()


def load(source: Source) -> ctypes.CDLL | None:
    """The shared object of a source; None where no compiler works on this machine."""
    (library,) = load_all([source])
    return None if library is None else library.functions


def load_all(sources: Sequence[Source]) -> list[Library | None]:
    """As `load`, for several at a time: a compiler for each processor."""
    return [None if isinstance(library, CompilerError) else library for library in _load_all(sources)]


def require_all(sources: Sequence[Source], weights: Sequence[int] = ()) -> list[Library]:
    """As `load_all`; raises CompilerError, with the compiler's words, where one of them cannot be had.

    weights: how many kernels each has, to count them by.
    """
    libraries = _load_all(sources, weights)
    for library in libraries:
        if isinstance(library, CompilerError):
            raise CompilerError(str(library))
    return libraries  # type: ignore[return-value]


def find_compiler() -> str | None:
    """Path of a C++ compiler that works: $CXX, or the first of g++, clang++ and c++ that there is."""
    return None if compiler_obstacle() else _named_compiler()


def compiler_obstacle() -> str:
    """Why nothing can be compiled on this machine, in one line; empty where it can. A compiler that is there but does
    not work is also said in a warning, once."""
    compiler = _named_compiler()
    if compiler is None:
        return _NONE
    if compiler in _hanging:
        return str(_hanging[compiler])
    if (obstacle := _probed.get(compiler)) is None:
        obstacle = _probe(compiler)
        if not lacks_memory(obstacle):
            _probed[compiler] = obstacle
    if obstacle:
        say_once(f"{obstacle}; programs run op by op, without generated kernels (CXX names another compiler)")
    return obstacle


def lacks_memory(text: str) -> bool:
    """Whether a compiler, or what loads its objects, says so: then it may work the next time, and nobody remembers it.
    A system that has none left kills what g++ has started."""
    return any(words in text for words in _NO_MEMORY)


def _probe(compiler: str) -> str:
    try:
        library = _load(_PROBE, _FIRST_TIMEOUT_S)
    except CompilerError as error:
        return str(error)
    function = library.functions.probe
    function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_int64
    return "" if function(1000) == 499500 else f"what the C++ compiler {compiler} makes does not run"


def _named_compiler() -> str | None:
    asked = os.environ.get("CXX", "")
    found = next((path for name in (asked, "g++", "clang++", "c++") if name and (path := shutil.which(name))), None)
    if asked and found and not shutil.which(asked):
        say_once(f"CXX={asked}: there is no such compiler, and {found} compiles")
    return found


def _num_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_all(sources: Sequence[Source], weights: Sequence[int] = ()) -> list[Library | CompilerError]:
    weight = dict(zip_longest(sources, weights, fillvalue=1))
    missing = [source for source in dict.fromkeys(sources) if source not in _loaded]
    if not missing:
        return [_loaded[source] for source in sources]
    new: dict[Source, Library | CompilerError] = {}
    pool = Pool(_load_or_error, missing)
    try:
        pool.start(_num_processors())
        _count(pool, [weight[source] for source in missing])
        new.update(zip(missing, (future.result() for future in pool.futures), strict=True))
    except BaseException:  # an interrupt: threads wait for their compilers
        while not all([future.cancel() or future.done() for future in pool.futures]) and pool.lives:
            for process in list(_running):  # more than once: a thread may have been about to start one
                _kill(process)
            wait(pool.futures, timeout=0.05)
        raise
    for source, library in new.items():
        if isinstance(library, Library):
            _loaded[source] = library._replace(compiled=False)
        elif not lacks_memory(str(library)):
            _loaded[source] = library
    return [new[source] if source in new else _loaded[source] for source in sources]


def _count(pool: Pool, kernels: Sequence[int]) -> None:
    """Tell how many are compiled, or found, as they come, until all are."""
    tell("kernels ready", 0, sum(kernels))
    ended: set[Future[Any]] = set()
    while len(ended) < len(pool.futures):
        ended, before = pool.wait(), ended
        if ended != before:
            done = sum(number for future, number in zip(pool.futures, kernels, strict=True) if future in ended)
            tell("kernels ready", done, sum(kernels))


def _load_or_error(source: Source) -> Library | CompilerError:
    try:
        return _load(source, _TIMEOUT_S)
    except CompilerError as error:
        return error


def _load(source: Source, timeout_s: float) -> Library:
    """From the cache folder, or made now and kept there. Raises CompilerError."""
    compiler = _named_compiler()
    if compiler is None:
        raise CompilerError(_NONE)
    key = "\0".join([source.text, compiler, *_arguments(compiler, source), _version(compiler), processor()])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    folder = cache_folder()
    with suppress(OSError):
        if folder is not None and _is_whole(folder / name):
            return Library(ctypes.CDLL(str(folder / name)), False)
    if compiler in _hanging:
        raise CompilerError(str(_hanging[compiler]))
    try:
        with tempfile.TemporaryDirectory(dir=private_folder()) as scratch:
            built = _build(compiler, source, Path(scratch) / name, timeout_s)
            return _loaded_from(built, folder, compiler)
    except OSError as error:
        raise temporary_folder_error(error) from error


def _loaded_from(built: Path, folder: Path | None, compiler: str) -> Library:
    """A new object: as it lies in the cache folder from now on, else where it was made. Raises CompilerError."""
    with suppress(OSError):  # a full disk, or a folder that nothing may be run from
        if folder is not None and _keep(built, kept := folder / built.name) and _is_whole(kept):
            return Library(ctypes.CDLL(str(kept)), True)
    try:
        return Library(ctypes.CDLL(str(built)), True)
    except OSError as error:
        raise CompilerError(f"what the C++ compiler {compiler} makes cannot be loaded: {error}") from error


def _build(compiler: str, source: Source, target: Path, timeout_s: float) -> Path:
    text = target.with_name("program.cpp")
    text.write_text(source.text, encoding="utf-8")
    _run(compiler, _arguments(compiler, source, str(text), "-o", str(target)), timeout_s)
    target.chmod(0o700)  # whatever the umask: `is_own`
    with open(target, "ab") as file:  # loaders look at what an object's own header names, not at its end
        file.write(_checksum(target.name, target.read_bytes()))
    return target


def _arguments(compiler: str, source: Source, *files: str) -> list[str]:
    if _GNU not in _version(compiler):
        return [*_FLAGS, *source.flags, *files]
    if source.needs_cxx_library or sys.platform != "linux":
        return [*_FLAGS, *_TOLD, *source.flags, *files]
    return [*_FLAGS, *_TOLD, *_WITHOUT_CXX_LIBRARY, *source.flags, *files, *_LIBRARIES]


def _keep(built: Path, target: Path) -> bool:
    """Copy an object to the cache folder, whole or not at all."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            copied = shutil.copy2(built, Path(scratch) / target.name)
            os.replace(copied, target)
    except OSError as error:
        say_once(f"compiled objects are not kept for other processes: {target.parent}: {error.strerror or error}")
        return False
    return True


def _is_whole(target: Path) -> bool:
    """Whether the object is this user's own, and its bytes those that were written under this name: loading the first
    half of one ends the process."""
    if not is_own(target):
        return False
    content = target.read_bytes()
    size = hashlib.sha256().digest_size
    return _checksum(target.name, content[:-size]) == content[-size:]


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


@cache
def _version(compiler: str) -> str:
    """What the compiler says of its version: another one makes other objects."""
    return _run(compiler, ["--version"], _FIRST_TIMEOUT_S)


class _Child(subprocess.Popen[bytes]):
    """A process that is known before it starts: a signal's handler may raise at any moment of its start."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, None

    def start(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)


def _run(compiler: str, arguments: Sequence[str], timeout_s: float) -> str:
    """What the compiler prints. Raises CompilerError where it fails, or has not answered in time: that once only."""
    if compiler in _hanging:
        raise CompilerError(str(_hanging[compiler]))
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = _Child()
    _running.add(process)
    try:
        try:
            # A session of its own: what hangs is a child of the command that is known here.
            process.start([compiler, *arguments], **pipes, start_new_session=True)
        except OSError as error:
            raise CompilerError(f"the C++ compiler {compiler} cannot be started: {error.strerror or error}") from error
        output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
    except BaseException as error:
        _kill(process)
        if process.pid:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
                process.stdout.close()  # type: ignore[union-attr]
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        _hanging[compiler] = CompilerError(f"the C++ compiler {compiler} did not answer within {timeout_s:g} s")
        raise CompilerError(str(_hanging[compiler])) from None
    finally:
        _running.discard(process)
    if process.returncode:
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith(_LICENCE)]
        lines = lines[:_SHOWN_LINES] or ["it said nothing"]
        status = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise CompilerError(f"the C++ compiler {compiler} failed ({status}): " + "; ".join(lines))
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End it and what it has started, where it has begun."""
    if not process.pid or process.returncode is not None:
        return
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
