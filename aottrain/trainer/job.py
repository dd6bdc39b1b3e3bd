"""What a run trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aottrain.step import TrainStep
from aottrain.trainer.engines import LossModule

if TYPE_CHECKING:
    from aottrain.data.batches import Batches


@dataclass
class Job:
    """What is trained: made by tasks/build.py."""

    name: str
    module: LossModule
    """The eager loss module; `step` computes gradients for its parameters, `optimizer` updates them."""
    step: TrainStep
    optimizer: torch.optim.Optimizer
    optimizer_kernel: str
    """What its update runs as, with the reason where another was to be expected."""
    batches: Batches
    device: torch.device
    torch_optimizer: Callable[[], torch.optim.Optimizer] | None = None
    """Where `optimizer`'s kernels cannot be made."""
    flops_per_sample: int | None = None
    """Of forward and backward, as the recipe counts them."""
    sample: Callable[[int], str] | None = None
    """Text of that many bytes by the model as it is now."""
