"""Batches of a data set: anything with a length and an example for each index, as torch.utils.data.Dataset has them.

An epoch sees every example once, in an order that follows from the seed. What an example draws while it is read (a
crop, a flip) follows from (seed, step), so that a resumed run and every engine see the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from aottrain.data.batches import Codec, to_device
from aottrain.data.order import step_generator
from aottrain.errors import RecipeError
from aottrain.metrics.preserve import preserved_rng
from aottrain.step import Batch

_HELD_OUT_STEP = 0  # no step's number
_ORDER_STREAM = 1 << 61  # of the orders of epochs; no step's number gets there


@dataclass(frozen=True)
class Examples:
    """Some examples of a data set, in order."""

    source: Any
    """The data set."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Tensors of one example. RecipeError: it is something else."""
        example = self.source[self.start + index]
        parts = tuple(example) if isinstance(example, tuple | list) else (example,)
        try:
            return tuple(torch.as_tensor(part) for part in parts)
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = ", ".join(type(part).__name__ for part in parts)
            must = "an example must be a tensor, an array, a number or a tuple of these"
            raise RecipeError(f"{must}, {self.start + index} is ({kinds})") from error


def split(given: Any, held_out: float) -> tuple[Examples, Examples]:
    """The examples to train on and those that are held out: of a pair of data sets, or the last part of one.

    held_out: that part, as a fraction. RecipeError: it is neither, or a part of it is empty.
    """
    is_pair = isinstance(given, tuple | list) and len(given) == 2 and all(_is_data_set(part) for part in given)
    for part in given if is_pair else (given,):
        if not _is_data_set(part):
            must = "a data set (with __len__ and __getitem__) or a pair of them, to train on and held out"
            raise RecipeError(f"data.target must give {must}; it gave {type(part).__name__}")
    if is_pair:
        parts = tuple(Examples(part, 0, len(part)) for part in given)
    else:
        count = len(given)
        num_held_out = min(max(1, int(count * held_out)), count)
        parts = Examples(given, 0, count - num_held_out), Examples(given, count - num_held_out, count)
    train, rest = parts
    if len(train) < 1 or len(rest) < 1:
        sizes = f"{len(train)} examples to train on and {len(rest)} held out"
        raise RecipeError(f"data.target gave {sizes}; each part needs at least one")
    return train, rest


@dataclass(frozen=True)
class ExampleBatches:
    """Batches of a data set's examples, stacked."""

    train: Examples
    rest: Examples
    """Those that are held out."""
    batch_size: int
    accumulate: int
    seed: int
    device: torch.device
    title: str
    """What names the data set."""
    tokens_per_batch: int = 0
    codec: Codec | None = None
    """Nothing says what its numbers stand for."""

    @property
    def examples_per_epoch(self) -> int:
        return len(self.train)

    @property
    def fingerprint(self) -> str:
        """By its name and its lengths; what the examples hold is not looked through."""
        return f"{self.title}, {len(self.train)} + {len(self.rest)} examples"

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"data: {self.title}, {len(self.train):,} examples, {len(self.rest):,} held out",)

    def at(self, step: int) -> list[Batch]:
        first = (step - 1) * self.accumulate * self.batch_size
        with _drawing_from(self.seed, step):
            return [self._batch(first + part * self.batch_size) for part in range(self.accumulate)]

    def held_out(self, num_batches: int) -> list[Batch]:
        """The first of them, again from the start where they are fewer."""
        with _drawing_from(self.seed, _HELD_OUT_STEP):
            starts = (number * self.batch_size for number in range(num_batches))
            return [self._stacked(self.rest, [i % len(self.rest) for i in self._range(start)]) for start in starts]

    def _batch(self, first: int) -> Batch:
        """The examples from the position `first` on, counted over all epochs."""
        places = (divmod(position, len(self.train)) for position in self._range(first))
        return self._stacked(self.train, [_order(len(self.train), self.seed, epoch)[i] for epoch, i in places])

    def _range(self, first: int) -> range:
        return range(first, first + self.batch_size)

    def _stacked(self, examples: Examples, indices: list[int]) -> Batch:
        rows = [examples[index] for index in indices]
        for index, row in zip(indices, rows, strict=True):
            if _form(row) != _form(rows[0]):
                which = f"{examples.start + indices[0]} is {_form(rows[0])}, {examples.start + index} is {_form(row)}"
                raise RecipeError(f"examples of one batch must be alike: example {which}")
        return to_device(tuple(torch.stack(parts) for parts in zip(*rows, strict=True)), self.device)


def _is_data_set(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | dict)


def _form(row: Batch) -> list[str]:
    return [f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}" for part in row]


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=step_generator(seed, _ORDER_STREAM + epoch)).tolist()


@contextmanager
def _drawing_from(seed: int, step: int) -> Iterator[None]:
    """Inside, every default generator starts from (seed, step); after it, all are where they were."""
    python, numbers = random.getstate(), np.random.get_state()
    start = int(torch.randint(1 << 62, (), generator=step_generator(seed, step)))
    with preserved_rng():
        try:
            torch.manual_seed(start)
            random.seed(start)
            np.random.seed(start % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
