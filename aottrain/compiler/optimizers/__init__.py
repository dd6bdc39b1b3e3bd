"""Optimizers whose whole step, with the gradients' norm and clipping, is one program of generated kernels.

They are torch's own (and `ops.optimizers.lion.Lion`) with another `step`: the same arguments, parameter groups,
schedules, hooks and state, so checkpoints of either go on with the other.
"""

from __future__ import annotations

from typing import Any

import torch

from aottrain.compiler.optimizers.formulas import ADAMW, LION
from aottrain.compiler.optimizers.formulas import SGD as SGD_FORMULA
from aottrain.compiler.optimizers.step import GeneratedStep
from aottrain.errors import UnsupportedError
from aottrain.ops.optimizers import lion


def _refuse(group: dict[str, Any], *options: str) -> None:
    for option in options:
        if group.get(option):
            raise UnsupportedError(f"{option}=True has no generated kernel; use torch's own optimizer")


class AdamW(GeneratedStep, torch.optim.AdamW):
    """torch.optim.AdamW, generated; without amsgrad, capturable and differentiable."""

    formula = ADAMW

    def _states(self, group: dict[str, Any]) -> tuple[str, ...]:
        _refuse(group, "amsgrad", "capturable", "differentiable")
        return ("exp_avg", "exp_avg_sq")

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"])


class SGD(GeneratedStep, torch.optim.SGD):
    """torch.optim.SGD, generated: momentum, Nesterov's too, dampening, coupled weight decay."""

    formula = SGD_FORMULA

    def _states(self, group: dict[str, Any]) -> tuple[str, ...]:
        _refuse(group, "differentiable")
        if group["dampening"] and self.skip_nonfinite:
            raise UnsupportedError("with dampening the first step differs, so none can be left out: skip_nonfinite")
        return ("momentum_buffer",) if group["momentum"] else ()

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        return tuple(group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay"))


class Lion(GeneratedStep, lion.Lion):
    """Lion, generated."""

    formula = LION

    def _states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["weight_decay"])
