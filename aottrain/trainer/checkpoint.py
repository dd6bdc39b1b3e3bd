"""Checkpoints: everything a run needs to go on as if it had never stopped, and files that survive a crash.

A checkpoint is two files: the weights as safetensors, and all else, with the checksum of those, as torch.save has it.
Where several processes write it in pieces (`parallel/pieces.py`), a folder of a file for each has the place of the
first; the second has the checksum of each.
Each is written to a temporary file, flushed to the disk and renamed, the weights first; then `latest.json`, the
manifest, which lists the complete ones with their checksums; then the link `best`. What is old is removed after all of
these are on the disk. Whatever is not listed does not count. Where the list is lost or damaged, every file is a
candidate, and the checksums within it are compared. Only tensors and plain values are stored, and loading runs no code
from the files (`weights_only=True`). Those of format 1 had the weights in the second file; they are read, too. Format 3
is that of pieces.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from aottrain.config.folders import INDEX, checkpoint_folder, file_of_pieces, no_checkpoint
from aottrain.config.run import TrainerConfig
from aottrain.errors import CheckpointError, ResumeError
from aottrain.ir.settings.files import values_of, write_whole
from aottrain.trainer.weights.files import Parts, read_tensors, write_tensors
from aottrain.trainer.weights.listed import NAME, PIECES, WEIGHTS, Entry, best_of, kept_of
from aottrain.trainer.weights.pieces import FILE, put, stored_in

FORMAT, IN_PIECES = 2, 3
BEST = "best"
_KEEP = TrainerConfig()
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, str, int, float, complex, bool, type(None))


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
    """Of a run: step_00000300.safetensors, step_00000300.pt, ..., latest.json; with trainer.keep_best a link `best`."""

    is_in_pieces = False
    """Whether what `save` is given is a state in pieces."""

    def __init__(self, directory: Path, keep: TrainerConfig = _KEEP):
        """keep: its keep_last, keep_every and keep_best say which checkpoints stay."""
        self.directory = directory
        self.keep = keep
        self.is_abandoned = False
        """Set by another thread: a save that is in progress ends as one that fails."""
        self._complaints: set[str] = set()
        self._damaged: set[str] = set()

    def begin(self, step: int, in_background: bool) -> bool:
        """Before a save, in the run's own thread. Whether it is written in the background: all processes do alike."""
        return in_background

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        held_out_loss: float | None = None,
        say: Callable[[str], None] = print,
    ) -> Path:
        """Write a checkpoint, then drop those that are not kept, those that `newest` found damaged, and later ones,
        which an earlier run left.

        CheckpointError (disk full, no permission): the checkpoints that were there still are; of this one no weights
        are left. What cannot be removed or linked is said, once for each file.
        """
        path = place = self.directory / Entry(step).file
        weights: dict[str, Any] = {}
        is_written = False
        is_evaluated = held_out_loss is not None
        held_out_loss = held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None
        own = (state.get("val_metrics") or {}) if is_evaluated else {}
        metrics = {name: value for name, value in own.items() if math.isfinite(value)} or None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            content, weights = self._write_weights(step, state)
            write_whole(path, lambda temporary: self._write_file(content, temporary))
            is_written = True
            newest = Entry(step, _digest(path), held_out_loss, metrics=metrics, **weights)
            before = [entry for entry in self._entries() if entry.step < step]
            kept = kept_of([newest, *(entry for entry in before if entry.file not in self._damaged)], self.keep)
            place = self.directory / INDEX
            index = json.dumps({"checkpoints": [{"file": entry.file, **asdict(entry)} for entry in kept]}, indent=2)
            write_whole(place, lambda temporary: temporary.write_text(index + "\n", encoding="utf-8"))
        except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
            if not is_written:
                self._drop(weights.get("weights", ""))
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            message = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
            raise CheckpointError(f"{place}: cannot be written: {message}") from error
        self._link_best(best_of(kept, self.keep) if self.keep.keep_best else None, say)
        self._remove_all_but(kept, say)
        return path

    def newest(self, say: Callable[[str], None], lazily: bool = False) -> Loaded | None:
        """The newest checkpoint that is whole, saying which damaged ones were passed over; None if there are none.
        lazily: see `load`.

        ResumeError: there are checkpoints, but all are damaged.
        """
        entries = self._entries()
        for entry in entries:
            try:
                return load(self.directory / entry.file, lazily)
            except ResumeError as error:
                self._damaged.add(entry.file)
                say(f"passing over a damaged checkpoint: {error}")
        if entries:
            raise ResumeError(f"{self.directory}: none of its {len(entries)} checkpoints can be read")
        return None

    def _write_weights(self, step: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is left for the other file, and what the list says of this one. Not over the weights of an earlier
        checkpoint of that step, whose other file is still there."""
        content = {"format": FORMAT, "step": step, **state}
        parts = Parts.of(state["model"]) if isinstance(state.get("model"), Mapping) else None
        if parts is None or not parts.tensors:
            return content, {}
        path, number = self.directory / f"step_{step:08d}.safetensors", 0
        while path.exists() and (self.directory / Entry(step).file).exists():
            number += 1
            path = self.directory / f"step_{step:08d}.{number}.safetensors"
        metadata = {"step": str(step), **parts.tied}
        digest = self._written(path, lambda write: write_tensors(write, parts.tensors, metadata))
        content["model"], content["weights"] = parts.rest, {"file": path.name, "sha256": digest, "names": parts.names}
        return content, {"weights": path.name, "weights_sha256": digest}

    def _written(self, path: Path, make: Callable[[Callable[[Any], Any]], None]) -> str:
        """The checksum of a file that `make` has made by calls of what it is given with bytes."""

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                make(_Watched(file, self).write)

        write_whole(path, write)
        return _digest(path)

    def _write_file(self, content: Mapping[str, Any], path: Path) -> None:
        """Through a file of Python's, whose error says why it cannot be written to; torch's own says where in its
        code."""
        with path.open("wb") as file:
            torch.save(content, _Watched(file, self))

    def _entries(self) -> list[Entry]:
        """What latest.json lists, newest first; without a readable one, every checkpoint file that is there."""
        try:
            listed = values_of(self.directory / INDEX)["checkpoints"]
            entries = [Entry.of(values) for values in listed]
            entries[0]  # no save leaves an empty list
        except (AttributeError, OSError, ValueError, LookupError, TypeError):
            names = [NAME.fullmatch(path.name) for path in self.directory.glob("step_*.pt")]
            entries = [Entry(int(name[1])) for name in names if name]
        return sorted(entries, key=lambda entry: entry.step, reverse=True)

    def _drop(self, name: str) -> None:
        """Remove what a save has written that no checkpoint names, as far as that can be."""
        path = self.directory / name
        if PIECES.fullmatch(name):
            shutil.rmtree(path, ignore_errors=True)
        elif WEIGHTS.fullmatch(name):
            with suppress(OSError):
                path.unlink()

    def _link_best(self, best: Entry | None, say: Callable[[str], None]) -> None:
        """Point the link at it, or take the link away; a file or folder of another's that has this name stays."""
        link = self.directory / BEST
        try:
            if best is not None:
                if link.exists() and not link.is_symlink():
                    raise FileExistsError(errno.EEXIST, "there is something else of this name")
                write_whole(link, lambda temporary: temporary.symlink_to(best.file))
            elif link.is_symlink():
                link.unlink()
        except OSError as error:
            self._complain(link, f"cannot be linked to {best.file}" if best else "cannot be removed", error, say)

    def _remove_all_but(self, kept: Sequence[Entry], say: Callable[[str], None]) -> None:
        """And what saves that were killed left. Of one that no list tells of, all weights of its step stay."""
        files = {file for entry in kept for file in (entry.file, entry.weights)}
        unlisted = {entry.step for entry in kept if entry.sha256 is None}
        every = ("step_*.pt", "step_*.pt.tmp", "step_*.safetensors", "step_*.safetensors.tmp")
        folders = sorted(path for path in self.directory.glob("step_*") if PIECES.fullmatch(path.name))
        for path in itertools.chain(*map(self.directory.glob, every), folders):
            weights = WEIGHTS.fullmatch(path.name) or PIECES.fullmatch(path.name)
            if path.name not in files and not (weights and int(weights[1]) in unlisted):
                try:
                    if path in folders:
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
                except OSError as error:
                    self._complain(path, "an old checkpoint cannot be removed", error, say)

    def _complain(self, path: Path, what: str, error: OSError, say: Callable[[str], None]) -> None:
        if path.name not in self._complaints:
            self._complaints.add(path.name)
            say(f"warning: {path}: {what}: {error.strerror or error}; going on")


def load(path: Path, lazily: bool = False, checks: bool = True) -> Loaded:
    """Read the checkpoint that this file, or file or folder of weights, is of. ResumeError: missing, damaged, or not
    ours.

    lazily: what is in pieces is left on the disk, as `Stored`. checks: compare their checksums, for which all of them
    are read; False where another process has.
    """
    path = path.resolve() if path.is_symlink() else path  # `best`: its checksum is listed under the name it links to
    path = path.with_suffix(".pt") if WEIGHTS.fullmatch(path.name) else path
    if path.exists() and not path.is_file():  # a device or a pipe may be read for ever
        raise ResumeError(f"{path}: is no file")
    try:
        _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict) and "weights" in content:
            content["model"] = _with_weights(path, content["model"], **content.pop("weights"))
        elif isinstance(content, dict) and content.get("format") == IN_PIECES:
            _fill_in(path, content, lazily, checks, **content.pop("pieces"))
    except FileNotFoundError as error:
        raise ResumeError(f"{path}: there is no such checkpoint") from error
    except ResumeError:
        raise
    except Exception as error:  # zip, pickle, safetensors and torch each have their own for a file that is not whole
        raise ResumeError(f"{path}: is damaged, or no checkpoint of aottrain ({type(error).__name__})") from error
    numbers = [content.get(name) for name in ("format", "step")] if isinstance(content, dict) else []
    if not (numbers and all(type(one) is int and one >= 0 for one in numbers) and numbers[0] in (1, FORMAT, IN_PIECES)):
        raise ResumeError(f"{path}: is not a checkpoint of aottrain (format {FORMAT})")
    if NAME.fullmatch(path.name) and path.name != Entry(content["step"]).file:
        raise ResumeError(f"{path}: is the checkpoint of step {content['step']} under another's name")
    return Loaded(path, content["step"], content)


