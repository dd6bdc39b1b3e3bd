"""What `trainer.on_nonfinite=skip` puts back after a step whose loss or gradient norm is not finite.

Parameters and the optimizer's state are not here: such an update leaves itself out (`optim.update`).
"""

from __future__ import annotations

import torch
from torch import nn

from aottrain.trainer.checkpoint import random_state, set_random_state


class BeforeStep:
    """What a step changes that does not leave itself as it was."""

    def __init__(self, module: nn.Module):
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._random = random_state()

    @torch.no_grad()
    def put_buffers_back(self, *needed: torch.Tensor) -> None:
        """Where one of these numbers is not finite, without waiting for the device."""
        finite = torch.stack([torch.isfinite(number) for number in needed]).all()
        for buffer, value in self._buffers:
            buffer.copy_(torch.where(finite, buffer, value))

    def put_random_numbers_back(self) -> None:
        """What the step drew is drawn again."""
        set_random_state(self._random)
