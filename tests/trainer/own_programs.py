"""An optimizer and a schedule of one's own, as a target names them."""

from __future__ import annotations

import torch


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients."""

    def __init__(self, params, lr=1e-3, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.sub_(mean.sign(), alpha=group["lr"])


class Reading(Sign):
    """Reads a number in its step, which parameters without memory do not have."""

    @torch.no_grad()
    def step(self, closure=None):
        assert all(float(p.grad.sum()) == float(p.grad.sum()) for group in self.param_groups for p in group["params"])
        super().step()


class Decaying(Sign):
    def __init__(self, params, lr=1e-3, weight_decay=0.5):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.9})


class Refusing(Sign):
    def __init__(self, params, lr=1e-3):
        raise ValueError("only matrices")


class Keeping(Sign):
    """Keeps what no checkpoint can give back."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            self.state[group["params"][0]]["history"] = [object()]


class NeedsClosure(Sign):
    def step(self, closure):
        closure()


def stairs(step, total_steps, height=0.5):
    return 1.0 if step <= total_steps // 2 else height


def rising_beyond(step, total_steps):
    return "high"
