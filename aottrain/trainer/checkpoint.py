"""Checkpoints: everything a run needs to go on as if it had never stopped, and files that survive a crash.

A checkpoint is written to a temporary file, flushed to the disk and renamed; `latest.json`, which lists the complete
ones with their checksums, comes last. Whatever is not listed there does not count. Only tensors and plain values are
stored, and loading runs no code from the file (`weights_only=True`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aottrain.config.run import RunConfig
from aottrain.errors import CheckpointError, ResumeError

FORMAT = 1
NUM_KEPT = 2  # the newest, and one to fall back to
INDEX = "latest.json"
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, str, int, float, complex, bool, type(None))


def random_state() -> dict[str, Any]:
    """Every random stream of this process, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def identity(config: RunConfig, data_fingerprint: str) -> dict[str, Any]:
    """What must be the same when a run goes on, as {"optimizer.lr": 0.002, ...}.

    Not in it: how long, where and how fast (steps, output, engine, partition, kernels, logging), where data and
    tokenizer lie (their content counts), and the schedule's length, which a checkpoint brings along.
    """
    flat: dict[str, Any] = {"seed": config.seed, "data.fingerprint": data_fingerprint}
    flat["trainer.accumulate"] = config.trainer.accumulate
    flat["trainer.precision"] = config.trainer.precision
    for section in ("recipe", "optimizer", "lr_schedule", "data"):
        _flatten(section, asdict(getattr(config, section)), flat)
    for key in ("data.path", "data.tokenizer", "lr_schedule.total_steps", "optimizer.kernel"):
        del flat[key]
    return flat


def _flatten(prefix: str, values: Mapping[str, Any], flat: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _flatten(f"{prefix}.{key}", value, flat)
        else:
            flat[f"{prefix}.{key}"] = value


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """ResumeError lists every setting in which the checkpoint and this run differ. A setting that is newer than the
    checkpoint had its default there."""
    before = {**identity(RunConfig(), ""), **saved}
    differences = [
        f"  {key}: {before.get(key)!r} in the checkpoint, {current.get(key)!r} in this run"
        for key in sorted(saved.keys() | current.keys())
        if before.get(key) != current.get(key)
    ]
    if differences:
        raise ResumeError("\n".join([f"{path} is of another run; it differs in", *differences]))


def check_storable(value: Any, name: str) -> None:
    """CheckpointError where a checkpoint could hold this value, but not be loaded, which makes no object of a class."""
    if type(value) in _CONTAINERS:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            check_storable(item, f"{name}[{key!r}]")
    elif type(value) not in _PLAIN:
        what = "tensors, numbers, texts, and lists and dictionaries of these"
        raise CheckpointError(f"{name} is a {type(value).__name__}; a checkpoint holds {what}")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that has been read."""

    path: Path
    step: int
    """The step after which it was saved."""
    state: dict[str, Any]
    """What was given to `save`."""


class CheckpointFolder:
    """The checkpoints of one run: step_00000300.pt, ... and latest.json."""

    def __init__(self, directory: Path):
        self.directory = directory

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint and drop the older ones but NUM_KEPT - 1, and later ones: an earlier run left those.

        CheckpointError (disk full, no permission): the checkpoints that were there still are.
        """
        path = self.directory / f"step_{step:08d}.pt"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(path, lambda temporary: _save({"format": FORMAT, "step": step, **state}, temporary))
            newest = {"file": path.name, "step": step, "sha256": _digest(path)}
            kept = [newest, *(entry for entry in self._entries() if entry["step"] < step)][:NUM_KEPT]
            index = json.dumps({"checkpoints": kept}, indent=2)
            _write(self.directory / INDEX, lambda temporary: temporary.write_text(index + "\n", encoding="utf-8"))
            for file in set(self.directory.glob("step_*.pt")) - {self.directory / entry["file"] for entry in kept}:
                file.unlink()
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            message = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
            raise CheckpointError(f"{path}: cannot be written: {message}") from error
        return path

    def newest(self, say: Callable[[str], None]) -> Loaded | None:
        """The newest checkpoint that is whole, saying which damaged ones were passed over; None if there are none.

        ResumeError: there are checkpoints, but all are damaged.
        """
        entries = self._entries()
        for entry in entries:
            try:
                return load(self.directory / entry["file"])
            except ResumeError as error:
                say(f"passing over a damaged checkpoint: {error}")
        if entries:
            raise ResumeError(f"{self.directory}: none of its {len(entries)} checkpoints can be read")
        return None

    def _entries(self) -> list[dict[str, Any]]:
        """What latest.json lists, newest first; without a readable one, every checkpoint file that is there."""
        try:
            entries = json.loads((self.directory / INDEX).read_text(encoding="utf-8"))["checkpoints"]
            return sorted(entries, key=lambda entry: entry["step"], reverse=True)
        except (OSError, ValueError, KeyError, TypeError):
            files = sorted(self.directory.glob("step_*.pt"), reverse=True)
            return [{"file": file.name, "step": int(file.stem.removeprefix("step_"))} for file in files]


def load(path: Path) -> Loaded:
    """Read one checkpoint file. ResumeError: it is missing, damaged, or not one of ours."""
    try:
        expected = CheckpointFolder(path.parent)._entries()
        digest = next((entry.get("sha256") for entry in expected if entry["file"] == path.name), None)
        if digest is not None and digest != _digest(path):
            raise ResumeError(f"{path}: is damaged: its checksum is not the one in {INDEX}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ResumeError(f"{path}: there is no such checkpoint") from error
    except ResumeError:
        raise
    except Exception as error:  # zip, pickle and torch each have their own for a file that is not whole
        raise ResumeError(f"{path}: is damaged, or no checkpoint of aottrain ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResumeError(f"{path}: is not a checkpoint of aottrain (format {FORMAT})")
    return Loaded(path, content["step"], content)


def find(
    resume: str | None, folder: CheckpointFolder, say: Callable[[str], None], key: str = "resume"
) -> Loaded | None:
    """What `resume` names: None; "auto" (this run's newest, or None); a checkpoint file; a run's or checkpoint folder.

    key: which setting names it. ResumeError: what was named is not there, or cannot be read.
    """
    if resume is None:
        return None
    if resume == "auto":
        return folder.newest(say)
    path = Path(resume).expanduser()
    if not path.is_dir():
        return load(path)
    nested = path / folder.directory.name
    newest = CheckpointFolder(nested if nested.is_dir() else path).newest(say)
    if newest is None:
        within = path.glob(f"*/{folder.directory.name}/step_*.pt")
        other = max(within, key=lambda checkpoint: checkpoint.stat().st_mtime, default=None)
        hint = f"; the newest run in it that has one is {other.parents[1]}" if other else ""
        raise ResumeError(f"{key}={resume}: the folder has no checkpoint{hint}")
    return newest


def _save(content: Mapping[str, Any], path: Path) -> None:
    """Through a file of Python's, whose error says why it cannot be written to; torch's own says where in its code."""
    with path.open("wb") as file:
        torch.save(content, file)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Whole or not at all, and on the disk when this returns: a rename may get there before the data it names."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
