"""Which examples a step sees: a function of (seed, step) alone.

Nothing is carried from step to step, so a resumed run is at the right place at once, and every engine sees the same.
A source has examples by number (`Source`); a view says which numbers a step takes (`SourceBatches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aottrain.data.order import Numbers, in_epochs, keys_of, step_generator
from aottrain.data.tokens.tokenizer import Bytes
from aottrain.step import Batch

_HELD_OUT_STREAM = 1 << 62  # step numbers never get here, so held-out draws are not training draws
_PREPARING_STREAM = 3 << 60  # nor here: what is drawn for a batch is independent of which examples are in it


class Batches(Protocol):
    """What the trainer asks of data. Tensors are on `device`; a batch has `batch_size` examples."""

    tokens_per_batch: int  # 0 where examples have no tokens
    batch_size: int
    fingerprint: str
    notes: tuple[str, ...]  # what to say about it before training, a line each
    examples_per_epoch: int  # 0 where there are no epochs
    codec: Codec | None  # None where examples are no text

    def at(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step."""
        ...

    def held_out(self, num_batches: int) -> list[Batch]:
        """The same batches each time, none of them trained on."""
        ...


class Codec(Protocol):
    """Between text and the tokens that a model reads."""

    bytes_per_token: float
    """Of the held-out text: what a loss in nats a token is divided by to be one in nats a byte."""

    def encode(self, text: str) -> bytes | list[int]: ...

    def decode(self, tokens: bytes | list[int]) -> str: ...


class Examples(Protocol):
    """A part of a source: its examples by number, from 0."""

    def __len__(self) -> int: ...

    def read(self, numbers: Numbers, keys: Numbers | None) -> Batch:
        """These examples as tensors on the CPU. keys: uint64, from which follows what is drawn for each where it is
        trained on (a crop, say); None where nothing is to be drawn."""
        ...


@dataclass(frozen=True)
class Source:
    """Data that has been found to be sound."""

    train: Examples
    held_out: Examples
    """None of them is in `train`."""
    fingerprint: str
    """Of the content, wherever it lies: the same for the same examples."""
    notes: tuple[str, ...] = ()
    """What to say about it before training, a line each."""
    tokens_per_example: int = 0
    """0 where examples have no tokens."""
    codec: Codec | None = None
    """None where examples are no text, or nothing says which."""
    is_decoded: bool = False
    """Whether reading an example takes work (a picture from its file), so that it is done ahead."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on the device."""
    if device.type == "cuda":  # pinned, so that the copy does not wait for the kernels already queued
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
    return tuple(tensor.to(device) for tensor in batch)


@dataclass(frozen=True)
class SourceBatches:
    """Examples of a source, drawn at random or epoch by epoch.

    The examples of a whole step are numbered at once, so `accumulate` micro-batches of n are one batch of
    accumulate * n.
    """

    source: Source
    batch_size: int
    accumulate: int
    seed: int
    device: torch.device
    order: str = "random"

    @property
    def tokens_per_batch(self) -> int:
        return self.batch_size * self.source.tokens_per_example

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def codec(self) -> Codec | None:
        return self.source.codec

    @property
    def examples_per_epoch(self) -> int:
        return len(self.source.train) if self.order == "epochs" else 0

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.examples_per_epoch:
            return self.source.notes
        steps = self.examples_per_epoch / (self.batch_size * self.accumulate)
        return (*self.source.notes, f"an epoch is {self.examples_per_epoch:,} examples, {steps:,.1f} steps")

    def at(self, step: int) -> list[Batch]:
        return [to_device(batch, self.device) for batch in self.on_cpu(step)]

    def on_cpu(self, step: int) -> list[Batch]:
        """As `at`, where they are read."""
        numbers = self._numbers(step)
        keys = keys_of(self.seed, self._places(step))
        return [self.source.train.read(row, own) for row, own in zip(numbers, keys, strict=True)]

    def held_out(self, num_batches: int) -> list[Batch]:
        """Examples evenly spaced over those held out."""
        last = len(self.source.held_out) - 1
        exact = torch.float32 if last < 1 << 24 else torch.float64  # float32 would round to examples that are not there
        starts = torch.linspace(0, last, num_batches * self.batch_size, dtype=exact).long()
        rows = starts.view(num_batches, self.batch_size).numpy()
        return [to_device(self.source.held_out.read(row, None), self.device) for row in rows]

    def _numbers(self, step: int) -> Numbers:
        """Of the examples of a step, (accumulate, batch_size)."""
        size = len(self.source.train)
        if self.order == "epochs":
            return in_epochs(self._places(step), size, self.seed)
        shape = (self.accumulate, self.batch_size)
        return torch.randint(size, shape, generator=step_generator(self.seed, step)).numpy()

    def _places(self, step: int) -> Numbers:
        """Of a step's examples in the stream of all, (accumulate, batch_size)."""
        count = self.accumulate * self.batch_size
        return ((step - 1) * count + np.arange(count)).reshape(self.accumulate, self.batch_size)


@dataclass(frozen=True)
class MadeBatches:
    """Batches that a recipe makes itself: `make(batch_size, generator) -> Batch`."""

    make: Callable[[int, torch.Generator], Batch]
    batch_size: int
    accumulate: int
    seed: int
    device: torch.device
    tokens_per_batch: int = 0
    fingerprint: str = "made by the recipe"
    notes: tuple[str, ...] = ()
    examples_per_epoch: int = 0
    codec: Codec | None = Bytes()

    def at(self, step: int) -> list[Batch]:
        generator = step_generator(self.seed, step)
        return [to_device(self.make(self.batch_size, generator), self.device) for _ in range(self.accumulate)]

    def held_out(self, num_batches: int) -> list[Batch]:
        generator = step_generator(self.seed, _HELD_OUT_STREAM)
        return [to_device(self.make(self.batch_size, generator), self.device) for _ in range(num_batches)]


@dataclass(frozen=True)
class ChangedBatches:
    """The base of what changes other batches, whose figures stay."""

    batches: Batches

    @property
    def tokens_per_batch(self) -> int:
        return self.batches.tokens_per_batch

    @property
    def batch_size(self) -> int:
        return self.batches.batch_size

    @property
    def fingerprint(self) -> str:
        return self.batches.fingerprint

    @property
    def notes(self) -> tuple[str, ...]:
        return self.batches.notes

    @property
    def examples_per_epoch(self) -> int:
        return self.batches.examples_per_epoch

    @property
    def codec(self) -> Codec | None:
        return self.batches.codec


@dataclass(frozen=True)
class PreparedBatches(ChangedBatches):
    """Other batches as a recipe wants them: `prepare(batch, generator) -> Batch`, with draws of its own."""

    prepare: Callable[[Batch, torch.Generator], Batch]
    seed: int

    def at(self, step: int) -> list[Batch]:
        generator = step_generator(self.seed, _PREPARING_STREAM + step)
        return [self.prepare(batch, generator) for batch in self.batches.at(step)]

    def held_out(self, num_batches: int) -> list[Batch]:
        generator = step_generator(self.seed, _PREPARING_STREAM + _HELD_OUT_STREAM)
        return [self.prepare(batch, generator) for batch in self.batches.held_out(num_batches)]
