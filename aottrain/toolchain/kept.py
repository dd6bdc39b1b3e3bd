"""Values that follow from others by long computing, kept on disk by what they follow from.

A file is whole or counts as missing: a checksum of its name and contents stands in front, and each is written beside
its place and renamed into it. The oldest go where there are many.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from aottrain.toolchain.cache import cache_folder, is_own

MOST_FILES = 256  # of a kind
_CHECKED = 32  # bytes of a checksum


def key_of(parts: Iterable[object]) -> str:
    """The same for parts of the same text, and for no others."""
    texts = [str(part) for part in parts]
    return hashlib.sha256("\0".join([*(str(len(text)) for text in texts), *texts]).encode()).hexdigest()[:40]


@cache
def code_of(*folders: str) -> str:
    """Changes with the code in these folders of the package."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for name in folders for path in (package / name).rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def read_kept(kind: str, key: str) -> Any:
    """As `keep` was given it; None where there is none, or it is damaged or another user's."""
    file = _file(kind, key)
    if file is None or not is_own(file):
        return None
    try:
        whole = file.read_bytes()
        if whole[:_CHECKED] != _checksum(key, whole[_CHECKED:]):
            return None
        return json.loads(zlib.decompress(whole[_CHECKED:]))
    except (OSError, ValueError, zlib.error):
        return None


def keep(kind: str, key: str, value: Any) -> None:
    """value: of numbers, texts, lists and dicts. What cannot be written is computed again, and nothing else."""
    file = _file(kind, key)
    if file is None:
        return
    contents = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        _remove_oldest(file.parent)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            written = Path(scratch) / file.name
            written.write_bytes(_checksum(key, contents) + contents)
            os.replace(written, file)


def _file(kind: str, key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / kind / key


def _checksum(key: str, contents: bytes) -> bytes:
    return hashlib.sha256(key.encode() + contents).digest()


def _remove_oldest(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) >= MOST_FILES:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[: len(files) - MOST_FILES + 1]:
            path.unlink(missing_ok=True)
