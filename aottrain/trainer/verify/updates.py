"""An optimizer's generated update against torch's own, computed in float64 from the same gradients.

How far the two may be apart follows from arithmetic: no number takes part in more than ROUNDINGS roundings of its type,
so a result is off by at most what it moves when each of its inputs is changed by that much, and by as much of itself.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aottrain.errors import NumericsError
from aottrain.ops.optimizers.masters import MASTER
from aottrain.trainer.optim import PLAIN
from aottrain.trainer.verify.rounding import distance, place_of, relative_norm

if TYPE_CHECKING:
    from aottrain.config.run import OptimizerConfig

ROUNDINGS = 8  # of one element, from gradient to parameter: scaling, two means, their corrections, root, quotient, sum
_CHUNK = 1 << 20  # elements that are computed at once, in float64 and several times

Values = dict[str, Tensor]


@dataclass(frozen=True)
class UpdateVerification:
    """How far an update is from torch's."""

    error: float
    """Of the worst result: the difference's 2-norm relative to its own."""
    worst: str
    """The parameter or state that is the most off."""


def verify_update(
    step_number: int,
    optimizer: Any,
    names: Mapping[Tensor, str],
    gradients: Mapping[str, Tensor | None],
    config: OptimizerConfig,
) -> UpdateVerification:
    """Let a copy of the optimizer take a step with these gradients, and compare parameters, state and the gradients'
    norm with what torch's own gives. Costs the memory of a copy of parameters and state, and leaves no trace.

    optimizer: one that clips itself. names, gradients: of its parameters, and by these names. NumericsError names the
    first that is off by more than its rounding.
    """
    trial = copy.deepcopy(optimizer)
    pairs = [
        (group, before, after)
        for group, other in zip(optimizer.param_groups, trial.param_groups, strict=True)
        for before, after in zip(group["params"], other["params"], strict=True)
    ]
    for _, before, after in pairs:
        after.grad = gradients[names[before]]
    trial.step()
    scale = _scale(step_number, trial, optimizer)
    pieces: list[_Piece] = []
    for group, before, after in pairs:
        old, new, name = optimizer.state.get(before, {}), trial.state.get(after, {}), names[before]
        taken = scale is not None and after.grad is not None
        _check_count(step_number, name, old, new, taken)
        pieces += _pieces(name, _Update(group, float(old.get("step", 0)), taken), (before, old), (after, new))
    worst = UpdateVerification(0.0, "")
    for together in _together(pieces):
        for error in _compare(step_number, PLAIN[config.name], scale, together):
            worst = max(worst, error, key=lambda verification: verification.error)
    return worst


def _scale(step_number: int, trial: Any, optimizer: Any) -> float | None:
    """What the gradients are multiplied by to be clipped; None where their norm is not finite and the step is left out.

    Sums of squares in float64 lose about 2^-53 for each doubling of their number: nothing beside a float32's rounding.
    """
    gradients = [p.grad for group in trial.param_groups for p in group["params"] if p.grad is not None]
    squares = sum(torch.linalg.vector_norm(grad, dtype=torch.float64).item() ** 2 for grad in gradients)
    if trial.sum_over is not None:
        squares = trial.sum_over(torch.tensor(squares, dtype=torch.float64)).item()
    norm = math.sqrt(squares)
    measured = float(trial.grad_norm)
    if not math.isclose(norm, measured, rel_tol=2.0**-24) and (math.isfinite(norm) or math.isfinite(measured)):
        raise NumericsError(
            f"step {step_number}: the generated update takes {measured:.8g} for the gradients' norm, it is {norm:.8g}"
        )
    if not math.isfinite(norm) and optimizer.skip_nonfinite:
        return None
    return 1.0 if optimizer.clip_norm is None else min(1.0, optimizer.clip_norm / (norm + 1e-6))


def _check_count(step_number: int, name: str, old: Mapping[str, Any], new: Mapping[str, Any], taken: bool) -> None:
    if "step" not in new:
        return
    before, after = float(old.get("step", 0)), float(new["step"])
    if after != before + taken:
        raise NumericsError(
            f"step {step_number}: the generated update counts {after:g} steps of {name}, they are {before + taken:g}"
        )


@dataclass(frozen=True)
class _Update:
    """What an element's update depends on beside its own numbers."""

    group: Mapping[str, Any]
    """The optimizer's parameter group."""
    steps: float
    """Taken before."""
    taken: bool
    """Whether one is taken now."""

    def is_like(self, other: _Update) -> bool:
        return self.group is other.group and (self.steps, self.taken) == (other.steps, other.taken)


@dataclass(frozen=True)
class _Piece:
    """Some elements of one parameter: their numbers before and after, flat; "parameter", "gradient" and states."""

    name: str
    shape: Sequence[int]
    start: int
    update: _Update
    before: Values
    after: Values

    def __len__(self) -> int:
        return len(self.before["parameter"])

    def is_like(self, other: _Piece) -> bool:
        same = self.before.keys() == other.before.keys() and self.after.keys() == other.after.keys()
        mine, others = self.before["parameter"], other.before["parameter"]
        return same and self.update.is_like(other.update) and (mine.dtype, mine.device) == (others.dtype, others.device)


