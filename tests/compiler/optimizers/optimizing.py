"""Parameters, gradients and optimizers for the tests of generated steps: ours, torch's, and torch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.compiler.optimizers import SGD, AdamW, Lion
from aottrain.ops.optimizers import lion

SIZES: tuple[tuple[int, ...], ...] = ((1,), (63,), (4097,), (0,), (3, 5, 7), (70001,))
# Name: our class, the reference, the arguments of both.
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw maximize": (AdamW, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "maximize": True}),
    "sgd": (SGD, torch.optim.SGD, {}),
    "sgd decay": (SGD, torch.optim.SGD, {"weight_decay": 0.02}),
    "sgd momentum": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.02}),
    "sgd nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd dampening": (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "lion": (Lion, lion.Lion, {"weight_decay": 0.1}),
    "lion maximize": (Lion, lion.Lion, {"betas": (0.95, 0.98), "maximize": True}),
}
FUSED = (torch.optim.AdamW, torch.optim.SGD)


def made(dtype: torch.dtype, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def gradients(step: int, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator).to(dtype) * 0.3 for size in sizes]


def in_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, the first without decay."""
    return [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]


def train(
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: range = range(8),
    clip: float | None = None,
    given: torch.dtype | None = None,
    parameters: list[nn.Parameter] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Steps with a rate that changes; gradients have values of the type `given`. clip: by torch's own function."""
    parameters = parameters or [nn.Parameter(p.detach().to(dtype)) for p in made(given or dtype)]
    optimizer = optimizer or make(in_groups(parameters), **options)
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, given or dtype), strict=True):
            parameter.grad = gradient.to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return parameters, optimizer


def error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Root mean square over all elements."""
    parts = [(a.detach().double() - b.detach().double()).flatten() for a, b in zip(got, exact, strict=True)]
    return torch.cat(parts).square().mean().sqrt().item()
