"""What a run's folder holds, by names and first bytes: it is asked before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

CHECKPOINTS = "checkpoints"
"""The folder of a run with those files."""
INDEX = "latest.json"
"""Which of them there are, with their checksums."""
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
    within = (file for depth in ("*", "*/*", "*/*/*") for file in path.glob(f"{depth}/{CHECKPOINTS}/{_FILES}"))
    try:
        other = max(within, key=lambda checkpoint: checkpoint.stat().st_mtime, default=None)
    except OSError:  # something there has been removed meanwhile
        other = None
    hint = f"; the newest run in it that has one is {other.parents[1]}" if other else ""
    return f"the folder has no checkpoint{hint}"


def is_address(place: str) -> bool:
    """Whether this names a server or a database of MLflow's, not a folder."""
    return ":" in place or place == "databricks"
