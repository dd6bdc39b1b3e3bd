"""Checkpoints of a run that is going on: what they hold, and who writes them.

Under `trainer.save=background` the state is copied into the host's memory between two steps, and a thread writes the
copy while steps go on. One is written at a time: a second one waits for the first. The last one is written at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aottrain.errors import CheckpointError, ParallelError, ResumeError, is_out_of_memory
from aottrain.metrics.memory import distinct_bytes
from aottrain.toolchain.threads import Thread
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded
from aottrain.trainer.optim import optimizer_state_bytes
from aottrain.trainer.parallel.pieces import state_in_pieces
from aottrain.trainer.parallel.together import random_states, whole_state
from aottrain.trainer.parallel.world import is_of_connection
from aottrain.trainer.reliability.identity import identity
from aottrain.trainer.reliability.memory import rung_of
from aottrain.trainer.weights.pieces import Stored

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig
    from aottrain.trainer.job import Job
    from aottrain.trainer.loop import Run

Say = Callable[[str], None]


def state_of(run: Run) -> dict[str, Any]:
    """What a run needs to go on after the step at hand as if it had never stopped."""
    job, summary = run.job, run.output.summary
    return {
        "identity": identity(run.config, job.batches.fingerprint),
        "schedule_steps": run.total_steps,
        **(state_in_pieces(job) if run.output.checkpoints.is_in_pieces else whole_state(job)),
        **random_states(job.world),
        **run.output.run_ids(),
        "skipped_steps": summary["skipped_steps"],
        "rollbacks": summary.get("rollbacks", 0),
        "batches_left_out": run.num_left_out,
        "losses": list(run.history.window.losses),
        "best_val_loss": summary.get("best_val_loss"),
        "val_loss": summary.get("val_loss"),
        "val_metrics": summary.get("val_metrics"),
        "owed": run.owed,
        "rung": rung_of(job),
        "decisions": None if job.step.report is None else job.step.report.decisions.to_dict(),
        "torch": str(torch.__version__),  # a plain string: its own class would need code to load
    }


def check_held(loaded: Loaded) -> Loaded:
    """The checkpoint, what is read of it being what `state_of` writes. ResumeError: something is not, as of a file that
    another program has made."""
    for name, value in loaded.state.items():
        if name in _HELD and not _HELD[name](value):
            raise ResumeError(f"{loaded.path}: is no checkpoint of aottrain: its {name} is {_told(value)}")
    if missing := [name for name in _NEEDED if name not in loaded.state]:
        raise ResumeError(f"{loaded.path}: is no checkpoint of aottrain: it has no {' and no '.join(missing)}")
    return loaded


def _told(value: Any) -> str:
    if type(value) is str:
        return repr(value[:60])
    is_short = value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 1 << 63)
    return repr(value) if is_short else f"a {type(value).__name__}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _has(value: Any, **kinds: Callable[[Any], bool]) -> bool:
    """Whether it is a dictionary with these keys, and what is there is of its kind."""
    return isinstance(value, dict) and all(name in value and kind(value[name]) for name, kind in kinds.items())


def _is_rung(value: Any) -> bool:
    changes = value.get("changes") if _has(value, splits=lambda splits: _is_count(splits) and splits > 0) else None
    return isinstance(changes, dict) and all(
        (name == "kernel" and change in ("aten", "eager"))
        or (name == "budget" and _is_number(change) and 0 <= change <= 1)
        or (name, change) in (("partition", "budget"), ("modules", ()))
        for name, change in changes.items()
    )


def _is_text(value: Any) -> bool:
    return value is None or type(value) is str


def _is_plain(value: Any, depth: int = 6) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(type(key) is str and _is_plain(value[key], depth - 1) for key in value)
    if type(value) in (list, tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str and _is_number(one) for key, one in value.items())


def _is_row(value: Any) -> bool:
    is_plain = isinstance(value, dict) and _are_numbers({key: one for key, one in value.items() if one is not None})
    return is_plain and _is_count(value.get("step"))


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, torch.Tensor | Stored) for one in value.values())


# What a checkpoint's values may be, by name; of tensors, models and optimizers say the rest.
_HELD: dict[str, Callable[[Any], bool]] = {
    "identity": lambda value: _is_dict(value) and _is_plain(value),
    "decisions": _is_plain,
    "schedule_steps": lambda value: _is_count(value) and value > 0,
    "model": _is_dict,
    "optimizer": lambda value: _has(value, state=_is_dict, param_groups=lambda groups: type(groups) is list),
    "averages": lambda value: value is None or _has(value, values=_are_tensors, num_updates=_is_count),
    "patience": lambda value: _has(value, best=_is_number, num_waited=_is_count),
    "loss_scaling": lambda value: _has(value, scale=_is_number, _growth_tracker=_is_count),
    "random": _is_dict,
    "random_of_others": lambda value: type(value) in (list, tuple) and all(map(_is_dict, value)),
    **dict.fromkeys(("wandb_id", "mlflow_id"), _is_text),
    **dict.fromkeys(("skipped_steps", "rollbacks", "batches_left_out"), _is_count),
    "losses": lambda value: type(value) is list and all(map(_is_number, value)),
    **dict.fromkeys(("best_val_loss", "val_loss"), lambda value: value is None or _is_number(value)),
    "val_metrics": lambda value: value is None or _are_numbers(value),
    "owed": lambda value: value is None or _has(value, is_due=lambda flag: type(flag) is bool, row=_is_row),
    "rung": _is_rung,
}


_NEEDED = ("model", "optimizer", "random", "schedule_steps")


def copy_bytes(job: Job, config: RunConfig) -> int:
    """Of the host's memory, which the copy of a checkpoint takes; 0 where there is none."""
    trainer = config.trainer
    if trainer.save != "background":
        return 0
    values = job.module.model.state_dict().values()
    num_bytes = distinct_bytes(value for value in values if isinstance(value, torch.Tensor))
    averages = 0 if job.averages is None else distinct_bytes(job.averages.values.values())
    return num_bytes + averages + optimizer_state_bytes(job.module, config.optimizer, config.trainer.precision)


