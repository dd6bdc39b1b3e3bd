"""Going back: copies in the host's memory of a run as it was, some steps apart.

After a bad step the run goes on from the newest copy, and the batches from there to that step are left out, as
Chowdhery et al. do after a spike (2022, "PaLM: Scaling Language Modeling with Pathways", section 5.1): the same
weights met the same numbers with other batches there, and no spike.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aottrain.compat import tree_map
from aottrain.errors import NumericsError
from aottrain.trainer.checkpoint import Loaded, load_model, load_optimizer
from aottrain.trainer.job import Job
from aottrain.trainer.reliability.streams import random_state, set_random_state


class BadStepError(NumericsError):
    """A step whose numbers are not finite, or whose loss is a spike; nothing has moved in it."""

    def __init__(self, step: int, why: str, policy: str):
        super().__init__(f"step {step}: {why}")
        self.step, self.why, self.policy = step, why, policy


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


@dataclass
class Copy:
    """A run after a step."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    beside: dict[str, Any]
    """Averaged weights, patience."""
    random: dict[str, Any]
    num_losses: int
    """How many losses had been read."""
    recent: list[float]
    """Those that a spike is told by."""

    @classmethod
    def of(cls, job: Job, step: int, num_losses: int, recent: list[float]) -> Copy:
        states = job.module.model.state_dict(), job.optimizer.state_dict(), job.state_beside()
        model, optimizer, beside = tree_map(_on_host, states)
        return cls(step, dict(model), optimizer, beside, random_state(), num_losses, recent)

    def put_back(self, job: Job) -> None:
        state = {"model": self.model, "optimizer": copy.deepcopy(self.optimizer)}
        loaded = Loaded(Path("a copy in memory"), self.step, state)
        load_model(job.module.model, loaded)
        load_optimizer(job.optimizer, loaded)
        job.load_state_beside(self.beside)
        for parameter in job.module.parameters():
            parameter.grad = None
        set_random_state(self.random)
