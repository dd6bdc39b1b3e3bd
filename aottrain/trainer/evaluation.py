"""Held-out data: the loss of a module on it, whoever runs it, and how many of its answers are right."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aottrain.config.extensions.metrics import LOSS, Judge
from aottrain.errors import NumericsError, RecipeError
from aottrain.metrics.preserve import preserved_rng
from aottrain.metrics.sinks import OWN, OWN_NAME
from aottrain.step import Batch
from aottrain.trainer.engines import LossModule

if TYPE_CHECKING:
    from aottrain.config.run import TrainerConfig
    from aottrain.data.batches import Batches
    from aottrain.trainer.job import Job

TOP = 5
SAMPLES = "samples.jsonl"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside there are no gradients and no dropout; after it mode and random streams are those from before."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), preserved_rng():
            yield
    finally:
        module.train(was_training)


class LeftError(Exception):
    """An evaluation was left: of a part of the batches there is no figure."""


Ends = Callable[[], bool]
"""Asked before each batch: whether the evaluation is to be left. Of several processes all ask and hear the same."""


def _never() -> bool:
    return False


def _each(batches: Sequence[Batch], shares: Sequence[float], ends: Ends) -> Iterator[tuple[Batch, float]]:
    for pair in zip(batches, shares, strict=True):
        if ends():
            raise LeftError
        yield pair


def mean_loss(
    call: Callable[..., torch.Tensor],
    shares: Callable[[Sequence[Batch]], Sequence[float]],
    batches: Sequence[Batch],
    ends: Ends = _never,
) -> float:
    """The mean of `call(*batch)`, a scalar, over the batches by their shares (`LossModule.shares`). What has no share
    is not run: the mean of nothing is no number. LeftError: `ends` says so."""
    parts = [call(*batch).double() * share for batch, share in _each(batches, shares(batches), ends) if share]
    return torch.stack(parts).sum().item() if parts else 0.0


def evaluate(job: Job, num_batches: int, ends: Ends = _never) -> float | None:
    """Mean loss over the same held-out batches each time, eager, whatever engine trains; of averaged weights where
    there are some. The recipe's own metrics of them are `job.own_figures` then. None: `ends` says that it is to be
    left, or there are no batches."""
    if num_batches == 0 or ends():
        return None
    world = job.module.world
    world.broadcast_buffers(job.module)
    try:
        with evaluating(job.module), job.with_averages(), job.module.whole():
            batches = job.batches.held_out(num_batches)
            loss = world.total(mean_loss(job.module, job.module.shares, batches, ends))
            job.own_figures = own_figures(job, batches, ends)
    except LeftError:
        return None
    return loss


def held_out_figures(job: Job, val_loss: float | None) -> dict[str, float | None]:
    """Of the last evaluation, by the names of their columns."""
    own = {} if val_loss is None else {f"{OWN}{name}": value for name, value in job.own_figures.items()}
    return {"val/loss": val_loss, **own}


def note_held_out(job: Job, summary: dict[str, Any], val_loss: float | None) -> None:
    """In the summary."""
    if val_loss is None:
        return
    summary["val_loss"] = val_loss
    if job.own_figures:
        summary["val_metrics"] = dict(job.own_figures)
    best = summary.get("best_val_loss")
    summary["best_val_loss"] = val_loss if best is None else min(best, val_loss)
    if (bits := bits_per_byte(val_loss, job.batches)) is not None:
        summary["val_bits_per_byte"] = bits


def own_figures(job: Job, batches: Sequence[Batch], ends: Ends = _never) -> dict[str, float]:
    """What the recipe's `metrics` gives, by name: the means over the batches by their shares, as that of the loss.
    To be called within `evaluating`. RecipeError: it gives something else. LeftError: `ends` says so."""
    if job.metrics is None:
        return {}
    means: dict[str, float] = {}
    for batch, share in _each(batches, job.module.shares(batches), ends):
        with job.module.casts(batch):
            values = _checked_metrics(job.metrics(job.module.model, batch))
        if means and values.keys() != means.keys():
            raise RecipeError(f"metrics(model, batch) gave {_listed(means)}, then {_listed(values)}")
        means = {name: means.get(name, 0.0) + (share * value if share else 0.0) for name, value in values.items()}
    world = job.module.world
    first, *others = world.gather(list(means))
    if (other := next((names for names in others if {*names} != {*first}), None)) is not None:
        raise RecipeError(f"metrics(model, batch) gave {_listed(first)} in one process, {_listed(other)} in another")
    return {name: world.total(means[name]) for name in first}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def metric_names(job: Job) -> tuple[str, ...]:
    """Of the recipe's own metrics, as it gives them for one held-out batch: what is wrong with them is found before
    training. RecipeError: see `own_figures`."""
    if job.metrics is None:
        return ()
    with evaluating(job.module), job.module.whole():
        return tuple(own_figures(job, job.batches.held_out(1)))


def _checked_metrics(found: Any) -> dict[str, float]:
    must = "metrics(model, batch) must return a dictionary of names and numbers"
    if not isinstance(found, Mapping):
        raise RecipeError(f"{must}; it returned {type(found).__name__}")
    values = {}
    for name, value in found.items():
        if not (isinstance(name, str) and OWN_NAME.fullmatch(name)) or name == "loss":
            raise RecipeError(f"{must}; {name!r} is no name: letters, digits, . - and _, and not loss")
        is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_one and not isinstance(value, int | float):
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise RecipeError(f"{must}; {name} is {what}")
        values[name] = float(value)
    return values


def add_sample(job: Job, step: int, num_bytes: int, folder: Path, say: Callable[[str], None]) -> None:
    """What the model writes after this step, as a line of JSON at the end of samples.jsonl. It changes nothing of the
    run: a model that writes nothing, and a file that cannot be written, are said and passed over."""
    if job.sample is None or not num_bytes:
        return
    try:
        with evaluating(job.module), job.with_averages():
            line = json.dumps({"step": step, "text": job.sample(num_bytes)})
    except NumericsError as error:
        say(f"warning: after step {step} {error}; going on")
        return
    try:
        with (folder / SAMPLES).open("ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if file.read() not in (b"", b"\n"):  # a run was killed in the middle of a line
                file.write(b"\n")
            file.write(f"{line}\n".encode())
    except OSError as error:
        say(f"warning: {folder / SAMPLES}: cannot be written: {error.strerror}; going on")


@dataclass
class Patience:
    """Ends a run whose held-out loss falls no more, or whose metric gets no better. Evaluations that are made for a
    checkpoint alone do not count, so that a run ends where one would that was not asked for any."""

    limit: int | None = None
    """Evaluations without a better figure; None: it never ends."""
    judge: Judge = Judge()
    best: float | None = None
    num_waited: int = 0

    def __post_init__(self) -> None:
        self.best = self.judge.worst if self.best is None else self.best

    def add(self, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """What an evaluation gave."""
        value = self.judge.figure(loss, metrics)
        is_better = value is not None and self.best is not None and self.judge.is_better(value, self.best)
        self.best, self.num_waited = (value, 0) if is_better else (self.best, self.num_waited + 1)

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.num_waited >= self.limit

    def __str__(self) -> str:
        waited = "1 evaluation" if self.num_waited == 1 else f"{self.num_waited} evaluations in turn"
        side = "above" if self.judge.is_highest else "below"
        return f"{waited} without a {self.judge.title} {side} {self.best:.4f} (trainer.patience)"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_waited": self.num_waited, "judge": str(self.judge)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a run that was judged by something else nothing counts."""
        if state.get("judge", LOSS) != str(self.judge):
            return
        self.best, self.num_waited = state["best"], state["num_waited"]


