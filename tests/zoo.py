"""Small models that several files of tests train, compile or plan. What one file alone needs stands in that file."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linear layers with gelu and dropout between them."""

    def __init__(self, inputs: int = 16, hidden: int = 64, outputs: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1))


class FeedForward(nn.Module):
    """A transformer's feed-forward half: norm, two linear layers, dropout (none at 0), and the shortcut."""

    def __init__(
        self,
        width: int = 16,
        hidden: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        dropout: float = 0.1,
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(self.activation(self.up(self.norm(x))))
        return x + (F.dropout(hidden, self.dropout) if self.dropout else hidden)


class AttentionBlock(nn.Module):
    """Attention of one head, then two linear layers, each with its shortcut; dropout (none at 0) at the end."""

    def __init__(self, width: int = 32, dropout: float = 0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        hidden = self.down(F.gelu(self.up(x)))
        return x + (F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden)


class Trunk(nn.Sequential):
    """Blocks one after the other; the loss is the mean square of what they give."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class CountingTrunk(nn.Module):
    """Attention blocks, each scaled by how often the model has run: it reads a buffer and then writes it."""

    def __init__(self, depth: int = 5, width: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock(width, dropout=0.1) for _ in range(depth))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.steps
        self.steps += 1
        for block in self.blocks:
            x = block(x) * scale
        return x.square().mean()


class ResidualTrunk(nn.Module):
    """So many blocks of a few layers, each with a shortcut around it; the loss is the mean square."""

    def __init__(self, layers: Callable[[], list[nn.Module]], depth: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*layers()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class WrappedBlocks(nn.Module):
    """Blocks and a head of four, always of the same weights. wrap: calls each block, as torch.utils.checkpoint does."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        depth: int = 3,
        wrap: Callable[[nn.Module, Tensor], Tensor] | None = None,
        width: int = 16,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.wrap = nn.ModuleList(block() for _ in range(depth)), nn.Linear(width, 4), wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        return self.head(x)
