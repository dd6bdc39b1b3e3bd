"""Losses of which float16 can hold the gradients: `trainer.precision=fp16`, by torch's GradScaler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aottrain.trainer.engines import LossModule

_FIXED = 1024.0


class LossScaling:
    """Multiplies the loss by a scale before the backward, and the gradients by its inverse after it.

    Where one of these is not finite the scale halves, and the step is left out by whoever finds their norm; after 2,000
    steps without one it doubles. A scale below 1 is for no overflow any more.
    """

    def __init__(self, device: torch.device):
        self.scaler = torch.amp.GradScaler(device.type)
        self._device = device
        self._is_unscaled = False

    def scaled(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    @contextmanager
    def fixed(self, module: LossModule) -> Iterator[None]:
        """Inside, losses have a scale that is no gradient's end, neither here nor in eager, which is compared."""
        kept, module.scaled = module.scaled, lambda loss: loss * _FIXED
        try:
            yield
        finally:
            module.scaled = kept

    def unscale(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """The gradients of the loss itself, in place of those of the scaled one. Returns the scale, unread."""
        if self._is_unscaled:  # of a step that ended before its update, which is taken again
            self.scaler.update(self.scaler.get_scale())
        scale = self.scaler.scale(torch.ones((), device=self._device))
        self._is_unscaled = True
        self.scaler.unscale_(optimizer)
        return scale

    def update(self) -> None:
        """The scale of the next step."""
        self.scaler.update()
        self._is_unscaled = False

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(dict(state))
