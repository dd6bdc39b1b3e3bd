"""What several recipes of transformers are made of: attention, the layer after it, and what both cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """Attention of every position of (batch, time, width) to every other one, by `num_heads` heads."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """contract(gelu(expand(x))), through `mlp_width`."""

    def __init__(self, width: int, mlp_width: int, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate
        self.expand = nn.Linear(width, mlp_width)
        self.contract = nn.Linear(mlp_width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(x), approximate=self.approximate))


def initialise(model: nn.Module, std: float = 0.02) -> None:
    """Weights of linear layers and embeddings from N(0, std), their biases 0; other parameters stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def block_products(time: int, width: int, mlp_width: int) -> int:
    """Multiplications of a block of both, for one sequence of `time` positions, forward: time * width for each column
    of the four projections and twice mlp_width, and twice time^2 * width for the scores and what is mixed by them."""
    return time * width * (4 * width + 2 * mlp_width) + 2 * time**2 * width
