"""A recipe trained for a few steps on one batch, by eager and as aottrain compiles it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

import aottrain
from aottrain.config.extensions.recipes import load_recipe
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


# Recipes that are tried in the same way in several files, so small that a step is nothing.
SMALL: dict[str, dict[str, Any]] = {
    "bert": {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_width": 24, "context": 20, "dropout": 0.0},
    "vit": {"num_layers": 2, "width": 16, "num_heads": 2, "mlp_width": 24, "image_size": 8, "num_classes": 4},
    "moe": {"num_layers": 2, "width": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 12, "context": 12,
            "num_experts": 4},
    "t5": {"width": 16, "num_heads": 2, "head_width": 6, "mlp_width": 24, "context": 20},
    "dit": {"num_layers": 2, "width": 16, "num_heads": 2, "image_size": 8, "num_classes": 4},
    "mamba": {"num_layers": 2, "width": 16, "head_width": 8, "state_width": 4, "chunk": 4, "context": 12},
    "lstm": {"num_layers": 2, "width": 16, "context": 8},
    "dlrm": {"num_rows": 10, "row_width": 8, "bottom_width": 12, "top_width": 20},
    "gcn": {"width": 12, "num_nodes": 20, "num_known": 6},
    "vae": {"width": 4, "code_width": 5, "image_size": 8},
}  # fmt: skip


def small(name: str, batch_size: int = 8) -> tuple[ModuleType, Any, tuple[torch.Tensor, ...]]:
    """(recipe, options, a batch) of one of these."""
    recipe = load_recipe(name)
    options, generator = recipe.Options(**SMALL[name]), torch.Generator().manual_seed(0)
    if hasattr(recipe, "make_batch"):
        return recipe, options, recipe.make_batch(options, batch_size, generator)
    text = torch.randint(options.vocab_size, (batch_size, options.context + 1), generator=generator)
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return recipe, options, recipe.prepare(options, batch, generator) if hasattr(recipe, "prepare") else batch
