"""A compiled step against eager: same batches, same random numbers, so the same loss, gradients and buffers.

Two right programs round differently, and some steps magnify that: an activation that rounding carries across zero has
another gradient, and in bfloat16 or TF32 every product is off by a per mille. So what is beyond the tolerance is
compared with eager's own error: eager runs again, several times, with each parameter and number of the batch changed by
about one rounding of the arithmetic, and so are the operands of what sums (as in the stochastic error estimates of
Vignes, 1993, "A stochastic arithmetic for reliable scientific computation"; see operands.py). A result is wrong where
it is off by several times as much as eager is from itself: a tensor's norm, and each element in what surrounds it (see
rounding.py).

What a verified step costs beside itself: its micro-batches once more compiled, once in eager, and where anything is
beyond the tolerance NOISE_SAMPLES times more in eager; two more sets of gradients, and of those that are beyond it half
as much for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aottrain.errors import NumericsError
from aottrain.measure.calls import convolutions_round
from aottrain.metrics.preserve import preserved
from aottrain.step import Batch, TrainStep
from aottrain.trainer.verify.operands import changed_operands
from aottrain.trainer.verify.rounding import FACTOR, distance, explained_by_sums, relative_norm, unexplained

if TYPE_CHECKING:
    from aottrain.config.run import VerifyConfig
    from aottrain.trainer.engines import LossModule


NOISE_SAMPLES = 4  # runs of eager that estimate its own error
GRADIENT = "gradient of "
Draws = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Outcome:
    """What the forwards and backwards of one step gave."""

    loss: Tensor
    values: dict[str, Tensor | None]
    """Gradients and buffers by what they are; None for a gradient that there is none of."""
    ran_eagerly: tuple[bool, ...] = ()
    """Which of the micro-batches no compiled program ran."""

    @property
    def gradients(self) -> dict[str, Tensor | None]:
        """By the names of the parameters."""
        values = self.values.items()
        return {what.removeprefix(GRADIENT): value for what, value in values if what.startswith(GRADIENT)}


@dataclass(frozen=True)
class Verification:
    """Relative errors, by 2-norms, of what a compiled step gave."""

    step: int
    loss_error: float
    grad_error: float
    """Of the gradient or buffer that is the most off, those in `only_rounding` left out."""
    worst: str
    """What that is."""
    noise: float | None = None
    """Eager's own error of the worst value that was beyond its tolerance; None where nothing was, or those in
    `only_rounding` alone."""
    only_rounding: tuple[str, ...] = ()
    """Values that eager's own error is as large as: what they are is rounding, as the gradient of an attention key's
    bias is, which is zero in exact arithmetic."""

    @property
    def max_error(self) -> float:
        return max(self.loss_error, self.grad_error)


@dataclass(frozen=True)
class Reference:
    """Eager runs of one step: the module with the step's micro-batches, each with the random numbers that it drew."""

    step_number: int
    module: LossModule
    micro_batches: Sequence[Batch]
    draws: Sequence[Draws]
    config: VerifyConfig

    def run(self, micro_batches: Sequence[Batch]) -> Outcome:
        """Gradients of the mean of the micro-batches' losses by their shares, as eager accumulates them."""

        def losses() -> Tensor:
            parts = []
            for batch, draws, share in zip(micro_batches, self.draws, self.module.shares(micro_batches), strict=True):
                if share:
                    with draws():
                        loss = self.module(*batch) * share
                    self.module.scaled(loss).backward()
                    parts.append(loss.detach().float())
            device = next(self.module.parameters()).device
            return self.module.reduced(torch.stack(parts).sum() if parts else torch.zeros((), device=device))

        with preserved(self.module):
            return _outcome(losses, self.module)


def run_compiled(step: TrainStep, module: nn.Module, micro_batches: Sequence[Batch]) -> Outcome:
    """What the step gives for these micro-batches, without a trace. module: shares parameters and buffers with it."""
    ran_eagerly: list[tuple[bool, ...]] = []

    def loss() -> Tensor:
        result = step(micro_batches)
        ran_eagerly.append(result.ran_eagerly or (False,) * len(micro_batches))
        return result.loss

    with preserved(module), _in_whole_float32(module):
        outcome = _outcome(loss, module)
    return Outcome(outcome.loss, outcome.values, ran_eagerly[0])


