"""What a person's own code raises, as one line that names its place, without this package's frames around it.

A mistake in it is answered as one in the configuration is.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aottrain.errors import AottrainError, RecipeError

_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@contextmanager
def own_errors(files: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Inside, what the code of these files raises becomes RecipeError; all other errors stay as they are. files: is
    called where something is raised."""
    try:
        yield
    except AottrainError:
        raise
    except (Exception, SystemExit) as error:  # a part of a run is not what ends it without a word
        if (text := error_text(error, files())) is None:
            raise
        raise RecipeError(text) from error


def error_text(error: BaseException, files: Iterable[str]) -> str | None:
    """The error with the line of these files, or of a module that they use, that raised it.

    None where they are not to blame: they were not running, or code of this package that they called raised.
    """
    if isinstance(error, SyntaxError) and error.filename and not _is_library(error.filename):
        return f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    own = {os.path.realpath(file) for file in files}
    frames = traceback.extract_tb(error.__traceback__)
    at = max((i for i, frame in enumerate(frames) if os.path.realpath(frame.filename) in own), default=None)
    if at is None or any(_is_ours(frame.filename) for frame in frames[at + 1 :]):
        return None
    frame = next((frame for frame in reversed(frames[at:]) if not _is_library(frame.filename)), frames[at])
    return _at(frame, error)


def import_error_text(error: BaseException) -> str:
    """What a module raised when it was imported, with the innermost line that is no library's."""
    if text := error_text(error, ()):  # it cannot be read
        return text
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename) and not _is_ours(frame.filename)]
    return _at(own[-1], error) if own else brief(error)


def brief(error: BaseException) -> str:
    """The error's class and the first line that it says."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}".rstrip(": ")


def shown(file: str) -> str:
    """A path as a person in this folder would write it."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near


def _at(frame: traceback.FrameSummary, error: BaseException) -> str:
    code = f", `{frame.line}`" if frame.line else ""
    return f"{shown(frame.filename)}:{frame.lineno}, in {frame.name}{code}: {brief(error)}"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _LIBRARIES[0])) or any(part in file for part in _LIBRARIES[1:])


def _is_ours(file: str) -> bool:
    return Path(file).resolve().is_relative_to(_PACKAGE)
