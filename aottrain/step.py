"""The seam between the trainer and the engines: what one training step takes and gives.

The trainer never imports the compiler, and the compiler never imports the trainer: both know this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from aottrain.explain.report import CompileReport

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step's forward and backward gave."""

    loss: torch.Tensor
    """Scalar float32, detached: the mean of micro-batches by their shares; on the device still: reading it waits."""
    num_samples: int
    """How many it consumed."""
    num_tokens: int
    """The same; 0 for recipes without tokens."""
    ran_eagerly: tuple[bool, ...] = ()
    """Of each micro-batch whether the engine could not compile it and ran it eagerly; empty for engines that compile
    nothing."""


@runtime_checkable
class ClipsItself(Protocol):
    """An optimizer whose `step` measures and clips the gradients, too: `grad_norm` is then their norm before that."""

    clip_norm: float | None
    skip_nonfinite: bool
    sum_over: Callable[[torch.Tensor], torch.Tensor] | None

    def prepare(self) -> None: ...


class Rungs(Protocol):
    """The programs that a step can go down to. Each move replaces the program, and gives a sentence that says what is
    another now; None where nothing is left."""

    changes: dict[str, Any]
    """What is otherwise than at the start, as options of the engine; plain values."""

    def lower_peak(self, batch: Batch) -> str | None:
        """The plan of next lower peak, compiled for this batch."""
        ...

    def safer(self) -> str | None:
        """The next program that has fewer parts of ours, up to eager."""
        ...

    def take(self, changes: Mapping[str, Any]) -> None:
        """Go to where another run was."""
        ...

    def follow(self, decisions: Mapping[str, Any]) -> None:
        """Take what another process has decided, as its report's decisions give it."""
        ...


class TrainStep(Protocol):
    """Forward and backward over the micro-batches of one optimizer step; gradients are left in `.grad`."""

    engine: str
    report: CompileReport | None
    explain: Callable[[Batch], str] | None
    compile_for: Callable[[Batch], Any] | None  # compile without running; None where that cannot be
    rungs: Rungs | None  # None where there is one program alone
    splits: int  # into how many parts each micro-batch is cut; 1 is none

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult: ...