class Copier:
    """Copies nests of tensors into blocks of the host's memory, which the next copy takes again."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._used: dict[tuple[int, bool], int] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._nests: dict[int, Any] = {}

    def copy(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """The copy, and what is to be called before it is read: it waits for the device. Tensors of one storage have
        one in the copy, too, and what is one list, tuple or dictionary is one there, so that a file is no larger. The
        copy before must not be needed any more."""
        self._used, self._copies, self._nests = {}, {}, {}
        copied = {key: self._of(value) for key, value in state.items()}
        self._copies, self._nests = {}, {}
        if not torch.cuda.is_initialized():
            return copied, lambda: None
        event = torch.cuda.Event()
        event.record()  # steps that follow are behind the copies on the device's stream
        return copied, event.synchronize

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        if not isinstance(value, dict) and type(value) not in (list, tuple):
            return value
        if id(value) not in self._nests:
            self._nests[id(value)] = self._nest(value)
        return self._nests[id(value)]

    def _nest(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = {key: self._of(item) for key, item in value.items()}
            if type(value) is not OrderedDict:
                return items
            ordered = OrderedDict(items)
            vars(ordered).update(vars(value))  # a state_dict has its modules' versions there
            return ordered
        return type(value)(map(self._of, value))

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.to("cpu", copy=True)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = self._block(storage.nbytes(), tensor.device.type == "cuda")
            self._copies[storage._cdata].copy_(storage, non_blocking=True)
        copy = self._copies[storage._cdata]
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(copy, *place)

    def _block(self, num_bytes: int, pinned: bool) -> torch.UntypedStorage:
        key = num_bytes, pinned
        number = self._used.get(key, 0)
        self._used[key] = number + 1
        blocks = self._blocks.setdefault(key, [])
        if number == len(blocks):
            blocks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage())
        return blocks[number]


@dataclass
class _Save:
    """One that a thread writes."""

    written: Callable[[Path], None]
    is_done: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: BaseException | None = None
    lines: list[str] = field(default_factory=list)
    """To be said in the run, whose lines are the main thread's."""