def _with_weights(path: Path, model: Any, *, file: str, sha256: str, names: dict[str, str]) -> dict[str, Any]:
    """The model's state with what is in the other file of the checkpoint. ResumeError: that is not the one."""
    if not WEIGHTS.fullmatch(file) or not isinstance(model, dict):
        raise ValueError(file)  # it could be any file of this machine's
    weights = path.with_name(file)
    if not weights.is_file():
        raise ResumeError(f"{path}: is damaged: its weights, {file}, are not there")
    if _digest(weights) != sha256:
        raise ResumeError(f"{path}: is damaged: the checksum of its weights, {file}, is wrong")
    return Parts(read_tensors(weights), names, model).joined()


def _fill_in(
    path: Path,
    content: dict[str, Any],
    lazily: bool,
    checks: bool,
    *,
    folder: str,
    files: dict[str, str],
    index: dict[str, Any],
    places: list[Any],
) -> None:
    """What the checkpoint has in pieces. ResumeError: these are not the ones."""
    if not PIECES.fullmatch(folder):
        raise ValueError(folder)
    stored = stored_in(path.with_name(folder), index)
    read = {file for tensor in stored.values() for file, _, _ in tensor.pieces}
    if not (files.keys() >= read and all(map(FILE.fullmatch, files))):
        raise ValueError("a piece without a checksum")
    for file, sha256 in files.items():
        piece = path.with_name(folder) / file
        if not piece.is_file():
            raise ResumeError(f"{path}: is damaged: a piece of it, {folder}/{file}, is not there")
        if checks and _digest(piece) != sha256:
            raise ResumeError(f"{path}: is damaged: the checksum of a piece of it, {folder}/{file}, is wrong")
    put(content, places, stored if lazily else {name: tensor.whole() for name, tensor in stored.items()})


