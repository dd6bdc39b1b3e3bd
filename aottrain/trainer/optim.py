"""The optimizer, its learning rate as a function of the step, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aottrain.ops.lion import Lion
from aottrain.step import ClipsItself

if TYPE_CHECKING:
    from aottrain.config.run import LrScheduleConfig, OptimizerConfig


PLAIN = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}  # by the names in the configuration


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; vectors (biases, norm scales) do not: shrinking those changes what a layer does, not how much."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Torch's AdamW or SGD, fused: no temporaries of the parameters' size, one pass over memory; or Lion."""
    groups = decay_groups(model, config.weight_decay)
    return PLAIN[config.name](groups, **hyperparameters(config))


def hyperparameters(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of the optimizer's constructor, behind its parameters.

    `fused` is also what torch does after it has loaded the groups of a checkpoint that another optimizer wrote.
    """
    if config.name == "sgd":
        return {"lr": config.lr, "momentum": config.momentum, "fused": True}
    more = {"eps": config.eps, "fused": True} if config.name == "adamw" else {}
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), **more}


# torch's optimizers count their steps in a float32 tensor.
_STEP_BYTES = 4


def optimizer_state_bytes(model: nn.Module, config: OptimizerConfig) -> int:
    """What the optimizer will hold for as long as it lives, known before its first step: moments, and the number of
    steps, of which AdamW has one for each parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    if config.name == "lion":
        return num_bytes
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


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    loss: torch.Tensor,
) -> torch.Tensor:
    """One optimizer step with gradients clipped, left out where loss or norm is not finite; returns the norm, unread.

    An optimizer that clips by itself does so by its own `clip_norm`, in the same pass over memory as the update.
    """
    if isinstance(optimizer, ClipsItself):
        update(optimizer, loss)
        return optimizer.grad_norm.to(torch.float32)
    grad_norm = clip_gradients(parameters, clip_norm)
    update(optimizer, loss, grad_norm)
    return grad_norm


def update(optimizer: torch.optim.Optimizer, *needed: torch.Tensor) -> None:
    """One optimizer step, which the device itself leaves out where one of these numbers is not finite.

    `found_inf` is how GradScaler tells a fused optimizer to keep parameters and state as they are. The host hears of
    it at the next log step, without having waited for every step until then.
    """
    finite = torch.stack([torch.isfinite(number) for number in needed]).all()
    optimizer.found_inf = (~finite).to(torch.float32)
    optimizer.step()
    del optimizer.found_inf
