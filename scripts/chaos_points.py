"""Points of a save at which a process ends itself, for `scripts/chaos.py`: each place where files have changed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aottrain.errors import ResumeError
from aottrain.trainer import checkpoint
from aottrain.trainer.checkpoint import CheckpointFolder, load

# The file, what is called for it, which call of that, and whether the process ends before it or after it. A save writes
# the weights, the rest of the checkpoint, then the list of all: each is written, flushed, renamed, and its folder
# flushed; then old ones go, and their weights.
POINTS: dict[str, tuple[str, str, int, bool]] = {
    **{
        f"{file} {what}": (suffix, *point)
        for file, suffix, some in (("weights", ".safetensors", 2), ("checkpoint", ".pt", 20))
        for what, point in {
            "opened": ("write", 1, True),
            "begun": ("write", 1, False),
            "half written": ("write", some, False),
            "written": ("fsync", 1, True),
            "flushed": ("replace", 1, True),
            "renamed": ("replace", 1, False),
        }.items()
    },
    "the folder of the weights flushed": (".safetensors", "fsync", 2, False),
    "the folder of the checkpoint flushed": (".pt", "fsync", 2, False),
    "list half written": (".json", "write_text", 1, True),
    "list written": (".json", "fsync", 1, True),
    "list flushed": (".json", "replace", 1, True),
    "list renamed": (".json", "replace", 1, False),
    "an old one removed": (".pt", "unlink", 1, False),
    "the weights of an old one removed": (".safetensors", "unlink", 1, False),
}


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(point: str, number: int) -> None:
    """In this process: the end at that point of the save of that number, from 1, whichever thread writes it."""
    suffix, wanted, count, is_before = POINTS[point]
    counts, saves, file = Counter(), [0], [""]

    def counted(name: str, call: Callable[..., Any], at_half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def counting(*given: Any, **more: Any) -> Any:
            is_it = name == wanted and saves[0] == number and file[0] == suffix
            counts[name] += is_it
            hit = is_it and counts[name] == count
            if hit and at_half is not None:
                at_half(*given)
            if hit and is_before:
                end_now()
            result = call(*given, **more)
            if hit:
                end_now()
            return result

        return counting

    save = CheckpointFolder.save

    def saving(*given: Any, **more: Any) -> Any:
        saves[0] += 1
        counts.clear()
        return save(*given, **more)

    write = checkpoint.write_whole

    def writing(path: Path, *given: Any) -> None:
        file[0] = path.suffix
        counts.clear()
        write(path, *given)

    def half(path: Path, text: str, **_: Any) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])

    def removing(self: Path, *given: Any, **more: Any) -> None:
        if self.suffix != ".tmp":
            file[0] = self.suffix
        (unlink if self.suffix == ".tmp" else remove)(self, *given, **more)

    unlink = Path.unlink
    remove = counted("unlink", unlink)
    Path.unlink = removing  # type: ignore[method-assign]
    CheckpointFolder.save = saving  # type: ignore[method-assign]
    os.fsync, os.replace = counted("fsync", os.fsync), counted("replace", os.replace)
    checkpoint.write_whole = writing
    checkpoint._Watched.write = counted("write", checkpoint._Watched.write)  # type: ignore[method-assign]
    Path.write_text = counted("write_text", Path.write_text, half)  # type: ignore[method-assign]


def what_is_left(folder: Path) -> str:
    """What is wrong with the checkpoints of a run that was ended: each that is listed must be whole. Empty if nothing
    is."""
    folder = folder / "checkpoints"
    try:
        files = [entry["file"] for entry in json.loads((folder / "latest.json").read_text("utf-8"))["checkpoints"]]
    except FileNotFoundError:  # none has been finished
        files = []
    try:
        for file in files:
            load(folder / file)
    except (ResumeError, ValueError, KeyError) as error:
        return f"after it was ended: {error}"
    return ""


def any_point(chance: random.Random, point: str, num_saves: int) -> Callable[[], None]:
    """To be called in the process: that point of a save at random. The first save removes none."""
    number = chance.randrange(4 if point.endswith("removed") else 1, num_saves + 1)
    return lambda: plant(point, number)


if __name__ == "__main__":
    print("A part of another command: python scripts/chaos.py --help")
