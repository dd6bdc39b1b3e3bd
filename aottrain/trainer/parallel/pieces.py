"""Checkpoints that several processes write together, each the parts that it holds: no process ever has the whole.

The first process names a folder; each writes a file of its own into it, flushes it and the folder, and tells the first
one its checksum, or why it could not. The first writes all else, with these checksums, and then the list, so that what
was not told, or came after a kill, does not count. In the background the processes' threads tell each other through
the store: collectives are the steps', which go on meanwhile.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from aottrain.config.run import TrainerConfig
from aottrain.errors import CheckpointError, ConfigError, ParallelError
from aottrain.trainer.checkpoint import IN_PIECES, CheckpointFolder
from aottrain.trainer.job import Job
from aottrain.trainer.parallel.together import own_state, through
from aottrain.trainer.parallel.world import World, is_of_connection
from aottrain.trainer.weights.files import has_place_for
from aottrain.trainer.weights.pieces import file_name, index_of, rows_held, write_pieces

_LOOKS_S = 0.02
_OTHER_FORM = "parallel.checkpoints=whole"


def state_in_pieces(job: Job) -> dict[str, Any]:
    """For a checkpoint: what `whole_state` gives, with None for each tensor that is in parts, and under "pieces" the
    rows of these that this process holds."""
    shards = job.module.shards
    assert shards is not None
    world = shards.world
    rows: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    places: list[tuple[tuple[Any, ...], str]] = []

    def take(value: Any, name: str, place: tuple[Any, ...]) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        of = {"model": "model", "averages": "averages"}.get(place[0], f"{place[0]}.{place[-1]}")
        called, shape = f"{of}.{name}", tuple(shards.shapes[name])
        if called in rows and place[0] != "model":  # a tied weight has several places there
            raise CheckpointError(f"{_OTHER_FORM} is needed: two values would be called {called}")
        first, end = rows_held(shape[0] if shape else 1, world.part, world.num_parts)
        rows[called], shapes[called] = value.detach()[: end - first], shape
        places.append((place, called))
        return None

    state = through(job, own_state(job), take)
    return {**state, "pieces": {"rows": rows, "shapes": shapes, "places": places}}


def check_types(job: Job) -> None:
    """ConfigError: the files have no place for some weight."""
    shards = job.module.shards
    for place in [] if shards is None else shards.places:
        dtype = place.module._parameters[place.attribute].dtype  # type: ignore[union-attr]
        if not has_place_for(dtype):
            text = f"the files have no place for {dtype}, of which {place.key} is; use {_OTHER_FORM}"
            raise ConfigError(f"parallel.checkpoints=parts: {text}")


def shared_folder(world: World, directory: Path) -> Path:
    """The first process's folder, in all. ConfigError: one of them does not see it, as on a machine of its own."""

    def make() -> tuple[str, str]:
        token = f".seen-{uuid.uuid4().hex}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / token).touch()
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be written: {error.strerror}") from error
        return str(directory.absolute()), token

    path, token = world.from_first(make)
    is_seen = world.gather((Path(path) / token).exists())
    if world.is_first:
        (directory / token).unlink(missing_ok=True)
    if not all(is_seen):
        text = f"process {is_seen.index(False)} does not see {path}; give a hydra.run.dir that all machines share"
        raise ConfigError(f"parallel.checkpoints=parts: {text}, or use {_OTHER_FORM}")
    return Path(path)


class FolderOfPieces(CheckpointFolder):
    """As one process sees it. `begin` and `save` are called by all."""

    is_in_pieces = True

    def __init__(self, directory: Path, keep: TrainerConfig, world: World):
        super().__init__(directory, keep)
        self.world = world
        self._name, self._number, self._in_background = "", 0, False

    def begin(self, step: int, in_background: bool) -> bool:
        """All agree on how it is written, and on a folder. CheckpointError: that cannot be made."""
        self._number += 1
        self._in_background = self.world.all_hold(in_background)
        self._name = self.world.from_first(lambda: self._made(step))
        return self._in_background

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        held_out_loss: float | None = None,
        say: Callable[[str], None] = print,
    ) -> Path:
        """See `CheckpointFolder.save`, whose errors are the first process's, wherever a file cannot be written."""
        if self.world.is_first:
            return super().save(step, state, held_out_loss, say)
        self._tell(self._write_own(state))
        return self.directory

    def _made(self, step: int) -> str:
        """A new folder: one that a killed save has left may have files of other processes in it."""
        number = 0
        while True:
            name = f"step_{step:08d}" + (f".{number}" if number else "")
            try:
                (self.directory / name).mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise CheckpointError(f"{self.directory / name}: cannot be made: {error.strerror}") from error
            else:
                return name

    def _write_weights(self, step: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        told = self._tell(self._write_own(state))
        for rank, each in enumerate(told):
            if "error" in each:
                self._drop(self._name)
                raise OSError(0, f"process {rank}: {each['error']}")
        files = {each["file"]: each["sha256"] for each in told if each}
        pieces = state["pieces"]
        index = index_of(pieces["rows"], pieces["shapes"], self.world.num_parts)
        kept = {"folder": self._name, "files": files, "index": index, "places": pieces["places"]}
        content = {"format": IN_PIECES, "step": step, **state, "pieces": kept}
        return content, {"weights": self._name, "pieces": files}

    def _write_own(self, state: Mapping[str, Any]) -> dict[str, str]:
        """This process's file and its checksum, or what went wrong; nothing where another replica writes the same."""
        if not self.world.is_of_first_replica:
            return {}
        part, count, pieces = self.world.part, self.world.num_parts, state["pieces"]
        path = self.directory / self._name / file_name(part, count)
        try:
            digest = self._written(
                path, lambda write: write_pieces(write, pieces["rows"], pieces["shapes"], part, count)
            )
        except (OSError, RuntimeError) as error:
            return {"error": (error.strerror if isinstance(error, OSError) else None) or str(error)}
        return {"file": path.name, "sha256": digest}

    def _tell(self, own: dict[str, str]) -> list[dict[str, str]]:
        """What each process tells, by rank; in the background the first alone hears it. ParallelError: another process
        has ended. OSError: one says nothing in time, or a signal ends the save."""
        if not self._in_background:
            try:
                return self.world.gather(own)
            except RuntimeError as error:
                if not is_of_connection(error):
                    raise
                raise ParallelError(f"process {self.world.rank} has lost another one within a save: {error}") from error
        key = f"saved/{self._number}"
        self.world.store.set(f"{key}/{self.world.rank}", json.dumps(own))
        if not self.world.is_first:
            return []
        until_s = time.monotonic() + self.world.timeout.total_seconds()
        for rank in range(self.world.size):
            while not self.world.store.check([f"{key}/{rank}"]):
                if self.is_abandoned:
                    raise OSError(0, "the run has ended")
                if time.monotonic() > until_s:
                    raise OSError(0, f"process {rank} has not written its piece in time")
                time.sleep(_LOOKS_S)
        return [json.loads(self.world.store.get(f"{key}/{rank}")) for rank in range(self.world.size)]
