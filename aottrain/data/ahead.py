"""Batches read ahead, while the steps before them run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from aottrain.data.batches import SourceBatches, to_device
from aottrain.step import Batch
from aottrain.toolchain.threads import Thread

STEPS_AHEAD = 2


class Read:
    """What a thread of its own reads, or why it cannot."""

    def __init__(self, read: Callable[[], list[Batch]]):
        self._read = read
        self._value: list[Batch] = []
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="aottrain reads ahead")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._read()
        except BaseException as error:  # raised where the batch is asked for
            self._error = error

    def result(self) -> list[Batch]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True)
class ReadAhead(SourceBatches):
    """The same batches; once steps are asked for one after the other, the next STEPS_AHEAD are read in threads.

    Each thread reads one step and ends, so there is nothing to close: when no further step is asked for, none begins.
    They read into the CPU's memory alone. What is pinned and copied to the GPU is so by the thread that trains, since
    pinning allocates, which while a CUDA graph is recorded no other thread may.
    """

    reading: dict[int, Read] = field(default_factory=dict, repr=False, compare=False)
    """By their steps."""
    asked: list[int] = field(default_factory=list, repr=False, compare=False)
    """The step that was asked for last, if any was."""

    def at(self, step: int) -> list[Batch]:
        goes_on = self.asked == [step - 1]
        self.asked[:] = [step]
        known = self.reading.pop(step, None)
        wanted = range(step + 1, step + 1 + STEPS_AHEAD) if goes_on else range(0)
        kept = {number: self.reading.get(number) or Read(partial(self.on_cpu, number)) for number in wanted}
        self.reading.clear()
        self.reading.update(kept)
        read = self.on_cpu(step) if known is None else known.result()
        return [to_device(batch, self.device) for batch in read]
