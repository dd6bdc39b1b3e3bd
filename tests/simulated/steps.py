"""A training step of a model of any size on a device that computes nothing: what it launches, and what was planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import aottrain
from aottrain.explain.report import GraphReport
from tests.simulated.device import Device
from tests.simulated.driver import Launch, Log

Made = tuple[nn.Module, Callable[..., Any], Sequence[Any]]  # a model, (model, *batch) -> loss, a batch


class Step(nn.Module):
    """The loss of a batch, as a module."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.model, *batch)


def made_of(recipe: Any, options: Any, batch_size: int) -> Callable[[], Made]:
    """A recipe's model and loss, and a batch: of the recipe's making, or tokens."""

    def make() -> Made:
        with torch.device("cpu"):
            if hasattr(recipe, "make_batch"):
                batch = recipe.make_batch(options, batch_size, torch.Generator())
            else:
                batch = tuple(torch.zeros(batch_size, options.context, dtype=torch.int64) for _ in range(2))
        return recipe.build(options), recipe.loss, (batch,)

    return make


def run_step(
    device: Device, log: Log, make: Callable[[], Made], autocast: bool, **options: Any
) -> tuple[list[Launch], GraphReport]:
    """The launches of a forward and its backward, and the program's report. options: of `aottrain.compile`."""
    device.compute(False)
    with torch.device("cuda"):  # weights are neither made on the host nor drawn
        model, loss, batch = make()
    step = Step(model, loss).to("cuda")
    batch = tree_map(lambda value: value.to("cuda"), tuple(batch))
    call = aottrain.compile(step, capture="trace", kernel="triton", on_unsupported="error", **options)
    log.clear()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        value = call(*batch)
    value.backward()
    return list(log.launches), call.report.graphs[0]