@contextmanager
def _in_whole_float32(module: nn.Module) -> Iterator[None]:
    """On a CPU eager's products and ours leave out different bits where torch.set_float32_matmul_precision lets them:
    what is compared are whole ones."""
    before = torch.get_float32_matmul_precision()
    if before == "highest" or any(parameter.device.type != "cpu" for parameter in module.parameters()):
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def verify_outcome(
    step_number: int,
    compiled: Outcome,
    step: TrainStep,
    module: LossModule,
    micro_batches: Sequence[Batch],
    config: VerifyConfig,
    eager_draws: Draws,
) -> Verification:
    """Compare what `step` gave for the micro-batches with what the eager `module` gives. Leaves no trace in either.

    eager_draws: a context in which eager draws the random numbers that a compiled program draws; what ran eagerly drew
    torch's own. NumericsError names the first value that is beyond its tolerance and beyond what eager's own rounding
    explains, and of several micro-batches the first one of which that is so alone.
    """
    draws = [nullcontext if eagerly else eager_draws for eagerly in compiled.ran_eagerly]
    reference = Reference(step_number, module, micro_batches, draws, config)
    try:
        with _in_whole_float32(module):
            return compare(compiled, reference)
    except NumericsError as error:
        if len(micro_batches) == 1 or module.world.size > 1:
            raise
        guilty, count = _guilty(reference, step), len(micro_batches)
        where = f"each of the {count} micro-batches alone is right"
        if guilty is not None:
            where = f"so it does in micro-batch {guilty} of {count} alone"
        located = NumericsError(f"{error}; {where}")
        located.micro_batch = guilty
        raise located from error


def _guilty(reference: Reference, step: TrainStep) -> int | None:
    """The number of the first micro-batch that is wrong alone."""
    for i, batch in enumerate(reference.micro_batches):
        alone = replace(reference, micro_batches=[batch], draws=[reference.draws[i]])
        try:
            compare(run_compiled(step, reference.module, [batch]), alone)
        except NumericsError:
            return i + 1
    return None


def compare(compiled: Outcome, reference: Reference) -> Verification:
    """NumericsError: they differ by more than rounding explains."""
    module, config, number = reference.module, reference.config, reference.step_number
    eager = reference.run(reference.micro_batches)
    _check_presence(compiled, eager, number)
    loss_error = _loss_error(compiled.loss, eager.loss)
    pairs = {
        what: (_real(actual), _real(value))
        for what, value in eager.values.items()
        if value is not None and (actual := compiled.values[what]) is not None
    }
    distances = {what: distance(*pair) for what, pair in pairs.items()}
    errors = {what: relative_norm(distances[what], value) for what, (_, value) in pairs.items()}
    tolerance = config.grad_tolerance
    beyond = [
        what
        for what, (_, value) in pairs.items()
        if not errors[what] <= tolerance or not explained_by_sums(distances[what], value, tolerance)
    ]
    beyond = list(dict.fromkeys(what for each in module.world.gather(beyond) for what in each))
    samples: list[Outcome] = []
    if beyond or not loss_error <= config.loss_tolerance:
        samples = list(_samples(module, reference, eager, set(beyond)))
    loss_noise = _worst(sample.loss.item() for sample in samples)
    if not loss_error <= config.loss_tolerance + FACTOR * loss_noise:
        raise NumericsError(
            f"step {number}: the compiled loss is {compiled.loss.item():.8g}, eager's is {eager.loss.item():.8g}; "
            f"relative error {loss_error:.3g}, allowed is verify.loss_tolerance={config.loss_tolerance:g}"
            + _explained(loss_noise)
        )
    noise: dict[str, float] = {}
    for what in beyond:
        sampled = [value for sample in samples if (value := sample.values[what]) is not None]
        noise[what] = _check(what, *pairs[what], distances[what], errors[what], sampled, reference)
    only_rounding = tuple(what for what, size in noise.items() if size >= 1)
    worst = max((what for what in errors if what not in only_rounding), key=lambda what: errors[what], default="")
    others = [loss_noise] * (not loss_error <= config.loss_tolerance)
    others += [size for size in noise.values() if size < 1]
    error = errors.get(worst, 0.0)
    return Verification(number, loss_error, error, worst, max(others, default=None), only_rounding)