def _pieces(name: str, update: _Update, before: Any, after: Any) -> Iterator[_Piece]:
    """before, after: the parameter and its state."""
    old, new = _values(*before), _values(*after)
    if after[0].grad is not None:
        old["gradient"] = after[0].grad.detach()
    old, new = ({key: value.reshape(-1) for key, value in values.items()} for values in (old, new))
    for start in range(0, len(old["parameter"]), _CHUNK):
        parts = [{key: value[start : start + _CHUNK] for key, value in values.items()} for values in (old, new)]
        yield _Piece(name, before[0].shape, start, update, *parts)


def _values(parameter: Tensor, state: Mapping[str, Any]) -> Values:
    """What an update changes, but for the number of steps, whose type is another."""
    tensors = {name: value.detach() for name, value in state.items() if name != "step" and value is not None}
    return {"parameter": parameter.detach(), **tensors}


def _together(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that one call can compute, as long as they are few enough elements."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and (not group[0].is_like(piece) or sum(map(len, group)) + len(piece) > _CHUNK):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _step(
    optimizer_class: Callable[..., torch.optim.Optimizer], scale: float | None, update: _Update, values: Values
) -> Values:
    """torch's own step, in float64, as a function of numbers: "gradient", "parameter" and states. Without the first."""
    if not update.taken or scale is None:
        return {name: value for name, value in values.items() if name != "gradient"}
    parameter = nn.Parameter(values[MASTER if MASTER in values else "parameter"].double().clone())
    parameter.grad = values["gradient"].double() * scale
    options = {name: value for name, value in update.group.items() if name not in ("params", "fused", "foreach")}
    optimizer = optimizer_class([{"params": [parameter], **options}])
    states = [name for name in values if name not in ("gradient", "parameter", MASTER)]
    if states:
        optimizer.state[parameter] = {name: values[name].double().clone() for name in states}
        optimizer.state[parameter]["step"] = torch.tensor(update.steps)
    optimizer.step()
    masters = {MASTER: parameter.detach()} if MASTER in values else {}
    return {**_values(parameter, optimizer.state[parameter]), **masters}


def _bounds(step: Callable[[Values], Values], values: Values, expected: Values, kinds: Mapping[str, Any]) -> Values:
    """How far each result may be off: what it moves when an input is rounded, and its own rounding.

    kinds: the type of each result. What the parameter is computed in, which is its master's type where it has one,
    inputs are rounded to."""
    unit = ROUNDINGS * torch.finfo(values[MASTER if MASTER in values else "parameter"].dtype).eps
    bounds = {
        name: (value.abs() + (value - values.get(name, 0)).abs()) * ROUNDINGS * torch.finfo(kinds[name]).eps
        for name, value in expected.items()
    }
    for name, value in values.items():
        moved = [step({**values, name: value.double() * (1 + sign * unit)}) for sign in (-1, 1)]
        for result in expected:
            bounds[result] += torch.maximum(*((other[result] - expected[result]).abs() for other in moved))
    return bounds


def _compare(
    step_number: int,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    scale: float | None,
    pieces: Sequence[_Piece],
) -> Iterator[UpdateVerification]:
    """The error of each result of each piece."""
    first = pieces[0]
    before = {key: torch.cat([piece.before[key] for piece in pieces]) for key in first.before}
    actual = {key: torch.cat([piece.after[key] for piece in pieces]) for key in first.after}

    def step(values: Values) -> Values:
        return _step(optimizer_class, scale, first.update, values)

    expected = step(before)
    kinds = {name: actual[name].dtype if name in actual else value.dtype for name, value in expected.items()}
    bounds = _bounds(step, before, expected, kinds)
    ends = list(itertools.accumulate(map(len, pieces)))
    for key, value in expected.items():
        if key not in actual:
            missing = f"torch's update makes {key} of {first.name}, the generated one does not"
            raise NumericsError(f"step {step_number}: {missing}")
        difference = distance(actual[key], value)
        beyond = ~(difference <= bounds[key] + ROUNDINGS * torch.finfo(actual[key].dtype).tiny)
        for piece, end in zip(pieces, ends, strict=True):
            inside = slice(end - len(piece), end)
            what = piece.name if key == "parameter" else f"{key} of {piece.name}"
            if beyond[inside].any():
                worst = int(beyond[inside].to(torch.uint8).argmax())
                what = f"{what} at {list(place_of(piece.start + worst, piece.shape))}"
                numbers = (values[key][inside][worst].item() for values in (actual, expected, bounds))
                raise NumericsError(_beyond_text(step_number, what, *numbers))
            yield UpdateVerification(relative_norm(difference[inside], value[inside]), what)


def _beyond_text(step_number: int, what: str, actual: float, expected: float, bound: float) -> str:
    return (
        f"step {step_number}: the generated update makes {what} {actual:.9g}, torch's {expected:.9g}; "
        f"rounding explains {bound:.3g}"
    )
