"""The part of each batch that is one process's, where several train together."""

from __future__ import annotations

from dataclasses import dataclass

from aottrain.data.batches import ChangedBatches
from aottrain.errors import ConfigError
from aottrain.step import Batch


@dataclass(frozen=True)
class PartBatches(ChangedBatches):
    """Of each of these batches the examples of process `rank`, of `size`: together they are the batch, whatever their
    number. Figures are those of the whole batch.

    ConfigError: a batch cannot be cut into so many.
    """

    rank: int
    size: int

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
