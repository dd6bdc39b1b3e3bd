"""What does not fit into the machine's memory is refused in a sentence, before it is tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from aottrain.config.extensions.own_code import error_text
from aottrain.config.run import RunConfig
from aottrain.data.batches import MadeBatches, SourceBatches
from aottrain.errors import (
    SMALLER,
    CapacityError,
    LibraryError,
    OutOfMemoryError,
    allocator_text,
    is_likely_out_of_memory,
    is_out_of_memory,
)
from aottrain.ir.units import format_bytes
from aottrain.measure.calls import free_bytes
from aottrain.metrics.memory import distinct_bytes, total_bytes
from aottrain.ops.optimizers.masters import wide_bytes
from aottrain.trainer.optim import optimizer_state_bytes

_MANY_EXAMPLES = 10_000  # of fewer nobody asks for more than there is by mistake


def check_weights(build: Callable[[], nn.Module], config: RunConfig, device: torch.device) -> None:
    """CapacityError where weights, their gradients and the optimizer's state alone are more than there is.

    Before the model is built: a system that gives out memory which it has not got ends the process later, unasked.
    """
    try:
        with torch.device("meta"):
            model = build()
        parameters = list(model.parameters())
    except Exception:  # a model may need real numbers to be built: then what it needs is seen when it is
        return
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *model.buffers()))
    trained = [tensor for tensor in parameters if tensor.requires_grad]
    needed += sum(tensor.numel() * tensor.element_size() for tensor in trained)
    needed += 0 if config.trainer.ema is None else wide_bytes(trained)
    needed += optimizer_state_bytes(model, config.optimizer, config.trainer.precision)
    _refuse_beyond(total_bytes(device), needed, device, "weights, gradients and optimizer state take")


def check_batch(batches: SourceBatches | MadeBatches, device: torch.device) -> None:
    """CapacityError where the examples of a step alone are more than there is, by what one and two of them take: before
    they are read, for the same reason."""
    count = batches.batch_size * batches.accumulate
    if count < _MANY_EXAMPLES:
        return
    try:
        few = [dataclasses.replace(batches, batch_size=size, accumulate=1).at(1) for size in (1, 2)]
    except Exception:  # what is wrong with the data is told where a step's examples are read
        return
    one, two = (distinct_bytes(tensor for batch in each for tensor in batch) for each in few)
    needed = one + (count - 1) * (two - one)
    smaller = "a smaller data.batch_size or trainer.accumulate is needed"
    _refuse_beyond(total_bytes(device), needed, device, f"the {count:,} examples of a step take", smaller)


def check_peak(peak_bytes: int | None, device: torch.device) -> str:
    """What to say about a step's predicted peak, "" if nothing. CapacityError where the machine has less."""
    if peak_bytes is None:
        return ""
    _refuse_beyond(total_bytes(device), peak_bytes, device, "a step's predicted peak is")
    if device.type == "cpu" and peak_bytes > (free := free_bytes(device)):
        return f"warning: a step's predicted peak is {format_bytes(peak_bytes)}; {format_bytes(free)} are free now"
    return ""


def _refuse_beyond(available: int, needed: int, device: torch.device, what: str, smaller: str = SMALLER) -> None:
    if needed > available:
        has = f"this {'device' if device.type == 'cuda' else 'machine'} has {format_bytes(available)}"
        raise CapacityError(f"{what} {format_bytes(needed)}, {has}: {smaller}")


@contextmanager
def allocator_errors(doing: list[str], files: Callable[[], Iterable[str]] = tuple) -> Iterator[None]:
    """Inside, an allocator that has no more raises OutOfMemoryError, which says what was done then: the last of
    `doing`. LibraryError: a library failed that does not say whether it was that; it has the recipe's line, if any."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_likely_out_of_memory(error):
            raise
        text = allocator_text(error)
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"memory ran out while {doing[-1]}: {text}; {SMALLER}") from error
        place = error_text(error, files())
        text = f"{doing[-1]}: {place or text}"
        raise LibraryError(f"{text}; either memory ran out, and {SMALLER}, or oneDNN has no such call") from error
