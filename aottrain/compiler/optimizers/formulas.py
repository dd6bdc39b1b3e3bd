"""The formulas of an optimizer's step as kernels: the gradients' norm, clipping, and the update of each parameter.

Every step has the same stages. `measure` sums the squares of each block of a gradient, `total` adds these up, in their
order; `prepare` makes of the norm, and of each parameter's group, the few numbers that `update` needs for all of a
parameter's elements. Numbers of the step (rate, decay, step number) are values in tables: no text depends on them.
They are float64; elements are computed in float32, or float64 where parameters are, and rounded once, when stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, Instruction, KernelIR, Load, Parameter, Reduce, Store
from aottrain.ir.kernels.multi_tensor import BLOCK, Base, MultiTensorIR, Over, Stage, verify_multi_tensor
from aottrain.ops.optimizers.masters import MASTER

F32, F64 = torch.float32, torch.float64
# Columns of the tables that all optimizers have.
SETTINGS = ("clip_norm", "clips", "skips")
RESULTS = ("norm", "clip", "skip")


class Body:
    """A kernel being written: values are numbers, as in its body."""

    def __init__(self, name: str):
        self.name = name
        self.instructions: list[Instruction] = []
        self.parameters: list[Parameter] = []
        self.bases: list[Base] = []
        self.stores: list[Store] = []

    def parameter(self, name: str, dtype: torch.dtype, base: Base, span: int = BLOCK, written: bool = False) -> int:
        self.parameters.append(Parameter(name, dtype, written, span))
        self.bases.append(base)
        return len(self.parameters) - 1

    def load(self, buffer: int, constant: int = 0, step: int = 0) -> int:
        address = Address(Affine.of({0: step}, constant))
        return self._add(Load(buffer, address, self.parameters[buffer].dtype))

    def constant(self, value: float, dtype: torch.dtype = F64) -> int:
        return self._add(Constant(value, dtype))

    def compute(self, op: str, *args: int) -> int:
        return self._add(Compute(op, args, self.instructions[args[-1]].dtype))

    def test(self, op: str, *args: int) -> int:
        return self._add(Compute(op, args, torch.bool))

    def cast(self, value: int, dtype: torch.dtype) -> int:
        if self.instructions[value].dtype is dtype:
            return value
        return self._add(Compute("cast", (value,), dtype))

    def sum(self, value: int) -> int:
        return self._add(Reduce("sum", value, self.instructions[value].dtype))

    def store(self, buffer: int, value: int, constant: int = 0, step: int = 0) -> None:
        value = self.cast(value, self.parameters[buffer].dtype)
        self.stores.append(Store(buffer, Address(Affine.of({0: step}, constant)), value))

    def done(self, over: Over, segment: int = 0) -> Stage:
        kernel = KernelIR(
            self.name, (BLOCK,), 0, tuple(self.parameters), tuple(self.instructions), tuple(self.stores), ()
        )
        return Stage(kernel, tuple(self.bases), over, segment)

    def _add(self, instruction: Instruction) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1


Values = dict[str, int]


@dataclass(frozen=True)
class Formula:
    """One optimizer."""

    name: str
    hyperparameters: tuple[str, ...]
    """The numbers that a parameter group gives for each parameter: the columns of the table `given`."""
    prepared: tuple[str, ...]
    """The numbers that `prepare` makes for each parameter: the columns of the table of that name."""
    counts_steps: bool
    prepare: Callable[[Body, Values], Values]
    """From the hyperparameters, and `step` where steps are counted, to the numbers that the update reads."""
    update: Callable[[Body, Values], Values] = field(repr=False)
    """From these (in the type of computing), `gradient`, `parameter` and the states to the new parameter and states.
    States are tensors of the parameter's shape."""


@dataclass(frozen=True)
class Segment:
    """Parameters of one type that have the same states."""

    dtype: torch.dtype
    states: tuple[str, ...]


def state_dtype(dtype: torch.dtype, states: Sequence[str]) -> torch.dtype:
    """Of the states of a parameter of this type."""
    return F32 if MASTER in states else dtype


