"""What a run trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from aottrain.step import Batch, TrainStep
from aottrain.trainer.engines import LossModule
from aottrain.trainer.evaluation import Patience
from aottrain.trainer.parallel.world import ALONE, World
from aottrain.trainer.weights.averaging import Averages
from aottrain.trainer.weights.scaling import LossScaling

if TYPE_CHECKING:
    from aottrain.data.batches import Batches


@dataclass
class Job:
    """What is trained: made by tasks/building/build.py."""

    name: str
    module: LossModule
    """The eager loss module; `step` computes gradients for its parameters, `optimizer` updates them."""
    step: TrainStep
    optimizer: torch.optim.Optimizer
    optimizer_kernel: str
    """What its update runs as, with the reason where another was to be expected."""
    batches: Batches
    device: torch.device
    patience: Patience = field(default_factory=Patience)
    averages: Averages | None = None
    """Of the weights that are trained, where `trainer.ema` asks for it."""
    scaling: LossScaling | None = None
    """Of the loss, under `trainer.precision=fp16`."""
    torch_optimizer: Callable[[], torch.optim.Optimizer] | None = None
    """Where `optimizer`'s kernels cannot be made."""
    flops_per_sample: int | None = None
    """Of forward and backward, as the recipe counts them."""
    world: World = ALONE
    """The processes that train it together."""
    sample: Callable[[int], str] | None = None
    """Text of that many bytes by the model as it is now."""
    metrics: Callable[[torch.nn.Module, Batch], Any] | None = None
    """The recipe's own figures of a held-out batch, by name."""
    own_figures: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""

    def with_averages(self) -> AbstractContextManager[None]:
        """In which the model has its averaged weights, where there are some."""
        return nullcontext() if self.averages is None else self.averages.applied()

    def state_beside(self) -> dict[str, Any]:
        """What a run that goes on needs beside the model's and the optimizer's state."""
        averages = None if self.averages is None else self.averages.state_dict()
        scaling = {} if self.scaling is None else {"loss_scaling": self.scaling.state_dict()}
        return {"averages": averages, "patience": self.patience.state_dict(), **scaling}

    def load_state_beside(self, state: Mapping[str, Any]) -> None:
        """What `state_beside` gave. A checkpoint of before there was patience has none; one of a run that averaged no
        weights, or others, leaves those that are averaged here to begin with the next step."""
        saved = state["averages"]
        if self.averages is not None and saved is not None and saved["values"].keys() == self.averages.values.keys():
            self.averages.load_state_dict(saved)
        if "patience" in state:
            self.patience.load_state_dict(state["patience"])
        if self.scaling is not None and "loss_scaling" in state:
            self.scaling.load_state_dict(state["loss_scaling"])
