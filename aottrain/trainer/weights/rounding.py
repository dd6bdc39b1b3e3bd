"""Weights in bfloat16, of which the optimizer keeps float32 copies: `trainer.precision=bf16_weights`."""

from __future__ import annotations

import torch
from torch import nn


def round_matrices(model: nn.Module) -> None:
    """The model's float32 parameters of two dimensions and more become bfloat16, in place; tied ones stay tied.

    Vectors (norm scales, biases) and buffers (running statistics, tables of positions) are few bytes, and they act on
    float32 under autocast: they stay as they are."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
