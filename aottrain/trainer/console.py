"""What a person reads while a run goes on: on the screen, and the same in the run's log file."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_FAILED = "aottrain: {}: cannot be written ({}): the log ends here\n"


class Log:
    """A file that text is added to at once, unbuffered: what was printed before a crash is there, and a full disk ends
    the log with one line on the screen, not the run."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = None
        self._guarded(self._open)

    def _open(self) -> None:
        self._file = self.path.open("ab", buffering=0)

    def write(self, text: str) -> None:
        if self._file is not None:
            self._guarded(lambda: self._file.write(text.encode("utf-8", "backslashreplace")))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except OSError as error:
            self.close()
            _screen(sys.stderr).write(_FAILED.format(self.path, error.strerror or error))


# Held while something is written to the screen, so that a line that a thread redraws does not come between. A signal's
# handler may print while the same thread holds it.
SCREEN = threading.RLock()
# What is told of each text before it is printed: it takes its own line off the screen.
making_way: list[Callable[[str], None]] = []

# While steps are taken: what is told that nobody reads our output any more, as after `| head`.
unread: list[Callable[[], None]] = []


class _Passed:
    """A stream by which text goes to another; all else about it is the other's. Where the other is there no more, what
    is written is lost, if `_outlives` says so."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self._passed(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._passed(self.stream.flush)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _passed(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if not self._outlives(error):
                raise
            _drop(self.stream)

    def _outlives(self, error: OSError) -> bool:
        return False


class Terminal(_Passed):
    """A terminal's stream, on which nothing is shown any more when the terminal has been closed: a run that goes on, or
    ends with a checkpoint, is not ended by what it prints."""

    def _outlives(self, error: OSError) -> bool:
        return error.errno == errno.EIO


def _drop(stream: TextIO) -> None:
    """From here on what goes to it is lost: what libraries print, too, and what is still in a buffer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def outliving_terminals() -> Iterator[None]:
    """Inside, what is printed to a terminal that has been closed is dropped, and what is printed to a stream that was
    closed from the start (`>&-`), which Python has as None."""
    before = sys.stdout, sys.stderr
    streams = (stream or open(os.devnull, "w", encoding="utf-8") for stream in before)  # noqa: SIM115
    out, err = (Terminal(stream) if stream.isatty() else stream for stream in streams)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == (out, err):
            sys.stdout, sys.stderr = before


class Copied(_Passed):
    """A stream whose text goes to a log as well."""

    def __init__(self, stream: TextIO, log: Log):
        super().__init__(stream)
        self.log = log

    def write(self, text: str) -> int:
        self.log.write(text)
        with SCREEN:
            for make_way in tuple(making_way):
                make_way(text)
            return super().write(text)

    def _outlives(self, error: OSError) -> bool:
        if not isinstance(error, BrokenPipeError):
            return False
        for tell in unread:
            tell()
        return bool(unread)


@contextmanager
def copied_to(path: Path, before: Sequence[str] = ()) -> Iterator[Log]:
    """Inside, what is printed also goes to the end of this file. before: lines that have been printed already."""
    log = Log(path)
    for line in before:
        log.write(line + "\n")
    out, err = sys.stdout, sys.stderr
    copies = Copied(out, log), Copied(err, log)
    sys.stdout, sys.stderr = copies  # type: ignore[assignment]
    try:
        yield log
    finally:
        if (sys.stdout, sys.stderr) == copies:  # not where somebody has put others into their place
            sys.stdout, sys.stderr = out, err
        log.close()


def screen() -> TextIO:
    """Where a bar is drawn: stderr itself, without the log, in which a bar's many states would be noise."""
    return _screen(sys.stderr)


def _screen(stream: Any) -> TextIO:
    return stream.stream if isinstance(stream, Copied) else stream


def say_at_once(line: str) -> None:
    """One line from a signal's handler: past every buffer, which may be in use at this very moment."""
    if isinstance(sys.stderr, Copied):
        sys.stderr.log.write(line + "\n")
    stream = screen()
    clear = "\r\x1b[K" if stream.isatty() else ""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a notebook's, a test's
        stream.write(line + "\n")
    else:
        with suppress(OSError):
            os.write(descriptor, f"{clear}{line}\n".encode())
