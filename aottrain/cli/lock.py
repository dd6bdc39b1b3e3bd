"""One output folder, one run: two that write the same files would leave neither's figures."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aottrain.cli import cleared_away
from aottrain.errors import AottrainError, BusyError, ConfigError, RecipeError, is_refusal
from aottrain.report.runs.reading import METRICS, REPORT, SUMMARY

try:
    import fcntl
except ImportError:  # not a Unix: nothing keeps two runs apart
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
GONE = "gone before its end"
"""Of a run whose summary says that it is running, and whose process is not there: it was killed, or the machine."""
_NUM_PARENTS = 3
_LOOK_S = 0.1  # seconds between two looks at a lock
# Names of what is there before a program is compiled, whose decisions are a file beside these.
_BEGINNING = (".hydra", "*.log", SUMMARY, METRICS, REPORT, "run.html", "wandb", "events.out.*")
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def only_run_in(folder: Path, key: str) -> Iterator[None]:
    """Inside, no other process gets in for the same folder, which is made. The lock is the kernel's and ends with this
    process, however that ends; a file that is left behind locks nothing.

    Where what was asked for is refused inside, the folder is not there afterwards, if it was not there before and has
    no more than what a run leaves before it begins. A recipe's error stays: its log has the traceback. The same holds
    of a run that a signal ended before it had a summary.

    key: the setting that names the folder. BusyError names the folder and the process that has it, ConfigError what
    keeps it from being made.
    """
    path = folder / NAME
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(path, key)
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be made: {error.filename or path}: {error.strerror}") from error

    def leave(is_empty: bool) -> None:
        if is_empty and made:
            _remove_beginning(folder)
        if file is not None:
            with suppress(OSError):
                path.unlink()  # while it is still locked: who waits for this one sees that it is gone
            os.close(file)
        with suppress(OSError):  # one that has results, or that another run has come to
            for each in made if is_empty else ():
                each.rmdir()

    def is_before_summary() -> bool:
        return not (folder / SUMMARY).exists()

    is_empty = False
    try:
        with cleared_away(lambda: leave(is_before_summary())):
            yield
    except AottrainError as error:
        is_empty = is_refusal(error) and not isinstance(error, RecipeError)
        raise
    except KeyboardInterrupt:
        is_empty = is_before_summary()
        raise
    finally:
        leave(is_empty)


def _remove_beginning(folder: Path) -> None:
    """What a run leaves before it begins, where the folder has nothing else."""
    left = [path for path in folder.iterdir() if path.name != NAME]
    if any(not any(map(path.match, _BEGINNING)) for path in left):
        return
    for path in left:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_taken(folder: Path) -> bool | None:
    """Whether a run is in `only_run_in` of that folder now; None where the system cannot say so."""
    if fcntl is None:
        return None
    try:
        file = os.open(folder / NAME, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe may never open else
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def wait_until_free(folder: Path) -> None:
    """Return when no run is in `only_run_in` of that folder, where the system can say so; a line says what is waited
    for."""
    if is_taken(folder):
        with suppress(OSError):
            owner = (folder / NAME).read_text(encoding="utf-8", errors="replace").strip()
            print(f"{folder}: process {owner} still runs there; waiting for its end", flush=True)
    while is_taken(folder):
        threading.Event().wait(_LOOK_S)


def is_at_work(folder: Path) -> bool | None:
    """The same of that folder or one of those above it, where a task's lock may be whose runs lie below."""
    here = folder.absolute()
    locks = [is_taken(path) for path in (here, *here.parents[:_NUM_PARENTS])]
    return True if any(locks) else None if None in locks else False


def _locked(path: Path, key: str) -> int | None:
    """The open, locked file; None where the system has no locks, which is said."""
    while fcntl is not None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(file, 20).decode(errors="replace").strip() or "unknown"
            os.close(file)
            text = f"another run (process {owner}) writes there; wait until it ends, or give another {key}"
            raise BusyError(f"{path.parent}: {text}") from error
        except OSError as error:
            os.close(file)
            if error.errno not in _WITHOUT_LOCKS:
                raise
            print(f"aottrain: {path.parent}: cannot be locked ({error.strerror}): start no second run in it",
                  file=sys.stderr)  # fmt: skip
            return None
        if _is_at(path, file):  # not one that its owner has removed since it was opened
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
            return file
        os.close(file)
    return None


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
