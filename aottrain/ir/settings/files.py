"""Files of text and of plain values, whoever wrote them."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any


def text_of(path: Path) -> str:
    """Of a file. OSError where it is none: a device or a pipe may be read for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file")
    return path.read_text(encoding="utf-8", errors="replace")


def values_of(path: Path) -> Any:
    """What a file of JSON holds. OSError: it is none, or cannot be read. ValueError: it holds something else, what is
    nested too deeply to be read, or a whole number that no float holds."""
    text = text_of(path)
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError("has a number that is too large")
    return int(digits)
