"""Lion in eager torch: the plain reference beside the generated kernels, and what the other engines run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's `step` returns: what the closure that it is given computes."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients, with decoupled weight decay.

    Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2: a rate 3 to 10 times smaller than
    AdamW's, and a decay larger by as much. As torch's fused optimizers do, it leaves a step out where the attribute
    `found_inf` is set and not 0, without waiting for a device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ):
        if not lr >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} must be >= 0, betas={betas} within 0 and 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group, found_inf)
        return loss


def _update(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], found_inf: Tensor | None) -> None:
    if not state:
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    mean, (beta1, beta2) = state["exp_avg"], group["betas"]
    change = (mean * beta1 + gradient * (1 - beta1)).sign()
    new = parameter * (1 - group["lr"] * group["weight_decay"]) - change * group["lr"]
    new_mean = mean * beta2 + gradient * (1 - beta2)
    if found_inf is not None:
        left_out = found_inf.to(parameter.device) != 0
        new, new_mean = torch.where(left_out, parameter, new), torch.where(left_out, mean, new_mean)
    parameter.copy_(new)
    mean.copy_(new_mean)


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step leaves itself out where the tensor `found_inf`, which is set on it, is not 0: Lion's and those
    of torch's fused optimizers."""
    return isinstance(optimizer, Lion) or bool(getattr(optimizer, "_step_supports_amp_scaling", False))
