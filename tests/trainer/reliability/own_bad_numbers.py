"""A model whose batch asks for bad numbers: one that is not a number in the forward, one in the backward alone, or a
loss far above the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ASKED = {"nothing": (0.0, 1.0, 1.0), "forward": (2.0, 1.0, 1.0), "backward": (0.0, 0.0, 1.0), "spike": (0.0, 1.0, 1e3)}


@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = 8

    def check(self) -> list[str]:
        return []


class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        out = self.last(self.dropout(self.norm(self.first(inputs)).relu()))
        logarithm = torch.log(1 - asked[:, 0])  # of -1, where it is asked for
        size = (out * asked[:, 1:2]).square().sqrt()  # at 0 its slope is none
        return out + size + logarithm[:, None]


def build(options: Options) -> nn.Module:
    return Model(options.width)


def loss(model: nn.Module, batch) -> torch.Tensor:
    inputs, asked, targets = batch
    return (model(inputs, asked) - targets).square().mean() * asked[:, 2].mean()


def make_batch(options: Options, batch_size: int, generator: torch.Generator):
    inputs = torch.randn(batch_size, 4, generator=generator)
    return inputs, torch.tensor(ASKED["nothing"]).repeat(batch_size, 1), inputs.sum(1, keepdim=True)
