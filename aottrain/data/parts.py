"""The part of each batch that is one process's, where several train together."""

from __future__ import annotations

from dataclasses import dataclass

from aottrain.data.batches import Batches, Codec
from aottrain.errors import ConfigError
from aottrain.step import Batch


@dataclass(frozen=True)
class PartBatches:
    """Of each of these batches the examples of process `rank`, of `size`: together they are the batch, whatever their
    number. Figures are those of the whole batch.

    ConfigError: a batch cannot be cut into so many.
    """

    batches: Batches
    rank: int
    size: int

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

    def at(self, step: int) -> list[Batch]:
        return [self._part(batch) for batch in self.batches.at(step)]

    def held_out(self, num_batches: int) -> list[Batch]:
        return [self._part(batch) for batch in self.batches.held_out(num_batches)]

    def _part(self, batch: Batch) -> Batch:
        count = len(batch[0])
        if count % self.size or any(tensor.ndim == 0 or len(tensor) != count for tensor in batch):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in batch)
            raise ConfigError(f"parallel: a batch of tensors {shapes} cannot be divided among {self.size} processes")
        each = count // self.size
        return tuple(tensor[self.rank * each : (self.rank + 1) * each].clone() for tensor in batch)
