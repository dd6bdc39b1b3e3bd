"""A recipe trained for a few steps on one batch, by eager and as aottrain compiles it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

import aottrain
from aottrain.trainer.engines import LossModule

Trained = tuple[list[float], dict[str, torch.Tensor]]


def trained(
    recipe: ModuleType,
    options: Any,
    batch: tuple[torch.Tensor, ...],
    *,
    precision: str = "fp32",
    budget: float | None = None,
    num_steps: int = 8,
) -> Trained:
    """The loss of each step, and what the model is afterwards: parameters and buffers. budget=None is eager."""
    torch.manual_seed(0)
    module = LossModule(recipe.build(options), recipe.loss, precision).train()
    step = module
    if budget is not None:
        step = aottrain.compile(module, budget=budget, capture="trace", kernel="aten", on_unsupported="error")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module.model.state_dict()


def assert_engines_train_alike(
    recipe: ModuleType, options: Any, batch: tuple[torch.Tensor, ...], *, precision: str, falls_by: float
) -> None:
    """Bit for bit, with much saved and with little; and the loss falls."""
    losses, state = trained(recipe, options, batch, precision=precision)
    assert losses[-1] < losses[0] - falls_by
    for budget in (1.0, 0.3):
        compiled_losses, compiled_state = trained(recipe, options, batch, precision=precision, budget=budget)
        assert compiled_losses == losses
        for name, value in state.items():
            assert torch.equal(compiled_state[name], value), name
