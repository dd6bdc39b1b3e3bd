"""Random programs, fixed seeds: compiled at a random budget, each must be eager's, bit for bit.

A program is a list of steps over a stack of two-dimensional values. It is legal in eager by construction: written in
place is only what eager has saved nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics.comparison import assert_call_like_eager, options

NUM_PROGRAMS = 48

UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gelu": F.gelu,
    "abs": torch.abs,
    "square": torch.square,
    "sign times": lambda v: v * v.sign(),
    "clamp": lambda v: v.clamp(-0.5, 0.7),
    "log1p": lambda v: torch.log1p(v.abs()),
    "reciprocal": lambda v: 1.0 / (1.5 + v.abs()),
    "half": lambda v: v.to(torch.bfloat16).float(),
    "where": lambda v: torch.where(v > 0, v * 2, v.exp()),
    "masked": lambda v: v.masked_fill(v.detach() < -0.3, 0.0),
    "softmax": lambda v: v.softmax(-1),
    "log_softmax": lambda v: v.log_softmax(0),
    "layer_norm": lambda v: F.layer_norm(v, v.shape[-1:]),
    "cumsum": lambda v: v.cumsum(1),
    "detached": lambda v: v * v.detach().cos(),
}
REDUCTIONS = {
    "sum": lambda v, d: v.sum(d, keepdim=True),
    "mean": lambda v, d: v.mean(d, keepdim=True),
    "amax": lambda v, d: v.amax(d, keepdim=True),
    "var": lambda v, d: v.var(d, keepdim=True, correction=0),
    "logsumexp": lambda v, d: v.logsumexp(d, keepdim=True),
}
VIEWS = {
    "transpose": lambda v: v.t(),
    "flatten": lambda v: v.reshape(1, -1),
    "narrow": lambda v: v.narrow(1, 0, max(1, v.shape[1] // 2)),
    "flip": lambda v: v.flip(0),
    "rows": lambda v: v[::2],
    "split": lambda v: torch.cat(list(v.chunk(2, 1)), 0) if v.shape[1] % 2 == 0 else v.contiguous(),
    "unbind": lambda v: torch.stack(v.unbind(0), 1),
    "picked": lambda v: v.index_select(0, torch.arange(v.shape[0]).flip(0)),
    "gathered": lambda v: v.gather(1, torch.zeros_like(v, dtype=torch.int64)),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "lerp": lambda a, b: torch.lerp(*torch.broadcast_tensors(a, b), 0.3),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 0.5),
}


def _write(value: Tensor, kind: str) -> Tensor:
    value = value + 0.25  # fresh: an addition saves nothing
    if kind == "whole":
        value.mul_(1.5)
    elif kind == "slice":
        value[:, :1].add_(value.detach()[:, -1:])
    elif kind == "transposed":
        value.t().neg_()
    elif kind == "assign":
        value[0] = value.detach().mean(0) * 2
    else:
        value.copy_(value.detach().tanh() + value)
    return value


def _random(value: Tensor, kind: str) -> Tensor:
    if kind == "dropout":
        return F.dropout(value, 0.3)
    if kind == "noise":
        return value + 0.1 * torch.randn(value.shape)
    if kind == "rand_like":
        return value * torch.rand_like(value.t()).t()
    return value * torch.bernoulli(torch.full_like(value, 0.6))


@dataclass
class Program:
    """Callable on (x, weight, shift, buffer); steps are functions from the stack to its next value."""

    steps: list[Callable[[list[Tensor], dict[str, Tensor]], Tensor | None]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    outputs: tuple[int, ...] = (-1,)

    def __call__(self, x: Tensor, weight: Tensor, shift: Tensor, buffer: Tensor) -> list[Tensor]:
        inputs = {"weight": weight, "shift": shift, "buffer": buffer}
        stack = [x + 0.0, x @ weight]
        for step in self.steps:
            value = step(stack, inputs)
            if value is not None:
                stack.append(value)
        return [stack[i] * 1.0 for i in self.outputs]


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    program = Program()
    for _ in range(rng.randint(5, 25)):
        kind = rng.choices(
            ["unary", "binary", "reduce", "view", "matmul", "write", "random", "buffer", "read"],
            [6, 6, 2, 4, 3, 3, 2, 1, 2],
        )[0]
        back, other = -rng.randint(1, 3), -rng.randint(1, 4)
        step, name = _step(rng, kind, back, other)
        program.steps.append(step)
        program.text.append(name)
    program.outputs = tuple(rng.sample([-1, -2, -3, -4], rng.randint(1, 3)))
    return program


def _at(stack: list[Tensor], i: int) -> Tensor:
    return stack[max(i, -len(stack))]


def _step(rng: random.Random, kind: str, back: int, other: int) -> tuple[Any, str]:
    if kind == "unary":
        name = rng.choice(list(UNARY))
        return lambda s, i: UNARY[name](_at(s, back)), f"{name} {back}"
    if kind == "binary":
        name = rng.choice(list(BINARY))

        def binary(s: list[Tensor], i: dict[str, Tensor]) -> Tensor:
            a, b = _at(s, back), _at(s, other)
            fits = all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True))
            return BINARY[name](a, b if fits else b.mean())

        return binary, f"{name} {back} {other}"
    if kind == "reduce":
        name, dim = rng.choice(list(REDUCTIONS)), rng.randint(0, 1)
        return lambda s, i: REDUCTIONS[name](_at(s, back), dim), f"{name} {back} over {dim}"
    if kind == "view":
        name = rng.choice(list(VIEWS))
        return lambda s, i: VIEWS[name](_at(s, back)), f"{name} {back}"
    if kind == "matmul":

        def matmul(s: list[Tensor], i: dict[str, Tensor]) -> Tensor:
            a, w = _at(s, back), i["weight"]
            return torch.tanh(a @ w) if a.shape[1] == w.shape[0] else a @ a.t() / a.shape[1]

        return matmul, f"matmul {back}"
    if kind == "write":
        name = rng.choice(["whole", "slice", "transposed", "assign", "copy"])
        return lambda s, i: _write(_at(s, back), name), f"write {name} {back}"
    if kind == "random":
        name = rng.choice(["dropout", "noise", "rand_like", "bernoulli"])
        return lambda s, i: _random(_at(s, back), name), f"{name} {back}"
    if kind == "buffer":

        def update(s: list[Tensor], i: dict[str, Tensor]) -> None:
            with torch.no_grad():
                i["buffer"].mul_(0.9).add_(_at(s, back).detach().mean())

        return update, f"update buffer from {back}"
    name = rng.choice(["buffer", "shift"])
    return lambda s, i: torch.sin(_at(s, back) + i[name]), f"read {name} {back}"


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, 6, generator=generator) * 0.5
    return [x.requires_grad_(), weight.requires_grad_(), torch.tensor(0.3, requires_grad=True), torch.tensor(0.7)]


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_random_program(seed):
    program = generate(seed)
    rng = random.Random(seed + 1000)
    plan = rng.choice(["save_all", "min_cut", "recompute_all", round(rng.random(), 2), round(rng.random() / 4, 2)])
    try:
        assert_call_like_eager(program, inputs(), plan)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {options(plan)}: " + "; ".join(program.text)) from error


def test_programs_cover_every_kind_of_step():
    words = " ".join(" ".join(generate(seed).text) for seed in range(NUM_PROGRAMS))
    for name in (
        *UNARY,
        *REDUCTIONS,
        *VIEWS,
        *BINARY,
        "matmul",
        "write slice",
        "dropout",
        "update buffer",
        "read buffer",
    ):
        assert name in words, f"no program uses {name}"
