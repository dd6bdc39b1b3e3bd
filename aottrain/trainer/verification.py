"""A compiled step against eager: same batch, same random numbers, so the same loss, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from aottrain.errors import NumericsError
from aottrain.metrics.preserve import preserved
from aottrain.step import Batch, TrainStep

if TYPE_CHECKING:
    from aottrain.config import VerifyConfig


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward gave: copies, by name."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """Relative errors: of the loss, and of the worst gradient or buffer, each relative to eager's largest magnitude."""

    step: int
    loss_error: float
    grad_error: float
    worst: str

    @property
    def max_error(self) -> float:
        return max(self.loss_error, self.grad_error)


def verify_step(
    step_number: int,
    step: TrainStep,
    module: nn.Module,
    batch: Batch,
    config: VerifyConfig,
    eager_draws: Callable[[], AbstractContextManager],
) -> Verification:
    """Run `batch` through `step` and through the eager `module`, and compare. Leaves no trace in either.

    module: shares its parameters and buffers with the step. eager_draws: a context in which eager draws the random
    numbers that the compiled step draws. NumericsError names the first value beyond its tolerance, and the error.
    """
    with preserved(module):
        compiled = _outcome(lambda: step([batch]).loss, module)
    with preserved(module):
        eager = _outcome(lambda: _eager_loss(module, batch, eager_draws), module)

    loss_error = relative_error(compiled.loss, eager.loss)
    if not loss_error <= config.loss_tolerance:
        raise NumericsError(
            f"step {step_number}: the compiled loss is {compiled.loss.item():.8g}, eager's is {eager.loss.item():.8g}; "
            f"relative error {loss_error:.3g}, allowed is verify.loss_tolerance={config.loss_tolerance:g}"
        )
    worst_name, worst_error = "", 0.0
    for name, error in _errors(compiled, eager, step_number):
        if not error <= config.grad_tolerance:
            raise NumericsError(
                f"step {step_number}: the compiled {name} differs from eager's by {error:.3g} of its largest "
                f"magnitude; allowed is verify.grad_tolerance={config.grad_tolerance:g}"
            )
        if error >= worst_error:
            worst_name, worst_error = name, error
    return Verification(step_number, loss_error, worst_error, worst_name)


def _eager_loss(module: nn.Module, batch: Batch, draws: Callable[[], AbstractContextManager]) -> torch.Tensor:
    with draws():
        loss = module(*batch)
    loss.backward()
    return loss


def _outcome(run: Callable[[], torch.Tensor], module: nn.Module) -> Outcome:
    loss = run().detach().clone()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return Outcome(loss, grads, {name: buffer.detach().clone() for name, buffer in module.named_buffers()})


def _errors(compiled: Outcome, eager: Outcome, step_number: int):
    """(what, relative error) for each gradient and buffer, in the module's order."""
    for name, expected in eager.grads.items():
        actual = compiled.grads[name]
        if (actual is None) != (expected is None):
            has, lacks = ("eager", "the compiled step") if actual is None else ("the compiled step", "eager")
            raise NumericsError(f"step {step_number}: {has} has a gradient for {name}, {lacks} has None")
        if expected is not None:
            yield f"gradient of {name}", relative_error(actual, expected)
    for name, expected in eager.buffers.items():
        yield f"buffer {name}", relative_error(compiled.buffers[name], expected)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |actual - expected| / max |expected|; 0 where they are equal, NaNs in the same places included.

    Infinite where only one of the two is finite somewhere, or the expected value is all zeros and the actual is not.
    """
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.numel() == 0 or torch.allclose(actual, expected, rtol=0, atol=0, equal_nan=True):
        return 0.0
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    if error != error or scale == 0:
        return float("inf")
    return error / scale
