"""The optimizer, its learning rate as a function of the step, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from aottrain.config import LrScheduleConfig, OptimizerConfig


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; vectors (biases, norm scales) do not: shrinking those changes what a layer does, not how much."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD. Fused: no temporaries of the parameters' size, one pass over memory."""
    groups = decay_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


# torch's optimizers count their steps in a float32 tensor.
_STEP_BYTES = 4


def optimizer_state_bytes(model: nn.Module, config: OptimizerConfig) -> int:
    """What the optimizer will hold for as long as it lives, known before its first step: moments, and the number of
    steps, of which AdamW has one for each parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    if config.name == "adamw":
        return 2 * num_bytes + _STEP_BYTES * len(trained)
    return num_bytes if config.momentum > 0 else 0


def learning_rate(step: int, peak: float, schedule: LrScheduleConfig, total_steps: int) -> float:
    """The rate of step 1, 2, ...: a straight rise over `warmup_steps`, then a cosine down to `min_lr_ratio * peak`.

    "constant" stays at the peak. Steps after `total_steps` keep its rate: where a run stops changes no step before it.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    done = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    above_min = 0.5 * (1 + math.cos(math.pi * done))
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * above_min)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float | None) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most `clip_norm`; returns the norm before that, unread."""
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in with_grad])
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_grad, clip_norm, norm)
    return norm


def update(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """One optimizer step, which the device itself leaves out where the norm is not finite.

    `found_inf` is how GradScaler tells a fused optimizer to keep parameters and state as they are. The host hears of
    it at the next log step, without having waited for every step until then.
    """
    optimizer.found_inf = (~torch.isfinite(grad_norm)).to(torch.float32)
    optimizer.step()
    del optimizer.found_inf