def _check_sums(path: Path) -> None:
    """ResumeError: the file is not the one that was written. Without a list, torch's archive has a checksum of each
    member; torch itself does not compare them."""
    digests = {entry.file: entry.sha256 for entry in CheckpointFolder(path.parent)._entries()}
    if (digest := digests.get(path.name)) is not None:
        if digest != _digest(path):
            raise ResumeError(f"{path}: is damaged: its checksum is not the one in {INDEX}")
        return
    with zipfile.ZipFile(path) as archive:
        if (member := archive.testzip()) is not None:
            raise ResumeError(f"{path}: is damaged: the checksum of its member {member} is wrong")


def load_model(model: torch.nn.Module, loaded: Loaded) -> None:
    """Its parameters and buffers from the checkpoint. ResumeError: that is of another model."""
    _load_into(model, loaded, "model")


def load_optimizer(optimizer: torch.optim.Optimizer, loaded: Loaded) -> None:
    """Its state from the checkpoint. ResumeError: that is of another optimizer."""
    _load_into(optimizer, loaded, "optimizer")


def _load_into(owner: torch.nn.Module | torch.optim.Optimizer, loaded: Loaded, part: str) -> None:
    try:
        owner.load_state_dict(loaded.state[part])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # torch checks one or other
        lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
        raise ResumeError(f"{loaded.path}: is not of this {part}: {' '.join(lines[:2])}") from error


def find(
    resume: str | None,
    folder: CheckpointFolder,
    say: Callable[[str], None],
    key: str = "resume",
    lazily: bool = False,
) -> Loaded | None:
    """What `resume` names: None; "auto" (this run's newest, or None); a checkpoint; a run's or checkpoint folder.

    key: which setting names it. lazily: see `load`. ResumeError: what was named is not there, or cannot be read.
    """
    if resume is None:
        return None
    if resume == "auto":
        return folder.newest(say, lazily)
    path = file_of_pieces(Path(resume).expanduser())
    if not path.is_dir():
        return load(path, lazily)
    directory = checkpoint_folder(path)
    is_own = directory.resolve() == folder.directory.resolve()
    newest = (folder if is_own else CheckpointFolder(directory)).newest(say, lazily)
    if newest is None:
        raise ResumeError(f"{key}={resume}: {no_checkpoint(path) or 'the folder has no checkpoint'}")
    return newest


@dataclass(frozen=True)
class _Watched:
    """A file, each write to which ends where its folder's save is abandoned."""

    file: BinaryIO
    folder: CheckpointFolder

    def write(self, data: bytes | memoryview) -> int:
        if self.folder.is_abandoned:
            raise OSError(errno.EINTR, "a signal has ended the run")
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
