"""A compiled step against eager: same batch, same random numbers, so the same loss, gradients and buffers.

Two right programs round differently, and some steps magnify that: an activation that rounding carries across zero has
another gradient, and in bfloat16 or TF32 every product is off by a per mille. So what is beyond the tolerance is
compared with eager's own error: eager runs again, several times, with each parameter and number of the batch changed by
about one rounding of the arithmetic (as in the stochastic error estimates of Vignes, 1993, "A stochastic arithmetic for
reliable scientific computation"). A result is wrong where it is off by several times as much as eager is from itself.
"""

from __future__ import annotations

import math
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


# Runs of eager that estimate its own error, and how many times as far off a right program may be: each of the two
# differs from the exact answer by such an error, and the largest of a few samples underestimates the largest of all.
NOISE_SAMPLES, NOISE_FACTOR = 4, 4.0


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward gave: copies, by name."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Verification:
    """Relative errors: of the loss, and of the worst gradient or buffer, each relative to eager's largest magnitude.

    noise: eager's own error of the worst value that was beyond its tolerance; None where nothing was.
    """

    step: int
    loss_error: float
    grad_error: float
    worst: str
    noise: float | None = None

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
    numbers that the compiled step draws. NumericsError names the first value that is beyond its tolerance and beyond
    what eager's own rounding explains.
    """
    with preserved(module):
        compiled = _outcome(lambda: step([batch]).loss, module)
    with preserved(module):
        eager = _outcome(lambda: _eager_loss(module, batch, eager_draws), module)

    loss_error, grad_errors = relative_error(compiled.loss, eager.loss), dict(_errors(compiled, eager, step_number))
    beyond = [name for name, error in grad_errors.items() if not error <= config.grad_tolerance]
    noise: dict[str, float] = {}
    if beyond or not loss_error <= config.loss_tolerance:
        noise = _eager_noise(module, batch, eager, eager_draws, step_number)
    allowed = config.loss_tolerance + NOISE_FACTOR * noise.get("loss", 0.0)
    if not loss_error <= allowed:
        raise NumericsError(
            f"step {step_number}: the compiled loss is {compiled.loss.item():.8g}, eager's is {eager.loss.item():.8g}; "
            f"relative error {loss_error:.3g}, allowed is verify.loss_tolerance={config.loss_tolerance:g}"
            + _explained(noise.get("loss"))
        )
    for name in beyond:
        if not grad_errors[name] <= config.grad_tolerance + NOISE_FACTOR * noise[name]:
            raise NumericsError(
                f"step {step_number}: the compiled {name} differs from eager's by {grad_errors[name]:.3g} of its "
                f"largest magnitude; allowed is verify.grad_tolerance={config.grad_tolerance:g}"
                + _explained(noise[name])
            )
    worst = max(grad_errors, key=lambda name: grad_errors[name], default="")
    return Verification(step_number, loss_error, grad_errors.get(worst, 0.0), worst, max(noise.values(), default=None))


def _explained(noise: float | None) -> str:
    return "" if noise is None else f" and {NOISE_FACTOR:g} times eager's own rounding error, {noise:.3g}"


def _eager_noise(
    module: nn.Module,
    batch: Batch,
    eager: Outcome,
    draws: Callable[[], AbstractContextManager],
    step_number: int,
) -> dict[str, float]:
    """By name, how far eager is from itself when its inputs are changed by about one rounding: the largest of several
    relative errors, of the loss under "loss". Parameters are put back bit for bit."""
    unit = _rounding_unit(module)
    generator = torch.Generator(next(module.parameters()).device).manual_seed(0)

    def changed(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        factor = torch.empty_like(value, dtype=torch.float32).uniform_(-unit, unit, generator=generator)
        return (value.double() * (1 + factor.double())).to(value.dtype)

    parameters = list(module.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    noise: dict[str, float] = {}
    try:
        for _ in range(NOISE_SAMPLES):
            with torch.no_grad():
                for parameter, value in zip(parameters, kept, strict=True):
                    parameter.copy_(changed(value))
                other = tuple(changed(value) for value in batch)
            with preserved(module):
                sample = _outcome(lambda: _eager_loss(module, other, draws), module)  # noqa: B023
            errors = {"loss": relative_error(sample.loss, eager.loss), **dict(_errors(sample, eager, step_number))}
            noise = {name: max(error, noise.get(name, 0.0)) for name, error in errors.items()}
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
    # Where rounding alone makes infinities or NaNs, nothing is excused by it.
    return {name: error if math.isfinite(error) else 0.0 for name, error in noise.items()}


def _rounding_unit(module: nn.Module) -> float:
    """About the relative error of one product of the step, by the precision that it multiplies in."""
    if getattr(module, "precision", "fp32") == "bf16":
        return 2.0**-7  # bfloat16 keeps 8 bits: one rounding of each operand
    on_cuda = next(module.parameters()).device.type == "cuda"
    if on_cuda and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        return 2.0**-10  # TF32 keeps 11 bits; convolutions use it unless they are told not to
    return 2.0**-20  # float32 keeps 24 bits, and rounds each of the additions, too


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
