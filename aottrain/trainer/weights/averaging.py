"""An average of the weights over the steps, beside those that are trained.

w_mean = decay * w_mean + (1 - decay) * w after each step, by torch's `swa_utils`, beginning with the weights after the
first one (Polyak & Juditsky, 1992; Tarvainen & Valpola, 2017, arXiv:1703.01780, for this form).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from aottrain.ops.optimizers.masters import wide

if TYPE_CHECKING:
    from aottrain.trainer.meters import History


class Averages:
    """Of the parameters of a model that are trained; the others, and buffers, are the model's own."""

    def __init__(self, model: nn.Module, decay: float):
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # In float32 beside a parameter in half precision, where a small part of a difference would be lost.
        self.values = {name: wide(parameter).clone() for name, parameter in self.parameters.items()}
        self._own: dict[str, Tensor] = {}
        self.num_updates = 0
        self._average = get_ema_multi_avg_fn(decay)

    def update_after(self, history: History, num_skipped: int) -> None:
        """A step, unless it was left out; where one may be, the device is waited for. num_skipped: before it."""
        if history.max_skips:
            history.read()
        if history.num_skipped == num_skipped:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        values, parameters = list(self.values.values()), [wide(each) for each in self.parameters.values()]
        if self.num_updates:
            self._average(values, parameters, self.num_updates)
        else:
            for value, parameter in zip(values, parameters, strict=True):
                value.copy_(parameter)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages; before the first step they are its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """One tensor at a time, bit for bit, so that little memory is needed. A parameter of another type than its mean
        is kept beside it."""
        for name, parameter in self.parameters.items():
            value = self.values[name]
            if (own := self._own.pop(name, None)) is not None:
                parameter.copy_(own)
                continue
            own = parameter.detach().clone()
            parameter.copy_(value)
            if value.dtype is parameter.dtype:
                value.copy_(own)
            else:
                self._own[name] = own

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """KeyError, RuntimeError: it is of other parameters."""
        for name, value in self.values.items():
            value.copy_(state["values"][name])
        self.num_updates = state["num_updates"]
