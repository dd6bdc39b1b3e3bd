"""Which examples a step sees: a function of (seed, step) alone.

Nothing is carried from step to step, so a resumed run is at the right place at once, and every engine sees the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from aottrain.data.text import Text, cut
from aottrain.step import Batch

_HELD_OUT_STREAM = 1 << 62  # step numbers never get here, so held-out draws are not training draws
_PREPARING_STREAM = 1 << 61  # nor here: what is drawn for a batch is independent of which examples are in it


class Batches(Protocol):
    """What the trainer asks of data. Tensors are on `device`; a batch has `batch_size` examples."""

    tokens_per_batch: int  # 0 where examples have no tokens
    batch_size: int
    fingerprint: str
    notes: tuple[str, ...]  # what to say about it before training, a line each

    def at(self, step: int) -> list[Batch]:
        """The micro-batches of one optimizer step."""
        ...

    def held_out(self, num_batches: int) -> list[Batch]:
        """The same batches each time, none of them trained on."""
        ...


def step_generator(seed: int, step: int) -> torch.Generator:
    """A CPU generator for one step. The pair is mixed (splitmix64), so that neighbours do not draw alike."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return torch.Generator().manual_seed((z ^ (z >> 31)) >> 1)


def _to(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cuda":  # pinned, so that the copy does not wait for the kernels already queued
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch)
    return tuple(tensor.to(device) for tensor in batch)


@dataclass(frozen=True)
class TextBatches:
    """Windows of `context` bytes at random positions of a text.

    One draw gives the positions of a whole step, so `accumulate` micro-batches of n are one batch of accumulate * n.
    """

    text: Text
    batch_size: int
    context: int
    accumulate: int
    seed: int
    device: torch.device

    @property
    def tokens_per_batch(self) -> int:
        return self.batch_size * self.context

    @property
    def fingerprint(self) -> str:
        return self.text.fingerprint

    @property
    def notes(self) -> tuple[str, ...]:
        return self.text.notes

    def at(self, step: int) -> list[Batch]:
        num_starts = len(self.text.train) - self.context
        shape = (self.accumulate, self.batch_size)
        starts = torch.randint(num_starts, shape, generator=step_generator(self.seed, step))
        return [_to(cut(self.text.train, row, self.context), self.device) for row in starts]

    def held_out(self, num_batches: int) -> list[Batch]:
        """Windows evenly spaced over the held-out text."""
        last = len(self.text.held_out) - self.context - 1
        starts = torch.linspace(0, last, num_batches * self.batch_size).long().view(num_batches, self.batch_size)
        return [_to(cut(self.text.held_out, row, self.context), self.device) for row in starts]


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

    def at(self, step: int) -> list[Batch]:
        generator = step_generator(self.seed, step)
        return [_to(self.make(self.batch_size, generator), self.device) for _ in range(self.accumulate)]

    def held_out(self, num_batches: int) -> list[Batch]:
        generator = step_generator(self.seed, _HELD_OUT_STREAM)
        return [_to(self.make(self.batch_size, generator), self.device) for _ in range(num_batches)]


@dataclass(frozen=True)
class PreparedBatches:
    """Other batches as a recipe wants them: `prepare(batch, generator) -> Batch`, with draws of its own."""

    batches: Batches
    prepare: Callable[[Batch, torch.Generator], Batch]
    seed: int

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

    def at(self, step: int) -> list[Batch]:
        generator = step_generator(self.seed, _PREPARING_STREAM + step)
        return [self.prepare(batch, generator) for batch in self.batches.at(step)]

    def held_out(self, num_batches: int) -> list[Batch]:
        generator = step_generator(self.seed, _PREPARING_STREAM + _HELD_OUT_STREAM)
        return [self.prepare(batch, generator) for batch in self.batches.held_out(num_batches)]
