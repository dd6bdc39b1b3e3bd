"""What a run's folder holds, by names and first bytes: it is asked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""The folder of a run with those files."""
INDEX = "latest.json"
"""Which of them there are, with their checksums."""
MOST_ENTRIES = 20_000
"""How many files and folders are looked at for a run that somebody may have meant."""
_DEEPEST = 3
_FILES = "step_*.pt"
_ARCHIVE = b"PK\x03\x04"  # what torch.save writes begins so


def checkpoint_folder(path: Path) -> Path:
    """Of a run's folder, or that folder itself."""
    nested = path / CHECKPOINTS
    return nested if nested.is_dir() else path


def file_of_pieces(path: Path) -> Path:
    """Of a folder with a checkpoint's pieces the other file of that checkpoint; any other path as it is."""
    file = path.parent / f"{path.name.partition('.')[0]}.pt"
    return file if path.is_dir() and path.name.startswith("step_") and file.is_file() else path


def has_checkpoint(path: Path) -> bool:
    """Whether there is one of a run, damaged or not."""
    folder = checkpoint_folder(path)
    return any(folder.glob(_FILES)) or (folder / INDEX).is_file()


def no_checkpoint(path: Path) -> str:
    """Why nothing goes on from this path, which exists: a file, a run's folder, or that of its checkpoints; "" where
    only reading it can tell."""
    path = file_of_pieces(path)
    if not path.is_dir():
        if path.suffix == ".safetensors" and path.with_suffix(".pt").is_file():
            path = path.with_suffix(".pt")  # a checkpoint is both
        if path.exists() and not path.is_file():  # a device or a pipe may be read for ever
            return "is no file"
        try:
            with path.open("rb") as file:
                begins = file.read(len(_ARCHIVE))
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if begins == _ARCHIVE else "is no checkpoint of aottrain"
    if has_checkpoint(path):
        return ""
    folders, is_all = _within(path)
    newest: dict[float, Path] = {}
    for folder in folders:
        with suppress(OSError):  # something there has been removed meanwhile
            newest |= {file.stat().st_mtime: folder for file in (folder / CHECKPOINTS).glob(_FILES)}
    hint = f"; the newest run in it that has one is {newest[max(newest)]}" if newest else ""
    if not is_all:
        hint = f"{hint}; not all of it was searched for runs, for it has more than {MOST_ENTRIES:,} files and folders"
    return f"the folder has no checkpoint{hint}"


def _within(path: Path) -> tuple[list[Path], bool]:
    """The folders up to _DEEPEST below, the nearest first, and whether these are all: of a folder such as / it would
    take minutes to list them."""
    found: list[Path] = []
    level, count = [path], 0
    for _ in range(_DEEPEST):
        before, level = level, []
        for folder in before:
            with suppress(OSError), os.scandir(folder) as entries:  # some may be another user's
                for entry in entries:
                    if (count := count + 1) > MOST_ENTRIES:
                        return found + level, False
                    if entry.is_dir():
                        level.append(Path(entry.path))
        found += level
    return found, True


def is_address(place: str) -> bool:
    """Whether this names a server or a database of MLflow's, not a folder."""
    return ":" in place or place == "databricks"