def patience_of(trainer: TrainerConfig) -> Patience:
    """As the settings have it."""
    return Patience() if trainer.patience is None else Patience(trainer.patience, Judge.of(trainer.judge_by))


def perplexity(loss: float, batches: Batches) -> float | None:
    """Of a loss in nats a token; infinity where no number is as large; None where there are no tokens."""
    if not batches.tokens_per_batch:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, batches: Batches) -> float | None:
    """Of a loss in nats a token, so that tokenizers compare; None where nothing says how many bytes a token stands
    for."""
    codec = batches.codec if batches.tokens_per_batch else None
    return None if codec is None else loss / codec.bytes_per_token / math.log(2)


class Scored(nn.Module):
    """A loss module, and what its recipe predicts, as one module: forward(*batch) -> (loss, what `predict` gives)."""

    def __init__(self, module: LossModule, predict: Callable[[nn.Module, Batch], Any]):
        super().__init__()
        self.module = module
        self.predict = predict

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss = self.module(*batch)
        with self.module.casts(batch):
            return loss, self.predict(self.module.model, batch)


@dataclass
class Tally:
    """Right answers among those that were given."""

    num_labels: int = 0
    num_right: int = 0
    num_near: int = 0
    """Labels among the TOP of the highest scores."""
    num_classes: int = 0

    def add(self, predicted: Any) -> None:
        """Count (scores of (n, num_classes), labels int64 of (n,)); a label below 0 stands for none. RecipeError: it is
        something else."""
        scores, labels = _checked_scores(predicted)
        there = labels >= 0
        scores, labels = scores[there], labels[there]
        self.num_classes = scores.shape[1]
        near = scores.topk(min(TOP, self.num_classes), dim=1).indices == labels[:, None]
        self.num_labels += len(labels)
        self.num_right += int((scores.argmax(dim=1) == labels).sum())
        self.num_near += int(near.any(dim=1).sum())

    @property
    def accuracy(self) -> float | None:
        """Fraction of the labels that have the highest score; None where there are none."""
        return self.num_right / self.num_labels if self.num_labels else None

    @property
    def top_accuracy(self) -> float | None:
        """Fraction among the TOP of the highest scores; None where there are no more classes."""
        return self.num_near / self.num_labels if self.num_labels and self.num_classes > TOP else None


def _checked_scores(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pair = tuple(value) if isinstance(value, tuple | list) else ()
    if len(pair) == 2 and all(isinstance(part, torch.Tensor) for part in pair):
        scores, labels = pair
        if scores.ndim == 2 and labels.shape == scores.shape[:1] and not labels.is_floating_point():
            return scores, labels
        kind = f"tensors of shape {list(scores.shape)} and {list(labels.shape)}, {labels.dtype}"
    else:
        kind = type(value).__name__
    must = "a tensor of scores (n, num_classes) and one of labels (n,), whole numbers"
    raise RecipeError(f"predict(model, batch) must return {must}; it returned {kind}")
