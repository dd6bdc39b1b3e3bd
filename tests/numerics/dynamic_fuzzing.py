"""Random programs that say nothing of their inputs' sizes, compiled once for all of them, and compared with eager at
sizes that are larger, smaller, and equal where they were not when the program was compiled."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from tests.numerics.fuzz_checking import is_close
from tests.numerics.rounding_noise import RandomRounding, within_noise

CHANNELS = 6
NUM_RESULTS = 3
# (batch, length) of the calls; the first one is traced.
SIZES = ((3, 7), (5, 4), (2, 2), (7, 3), (6, 6), (1, 5), (4, 1), (9, 33), (3, 7))
# Each statement makes a value of its own kind: x, y of (batch, length, CHANNELS), s of (batch, length, length).
_STEPS = (
    "x = x + y", "x = x * y.sigmoid()", "x = F.gelu(x)", "y = torch.tanh(y)",
    "x = F.layer_norm(x, (6,), self.w, self.b)", "x = x - x.mean(1, keepdim=True)",
    "y = y / (1 + y.abs().amax((0, 1), keepdim=True))", "x = x * self.w + self.b", "y = torch.softmax(y, 1)",
    "x = torch.log_softmax(x, -1)", "x = F.dropout(x, 0.3, self.training)",
    "y = F.dropout(y.sum(-1, keepdim=True), 0.25, self.training) * x", "s = torch.bmm(x, y.transpose(1, 2))",
    "s = torch.softmax(s, -1)", "s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -4.0)",
    "s = torch.where(torch.arange(t)[:, None] >= torch.arange(t), s, 0.5)", "x = torch.bmm(s, y) / t",
    "y = x.transpose(1, 2).reshape(b, t, 6) * y", "x = x.reshape(b * t, 6).cos().view(b, t, 6)",
    "x = torch.cat([x, y], 1)[:, :t]", "y = torch.cat([x[:, 1:], x[:, :1]], 1)",
    "x = F.pad(x, (0, 0, 1, 0))[:, :-1] + x",
    "y = y.view(b, t, 2, 3).transpose(1, 2).contiguous().transpose(1, 2).reshape(b, t, 6)",
    "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.w", "y = F.linear(x, self.m)",
    "x = x.flip(1) - y", "y = y + self.e[i]", "x = x + self.e[torch.arange(t) % 5]", "x = x * (b / (b + t))",
    "x = F.silu(x) * F.linear(y, self.m)", "s = s + s.transpose(1, 2)", "x = x + s.sum(-1, keepdim=True)",
    "y = y.flatten(0, 1).var(0) + x", "x = x + x.std()", "x, y = y, x",
    "x1, x2 = x.chunk(2, -1); y = torch.cat([-x2, x1], -1) * y", "y = F.normalize(y, dim=-1)",
    "x = x.masked_fill(i[..., None] == 2, 0.25)", "y = y.clamp(-1, 1).exp() - x[:1]", "x = x + y[:, -1:]",
    "y = x.expand(2, b, t, 6).sum(0) * 0.5", "x = torch.maximum(x, y)", "s = s * s.detach().amax(-1, keepdim=True)",
    "x = x[:, : t // 2].mean(1, keepdim=True) + y", "x = x.unflatten(0, (1, b)).squeeze(0)",
    "y = torch.stack([x, y], 2).amax(2)",
)  # fmt: skip
_LOSSES = (
    "x.square().mean() + y.mean()", "F.cross_entropy(x.reshape(b * t, 6), i.reshape(b * t))", "(x * y).sum() / t",
    "F.mse_loss(x, y.detach()) + s.mean()", "x.logsumexp(-1).mean()",
    "(s.sum((1, 2)) * x.sum((1, 2))).mean() / (t * t)",
)  # fmt: skip

# n: the name that a statement gives the value e.
_NUM_NOISY_RUNS = 6
_AGAIN = (
    "{n} = (({e}) + ({e})) * 0.5", "{n}1 = {e}; {n}2 = {e}; {n} = ({n}1 + {n}2 + {n}2) / 3",
    "{n} = {e}; {n} = {n} + {n}",
    "{n}1 = {e}; {n} = {n} + {n}; {n}2 = {e}; {n} = {n}1 * {n}2 + {n}1 * {n}2",
    "{n}1 = ({e}).sin(); {n}2 = ({e}).sin(); {n} = {n}1 * 3 + {n}2 * 3 + {n}1 * 2",
)  # fmt: skip
_SLICED = (
    "{a} = {a} + {a}[:, :1] * 5 + {a}[:, -1:] * 3 + {a}[:, -1:] * 3",
    "{a} = {a} * 0.5 + ({a}[0] + {a}[-1] + {a}[0]).sin()",
    "{a} = torch.cat([{a}[..., :3] * 2, {a}[..., 3:] + {a}[..., 3:] * {a}[..., :3]], -1)",
    "{a} = {a} + {a}[..., :2].repeat(1, 1, 3) + {a}[..., 2:4].repeat(1, 1, 3) * 2 + {a}[..., :2].repeat(1, 1, 3)",
    "{a} = {a} + {a}[:, : t // 2].sum(1, keepdim=True) + {a}[:, : t // 2].sum(1, keepdim=True)",
    "{a} = F.linear({a}, self.m) + F.linear({a}.flip(1), self.m) + F.linear({a}, self.m)",
    "{a} = {a} + F.linear({a}[:, :1], self.m) + F.linear({a}[:, -1:], self.m) + F.linear({a}[:, :1], self.m)",
    "{a} = {a}[:, :1] @ self.m + {a}[:, -1:] @ self.m + {a}[:, -1:] @ self.m.t() + {a}[:, :1] @ self.m + {a}",
    "{a} = {a} + self.e[0] * 2 + self.e[1] * 3 + self.e[0] * 2",
    "{a} = {a} + self.e[i] + self.e[i] + self.e[i.flip(0)]",
    "{a} = {a} + {a}; {a} = {a} + {a}; {a} = ({a} + {a}) / 4", "{a} = x * y + x * y",
    "{a} = {a} * 0.5 + s @ {a} + s @ {a}",
)  # fmt: skip


@dataclass(frozen=True)
class DynamicProgram:
    seed: int
    steps: tuple[str, ...]
    loss: str
    dtype: torch.dtype

    @property
    def source(self) -> str:
        lines = ["def forward(self, x, y, i):", "    b, t, _ = x.shape", "    s = torch.bmm(x, y.transpose(1, 2)) / 4"]
        return "\n".join([*lines, *(f"    {step}" for step in self.steps), f"    return x, y, {self.loss}"]) + "\n"

    def model(self) -> nn.Module:
        namespace = {"torch": torch, "F": F}
        exec(compile(self.source, f"<dynamic program {self.seed}>", "exec"), namespace)
        torch.manual_seed(self.seed)
        made = type("Model", (nn.Module,), {"forward": namespace["forward"]})()
        for name, shape in {"w": (6,), "b": (6,), "m": (6, 6), "e": (5, 6)}.items():
            setattr(made, name, nn.Parameter(torch.randn(shape, dtype=self.dtype)))
        return made


def generate(seed: int, repeats: bool = False) -> DynamicProgram:
    """repeats: whether some statements may come again, and be added up; drawn from a stream of its own."""
    rng = random.Random(seed)
    steps = tuple(rng.choice(_STEPS) for _ in range(rng.randint(3, 14)))
    loss = rng.choice(_LOSSES)
    if repeats:
        steps = _repeated(steps, random.Random(f"repeats {seed}"))
    draws = any("dropout" in step for step in steps)
    return DynamicProgram(seed, steps, loss, torch.float32 if draws else torch.float64)


def _repeated(steps: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    rate = rng.choice([0.0, 0.15, 0.3])
    made: list[str] = []
    for step in steps:
        if rng.random() >= rate:
            made.append(step)
        elif rng.random() < 0.4:
            made += [step, rng.choice(_SLICED).format(a=rng.choice(["x", "y"]))]
        elif (found := re.fullmatch(r"([xys]) = ([^;]+)", step)) is None:
            made += [step, step]
        else:
            # A sum of equal values, or of what two equal statements make of different ones.
            made.append(rng.choice(_AGAIN).format(n=found[1], e=found[2]))
    return tuple(made)


def check(program: DynamicProgram, frontend: str = "trace", kernel: str = "cpp") -> tuple[int, int, str]:
    """How many programs were compiled, how many kernels the first has, and what is wrong: "" where nothing is."""
    torch._dynamo.reset()
    model = program.model()
    reference = copy.deepcopy(model)
    compiled = aottrain.compile(model, capture=frontend, dynamic=True, kernel=kernel, partition="min_cut")
    rng = random.Random(program.seed)
    sizes = [(3, 7), *rng.sample(SIZES, len(SIZES))]
    for number, size in enumerate(sizes):
        eager, got = (_observe(call, program, number, size, call is reference) for call in (reference, compiled))
        strided = NUM_RESULTS if number % 3 else None
        wrong = _difference(eager, got, strided)
        if wrong:
            noisy = [_observe(reference, program, number, size, True, seed) for seed in range(_NUM_NOISY_RUNS)]
            wrong = _difference(eager, got, strided, noisy)
        if wrong:
            return len(compiled.report.graphs), 0, f"{size}, call {number}: {wrong}"
    graphs = compiled.report.graphs
    if compiled.report.fallbacks:
        return len(graphs), 0, f"ran eagerly: {compiled.report.fallbacks[0]}"
    return len(graphs), len(graphs[0].kernels) if graphs else 0, ""


def _observe(
    call: Callable[..., tuple[Tensor, Tensor, Tensor]],
    program: DynamicProgram,
    number: int,
    size: tuple[int, int],
    philox: bool,
    noise: int | None = None,
) -> list[Tensor | None]:
    """noise: the seed of rounding at random."""
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(*size, CHANNELS, generator=generator, dtype=program.dtype) for _ in range(2))
    index = torch.randint(0, 5, size, generator=generator)
    leaves = [x.requires_grad_(), y.requires_grad_(), *call.parameters()]  # type: ignore[attr-defined]
    torch.manual_seed(number)
    with nullcontext() if noise is None else RandomRounding(noise):
        with aottrain.philox_eager() if philox else nullcontext():
            outputs = call(x, y, index)
        chosen = outputs[number % 3 :]
        gradients = torch.autograd.grad(chosen, leaves, _tangents(chosen), allow_unused=True)
    return [*outputs, *gradients]


def _tangents(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """In the results' own strides: those of the gradients are eager's where they come so."""
    numbers = [torch.linspace(-1, 2, value.numel(), dtype=value.dtype).sin().view(value.shape) for value in outputs]
    return [torch.empty_like(value).copy_(number) for value, number in zip(outputs, numbers, strict=True)]


def _difference(
    eager: list[Tensor | None], got: list[Tensor | None], strided: int | None, noisy: Sequence[list[Tensor | None]] = ()
) -> str:
    """What differs first, or "". strided: how many of the values, the first ones, must have eager's strides, all if
    None: where some tangents do not come gradients have the strides that they have where all do. noisy: what eager
    shows where each op rounds at random."""
    for k, (a, b) in enumerate(zip(eager, got, strict=True)):
        if (a is None) != (b is None):
            return f"value {k} is {b}, in eager {a}"
        if a is None or b is None:
            continue
        if a.shape != b.shape or (a.stride() != b.stride() and (strided is None or k < strided)):
            return f"value {k} has shape {b.shape} {b.stride()}, in eager {a.shape} {a.stride()}"
        others = [value.detach() for run in noisy if (value := run[k]) is not None]
        if not is_close(a.detach(), b.detach()) and not (others and within_noise(a.detach(), b.detach(), others)):
            return f"value {k} differs by {(a - b).abs().max().item():.1e}"
    return ""
