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
    """What is trained: made by tasks/build.py.

    module: the eager loss module; its parameters are those that `step` computes gradients for and `optimizer` updates.
    """

    name: str
    module: LossModule
    step: TrainStep
    optimizer: torch.optim.Optimizer
    optimizer_kernel: str  # what its update runs as, with the reason where another was to be expected
    batches: Batches
    device: torch.device
    torch_optimizer: Callable[[], torch.optim.Optimizer] | None = None  # where `optimizer`'s kernels cannot be made
    flops_per_sample: int | None = None  # of forward and backward, as the recipe counts them
    sample: Callable[[int], str] | None = None  # text of that many bytes by the model as it is now