def computing(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype is F64 else F32


@cache
def optimizer_step(formula: Formula, segments: tuple[Segment, ...]) -> MultiTensorIR:
    """The whole step over parameters of these segments, verified."""
    measuring = [*(_measure(number, segment) for number, segment in enumerate(segments)), _total()]
    updates = [_update(formula, number, segment) for number, segment in enumerate(segments)]
    states = tuple(dict.fromkeys(state for segment in segments for state in segment.states))
    tables = ["partials", "total", "settings", "found", "results", "given", "prepared"]
    program = MultiTensorIR(
        formula.name,
        tuple(segment.dtype for segment in segments),
        (*measuring, _prepare(formula), *updates),
        len(measuring),
        ("gradient", "parameter", *states),
        (*tables, "steps") if formula.counts_steps else tuple(tables),
    )
    verify_multi_tensor(program)
    return program


def _measure(number: int, segment: Segment) -> Stage:
    b = Body(f"measure_{number}")
    gradient = b.parameter("gradient", segment.dtype, Base.LIST)
    partials = b.parameter("partials", F64, Base.BLOCK, 1, written=True)
    element = b.cast(b.load(gradient, step=1), F64)
    b.store(partials, b.sum(b.compute("mul", element, element)))
    return b.done(Over.BLOCKS, number)


def _total() -> Stage:
    b = Body("total")
    partials = b.parameter("partials", F64, Base.WHOLE)
    total = b.parameter("total", F64, Base.WHOLE, 1, written=True)
    b.store(total, b.sum(b.load(partials, step=1)))
    return b.done(Over.ALL_BLOCKS)


def _prepare(formula: Formula) -> Stage:
    b = Body("prepare")
    total = b.parameter("total", F64, Base.WHOLE, 1)
    settings = b.parameter("settings", F64, Base.WHOLE, len(SETTINGS))
    found_inf = b.parameter("found", F32, Base.WHOLE, 1)
    results = b.parameter("results", F64, Base.WHOLE, len(RESULTS), written=True)
    num_hyperparameters, num_prepared = len(formula.hyperparameters), len(formula.prepared)
    hyperparameters = b.parameter("given", F64, Base.WHOLE, num_hyperparameters * BLOCK)
    prepared = b.parameter("prepared", F64, Base.WHOLE, num_prepared * BLOCK, written=True)
    norm, clip, skip = _clipping(b, total, settings, found_inf)
    for column, value in enumerate((norm, clip, skip)):
        b.store(results, value, column)
    values: Values = {
        name: b.load(hyperparameters, column, num_hyperparameters)
        for column, name in enumerate(formula.hyperparameters)
    }
    if formula.counts_steps:
        steps = b.parameter("steps", F32, Base.WHOLE, BLOCK, written=True)
        is_counted = b.compute("where", b.test("ne", skip, b.constant(0)), b.constant(0), values["active"])
        values["step"] = b.compute("add", b.cast(b.load(steps, step=1), F64), is_counted)
        b.store(steps, values["step"], step=1)
    prepared_values = formula.prepare(b, values)
    prepared_values |= {"scale": b.compute("mul", values["sign"], clip), "skip": skip}
    for column, name in enumerate(formula.prepared):
        b.store(prepared, prepared_values[name], column, num_prepared)
    return b.done(Over.ALL_TENSORS)


def _clipping(b: Body, total: int, settings: int, found_inf: int) -> tuple[int, int, int]:
    """The norm, what gradients are multiplied by, and 1 where the update is to be left out.

    The factor is clip_norm / (norm + 1e-6), at most 1 and NaN where the norm is, as in torch.nn.utils.clip_grad_norm_.
    """
    norm = b.compute("sqrt", b.load(total))
    one, zero = b.constant(1), b.constant(0)
    ratio = b.compute("div", b.load(settings, 0), b.compute("add", norm, b.constant(1e-6)))
    clips = b.test("ne", b.load(settings, 1), zero)
    clip = b.compute("where", clips, b.compute("min", ratio, one), one)
    finite = b.test("lt", norm, b.constant(float("inf")))
    skips = b.test("and", b.test("ne", b.load(settings, 2), zero), b.test("not", finite))
    skip = b.test("or", skips, b.test("ne", b.load(found_inf), b.constant(0, F32)))
    return norm, clip, b.compute("where", skip, one, zero)


def _update(formula: Formula, number: int, segment: Segment) -> Stage:
    b = Body(f"update_{number}")
    kind = computing(segment.dtype)
    gradient = b.parameter("gradient", segment.dtype, Base.LIST)
    buffers = {"parameter": b.parameter("parameter", segment.dtype, Base.LIST, written=True)}
    stored = state_dtype(segment.dtype, segment.states)
    buffers |= {name: b.parameter(name, stored, Base.LIST, written=True) for name in segment.states}
    prepared = b.parameter("prepared", F64, Base.ROW, len(formula.prepared))
    values = {name: b.cast(b.load(prepared, column), kind) for column, name in enumerate(formula.prepared)}
    skip = b.test("ne", values["skip"], b.constant(0, kind))
    old = {name: b.cast(b.load(buffer, step=1), kind) for name, buffer in buffers.items()}
    clipped = b.compute("mul", b.cast(b.load(gradient, step=1), kind), values["scale"])
    if MASTER in old:
        new = formula.update(b, {**values, **old, "gradient": clipped, "parameter": old[MASTER]})
        new[MASTER] = new["parameter"]
    else:  # as if the gradient had been written back, clipped
        new = formula.update(b, {**values, **old, "gradient": b.cast(b.cast(clipped, segment.dtype), kind)})
    for name, buffer in buffers.items():
        b.store(buffer, b.compute("where", skip, old[name], new[name]), step=1)
    return b.done(Over.BLOCKS, number)


def _prepare_adamw(b: Body, v: Values) -> Values:
    one = b.constant(1)
    corrected = [b.compute("sub", one, b.compute("pow", v[name], v["step"])) for name in ("beta1", "beta2")]
    return {
        "decay": b.compute("sub", one, b.compute("mul", v["lr"], v["weight_decay"])),
        "beta2": v["beta2"],
        "weight1": b.compute("sub", one, v["beta1"]),
        "weight2": b.compute("sub", one, v["beta2"]),
        "root": b.compute("div", one, b.compute("sqrt", corrected[1])),
        "eps": v["eps"],
        "rate": b.compute("div", v["lr"], corrected[0]),
    }


def _update_adamw(b: Body, v: Values) -> Values:
    gradient, mean, square = v["gradient"], v["exp_avg"], v["exp_avg_sq"]
    mean = b.compute("add", mean, b.compute("mul", v["weight1"], b.compute("sub", gradient, mean)))
    grown = b.compute("mul", v["weight2"], b.compute("mul", gradient, gradient))
    square = b.compute("add", b.compute("mul", v["beta2"], square), grown)
    scale = b.compute("add", b.compute("mul", b.compute("sqrt", square), v["root"]), v["eps"])
    change = b.compute("mul", v["rate"], b.compute("div", mean, scale))
    decayed = b.compute("mul", v["parameter"], v["decay"])
    return {"parameter": b.compute("sub", decayed, change), "exp_avg": mean, "exp_avg_sq": square}


def _prepare_lion(b: Body, v: Values) -> Values:
    one = b.constant(1)
    return {
        "decay": b.compute("sub", one, b.compute("mul", v["lr"], v["weight_decay"])),
        "beta1": v["beta1"],
        "beta2": v["beta2"],
        "weight1": b.compute("sub", one, v["beta1"]),
        "weight2": b.compute("sub", one, v["beta2"]),
        "rate": v["lr"],
    }


def _update_lion(b: Body, v: Values) -> Values:
    gradient, mean = v["gradient"], v["exp_avg"]

    def mixed(kept: str, weight: str) -> int:
        return b.compute("add", b.compute("mul", v[kept], mean), b.compute("mul", v[weight], gradient))

    change = b.compute("mul", v["rate"], b.compute("sign", mixed("beta1", "weight1")))
    decayed = b.compute("mul", v["parameter"], v["decay"])
    return {"parameter": b.compute("sub", decayed, change), "exp_avg": mixed("beta2", "weight2")}


def _prepare_sgd(b: Body, v: Values) -> Values:
    """The first momentum is the gradient itself, whatever the dampening."""
    one = b.constant(1)
    first = b.test("ne", v["first"], b.constant(0))
    weight = b.compute("where", first, one, b.compute("sub", one, v["dampening"]))
    return {**{name: v[name] for name in ("momentum", "nesterov", "weight_decay")}, "weight": weight, "rate": v["lr"]}


def _update_sgd(b: Body, v: Values) -> Values:
    """Terms with a factor of 0 are left out: an infinite weight would make them NaN."""
    zero = b.constant(0, b.instructions[v["gradient"]].dtype)
    pulled = b.compute("add", v["gradient"], b.compute("mul", v["weight_decay"], v["parameter"]))
    change = gradient = b.compute("where", b.test("ne", v["weight_decay"], zero), pulled, v["gradient"])
    new: Values = {}
    if "momentum_buffer" in v:
        kept = b.compute("mul", v["momentum"], v["momentum_buffer"])
        momentum = b.compute("add", kept, b.compute("mul", v["weight"], gradient))
        ahead = b.compute("add", gradient, b.compute("mul", v["momentum"], momentum))
        change = b.compute("where", b.test("ne", v["nesterov"], zero), ahead, momentum)
        new["momentum_buffer"] = momentum
    return {**new, "parameter": b.compute("sub", v["parameter"], b.compute("mul", v["rate"], change))}


def _formula(
    name: str,
    hyperparameters: Sequence[str],
    prepared: Sequence[str],
    counts_steps: bool,
    prepare: Callable[[Body, Values], Values],
    update: Callable[[Body, Values], Values],
) -> Formula:
    return Formula(
        name, ("active", "sign", *hyperparameters), (*prepared, "scale", "skip"), counts_steps, prepare, update
    )


# Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019).
ADAMW = _formula(
    "adamw", ("lr", "beta1", "beta2", "eps", "weight_decay"),
    ("decay", "beta2", "weight1", "weight2", "root", "eps", "rate"), True, _prepare_adamw, _update_adamw,
)  # fmt: skip
# Chen et al., Symbolic Discovery of Optimization Algorithms (2023).
LION = _formula(
    "lion", ("lr", "beta1", "beta2", "weight_decay"),
    ("decay", "beta1", "beta2", "weight1", "weight2", "rate"), False, _prepare_lion, _update_lion,
)  # fmt: skip
# Sutskever et al., On the importance of initialization and momentum in deep learning (2013), as torch writes it.
SGD = _formula(
    "sgd", ("lr", "momentum", "dampening", "nesterov", "weight_decay", "first"),
    ("momentum", "nesterov", "weight_decay", "weight", "rate"), False, _prepare_sgd, _update_sgd,
)  # fmt: skip