class Saving:
    """Of one run, as a context manager: its end waits for what is being written, but a signal that ends the run at
    once ends that, too, and so does the end of another process, whose piece would be waited for."""

    def __init__(self, folder: CheckpointFolder, in_background: bool, say: Say):
        self.folder, self.in_background, self.say = folder, in_background, say
        self._copier = Copier()
        self._current: _Save | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        val_loss: float | None,
        written: Callable[[Path], None],
        *,
        must: bool,
    ) -> None:
        """Write a checkpoint, in the background where the run has it so and this is not its last one.

        written: is called with the path in this thread, when the file is there. One that fails on the way is said and
        passed over; must: it is the last one, whose CheckpointError is raised.
        """
        self.wait()
        copy = None if must or not self.in_background else self._copy(state)
        try:
            in_background = self.folder.begin(step, copy is not None)
            if copy is not None and in_background and self._start(step, *copy, val_loss, written):
                return
            path = self.folder.save(step, state, val_loss, self.say)
        except CheckpointError as error:
            if must:
                raise
            self._say_failed(error)
        else:
            written(path)

    def collect(self) -> None:
        """Tell of a save that has ended since; waits for none."""
        if self._current is not None and self._current.is_done.is_set():
            self._end(self._current)

    def wait(self) -> None:
        """Until nothing is being written. A signal that ends the run ends this, too."""
        if self._current is not None:
            self._current.is_done.wait()
            self._end(self._current)

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, KeyboardInterrupt) or _is_lost(error):
                self._abandon()
            self.wait()
        except KeyboardInterrupt:
            self._abandon()
            raise
        except Exception as other:
            if error is None:
                raise
            self.say(f"{type(other).__name__}: {other}")  # it must not hide what ended the run

    def _abandon(self) -> None:
        """The checkpoint that is being written is left, the ones before stay."""
        if self._current is not None:
            self.folder.is_abandoned = True
            self._current.is_done.wait()
            self.folder.is_abandoned = False

    def _copy(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]] | None:
        try:
            return self._copier.copy(state)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._at_once("a copy")
            return None

    def _at_once(self, what: str) -> None:
        self.in_background, self._copier = False, Copier()
        self.say(f"no memory for {what}: from now on checkpoints are written at once, not in the background")

    def _start(
        self,
        step: int,
        state: Mapping[str, Any],
        wait_for_device: Callable[[], None],
        val_loss: float | None,
        written: Callable[[Path], None],
    ) -> bool:
        save = self._current = _Save(written)

        def write() -> None:
            try:
                wait_for_device()
                save.path = self.folder.save(step, state, val_loss, save.lines.append)
            except BaseException as error:
                save.error = error
            finally:
                save.is_done.set()

        try:
            Thread(target=write, name="checkpoint", daemon=True).start()
        except (MemoryError, RuntimeError) as error:
            self._current = None  # or it is waited for
            if not is_out_of_memory(error):
                raise
            self._at_once("a thread")
            return False
        return True

    def _end(self, save: _Save) -> None:
        self._current = None
        for line in save.lines:
            self.say(line)
        if save.path is not None:
            save.written(save.path)
        elif isinstance(save.error, CheckpointError):
            self._say_failed(save.error)
        elif save.error is not None:
            raise save.error

    def _say_failed(self, error: CheckpointError) -> None:
        self.say(f"going on without a checkpoint: {error}")


def _is_lost(error: BaseException | None) -> bool:
    """Whether another process has ended."""
    return isinstance(error, ParallelError) or (isinstance(error, RuntimeError) and is_of_connection(error))