def _check(
    what: str,
    actual: Tensor,
    expected: Tensor,
    difference: Tensor,
    error: float,
    samples: Sequence[Tensor],
    reference: Reference,
) -> float:
    """Compare a value with how far eager is from itself, which is returned, relative to its norm."""
    tolerance, number = reference.config.grad_tolerance, reference.step_number
    allowed = f"allowed is verify.grad_tolerance={tolerance:g}"
    noise = _worst(relative_norm(sample, expected) for sample in samples)
    if not error <= tolerance + FACTOR * noise:
        raise NumericsError(
            f"step {number}: the compiled {what} differs from eager's by {error:.3g} of its norm; {allowed}"
            + _explained(noise)
        )
    excess = unexplained(difference, expected, samples, tolerance)
    if excess is not None:
        place = list(excess.place)
        compiled, eager = actual[excess.place].item(), expected[excess.place].item()
        raise NumericsError(
            f"step {number}: the compiled {what} differs from eager's in {excess.count} elements by more than their "
            f"rounding: at {place} it is {compiled:.6g}, eager's is {eager:.6g}; {allowed} of each element and "
            f"{excess.allowed:g} times what rounding does around it, this is {excess.units:.3g} times"
        )
    return noise


def _explained(noise: float) -> str:
    return f" and {FACTOR:g} times eager's own rounding error, {noise:.3g}" if noise else ""


def _worst(errors: Iterable[float]) -> float:
    """The largest; where rounding alone makes infinities or NaNs, nothing is excused by it."""
    return max((error for error in errors if math.isfinite(error)), default=0.0)


def _samples(module: nn.Module, reference: Reference, eager: Outcome, names: set[str]) -> Iterator[Outcome]:
    """How far eager is from itself when inputs and operands change by about one rounding, several times: of the loss
    relative to it, of the values `names` each element's distance, in bfloat16. Parameters are put back bit for bit.
    """
    unit = _rounding_unit(module)
    generator = torch.Generator(next(module.parameters()).device).manual_seed(0)

    def changed(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        factor = torch.empty_like(value, dtype=torch.float32).uniform_(-unit, unit, generator=generator)
        return (value.double() * (1 + factor.double())).to(value.dtype)

    for _ in range(NOISE_SAMPLES):
        with _changed_parameters(module, changed), changed_operands(generator):
            sample = reference.run([tuple(map(changed, batch)) for batch in reference.micro_batches])
        differences: dict[str, Tensor | None] = {}
        for what in names:
            expected, other = eager.values[what], sample.values[what]
            errors = None if other is None or expected is None else distance(_real(other), _real(expected))
            differences[what] = errors.to(torch.bfloat16) if errors is not None and errors.isfinite().all() else None
        yield Outcome(torch.tensor(_loss_error(sample.loss, eager.loss)), differences)


@contextmanager
def _changed_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    parameters = list(module.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(change(value))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _rounding_unit(module: nn.Module) -> float:
    """About the relative error of one product of the step, by the precision that it multiplies in."""
    if getattr(module, "precision", "fp32") in ("bf16", "fp16"):
        return 2.0**-8  # bfloat16 keeps 8 bits: one rounding of each operand; float16 has few for small gradients
    on_cuda = next(module.parameters()).device.type == "cuda"
    if on_cuda and (torch.backends.cuda.matmul.fp32_precision == "tf32" or convolutions_round()):
        return 2.0**-10  # TF32 keeps 11 bits; convolutions use it unless they are told not to
    return 2.0**-20  # float32 keeps 24 bits, and rounds each of the additions, too


def _outcome(run: Callable[[], Tensor], module: nn.Module) -> Outcome:
    loss = run().detach().clone()
    values: dict[str, Tensor | None] = {GRADIENT + name: p.grad for name, p in module.named_parameters()}
    values |= {f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return Outcome(loss, values)


def _check_presence(compiled: Outcome, eager: Outcome, step_number: int) -> None:
    for what, expected in eager.values.items():
        actual = compiled.values[what]
        if (actual is None) != (expected is None):
            has, lacks = ("eager", "the compiled step") if actual is None else ("the compiled step", "eager")
            raise NumericsError(f"step {step_number}: {has} has a {what}, {lacks} has None")
        if actual is not None and expected is not None and actual.shape != expected.shape:
            shapes = f"{list(actual.shape)}, eager's {list(expected.shape)}"
            raise NumericsError(f"step {step_number}: the compiled {what} has shape {shapes}")


def _loss_error(actual: Tensor, expected: Tensor) -> float:
    return relative_norm(distance(actual, expected), expected)


def _real(value: Tensor) -> Tensor:
    """A complex number as two, so that each is compared with its own rounding; whole numbers as they are."""
    value = value.detach()
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value if value.is_floating_point() else value.double()
