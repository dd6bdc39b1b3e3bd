"""One training step, whoever runs it: eager PyTorch, torch.compile, or a module that aottrain compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from aottrain.errors import RecipeError
from aottrain.explain.report import CompileReport
from aottrain.step import Batch, Rungs, StepResult


class LossModule(nn.Module):
    """A model and its loss as one module: forward(*batch) -> scalar. This is what an engine compiles.

    precision="bf16": autocast, entered within the forward, so that every engine sees the same casts.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        precision: str = "fp32",
        weight: Callable[[Batch], Any] | None = None,
    ):
        """weight: of a batch, how many things its loss is the mean of; None where each batch has as many."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.precision = precision
        self.weight = weight

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with self.casts(batch):
            loss = self.loss(self.model, batch)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # as it is traced, too
            _checked_loss(loss)
        return loss

    def casts(self, batch: Batch) -> AbstractContextManager:
        """In which the model is called: that of the run's precision."""
        return torch.autocast(batch[0].device.type, dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def shares(self, batches: Sequence[Batch]) -> list[float]:
        """How much the loss of each batch counts in their mean; together 1. With `weight` the device is waited for.

        So four micro-batches have the gradient of one batch of all their examples, where padding counts for nothing.
        """
        if self.weight is None or len(batches) == 1:
            return [1 / len(batches)] * len(batches)
        weights = [_checked_weight(self.weight(batch)) for batch in batches]
        total = sum(weights)
        return [weight / total for weight in weights] if total else [1 / len(batches)] * len(batches)


class ModuleStep:
    """TrainStep over `call(*batch) -> scalar loss`, with gradients left in `.grad`.

    With several micro-batches gradients are those of the mean of their losses, in which each has its share.
    shares: see `LossModule.shares`. A micro-batch that has none is not run: the mean of nothing is no number.
    draws: a context in which the forward runs, to say where its random numbers come from.
    explain: says, for a batch whose numbers are wrong, where in the engine they first go wrong.
    compile_for: compiles for a batch without running it; None where the engine only compiles as it runs.

    `splits` parts of each micro-batch run one after the other, as further micro-batches; `rungs` are other programs.
    `doing` says what a step was at when it raised.
    """

    def __init__(
        self,
        engine: str,
        call: Callable[..., torch.Tensor],
        *,
        tokens_per_batch: int,
        shares: Callable[[Sequence[Batch]], Sequence[float]],
        report: CompileReport | None = None,
        draws: Callable[[], AbstractContextManager] = nullcontext,
        explain: Callable[[Batch], str] | None = None,
        compile_for: Callable[[Batch], None] | None = None,
    ):
        self.engine = engine
        self.call = call
        self.tokens_per_batch = tokens_per_batch
        self.shares = shares
        self.report = report
        self.draws = draws
        self.explain = explain
        self.compile_for = compile_for
        self.rungs: Rungs | None = None
        self.splits = 1
        self.doing = "forward"

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        total: torch.Tensor | None = None
        ran_eagerly = []
        parts = self.split(micro_batches)
        for batch, share in parts:
            if not share:
                ran_eagerly.append(False)
                continue
            num_eager_calls = self._num_eager_calls()
            self.doing = "forward"
            with self.draws():
                loss = _checked_loss(self.call(*batch))
            ran_eagerly.append(self._num_eager_calls() > num_eager_calls)
            self.doing = "backward"
            (loss * share if len(parts) > 1 else loss).backward()
            part = loss.detach().float() * share
            total = part if total is None else total + part
        num_samples = sum(len(batch[0]) for batch in micro_batches)
        each = len(parts) // len(micro_batches)
        eagerly = tuple(any(ran_eagerly[i : i + each]) for i in range(0, len(parts), each))
        return StepResult(total, num_samples, self.tokens_per_batch * len(micro_batches), eagerly)

    def split(self, micro_batches: Sequence[Batch]) -> list[tuple[Batch, float]]:
        """The parts that run one after the other, each with its share in the loss."""
        if self.splits == 1:
            return list(zip(micro_batches, self.shares(micro_batches), strict=True))
        parts = [part for batch in micro_batches for part in split_batch(batch, self.splits)]
        weights = [len(part[0]) for part in parts]
        shares = self.shares(parts)
        if len({*shares}) == 1 and len({*weights}) > 1:  # each batch has as many: of unequal parts each its examples
            shares = [weight / sum(weights) for weight in weights]
        return list(zip(parts, shares, strict=True))

    def _num_eager_calls(self) -> int:
        return 0 if self.report is None else self.report.num_eager_calls


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The examples of a batch in this many parts, as equal as they can be. ValueError: it cannot be cut."""
    count = len(batch[0])
    if count < parts or any(tensor.ndim == 0 or len(tensor) != count for tensor in batch):
        raise ValueError(f"a batch of {count} examples cannot be cut into {parts}")
    bounds = [count * i // parts for i in range(parts + 1)]
    return [tuple(tensor[low:high] for tensor in batch) for low, high in zip(bounds, bounds[1:], strict=False)]


def _checked_weight(value: Any) -> float:
    """RecipeError: it is no number from 0."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise RecipeError(f"weight(batch) must return a number of at least 0, it returned {value!r}")
    return float(value)


def _checked_loss(value: Any) -> torch.Tensor:
    """The loss of a batch, where it is one. RecipeError says what else the recipe gave."""
    if not isinstance(value, torch.Tensor):
        problem = f"it returned {type(value).__name__}"
    elif value.numel() != 1:
        problem = f"it returned a tensor of shape {list(value.shape)}"
    elif not value.requires_grad:
        problem = "what it returned does not depend on any parameter that takes a gradient"
    else:
        return value
    raise RecipeError(f"loss(model, batch) must return a scalar tensor to go back from: {problem}")
