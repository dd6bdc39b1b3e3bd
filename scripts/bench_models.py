"""What scripts/bench_kernels.py times: forward and backward of four small models on a CPU, loss included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import llama, resnet  # noqa: E402

VOCABULARY, CONTEXT, BATCH = 8192, 256, 8
# A model, how its loss is called, and what with.
Made = tuple[nn.Module, Callable[..., Tensor], tuple[Any, ...]]


class Block(nn.Module):
    """A pre-norm transformer block with torch's own attention."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """GPT-2's shape, with a tied head: (tokens, targets) -> the mean cross-entropy."""

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 256,
        num_heads: int = 8,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.tokens.weight.t()).flatten(0, 1), targets.flatten())


class Gates(nn.Module):
    """Norms, gates and softmaxes, no matrix product: bound by memory alone. x -> the mean square."""

    def __init__(self, width: int = 1024, num_blocks: int = 6):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.scales = nn.ModuleList(nn.RMSNorm(width) for _ in range(num_blocks))
        self.gates = nn.ParameterList(nn.Parameter(torch.randn(width) / 10) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, scale, gate in zip(self.norms, self.scales, self.gates, strict=True):
            normal = norm(x)
            x = x + F.gelu(normal) * torch.sigmoid(normal * gate)
            x = scale(x) + x * torch.softmax(x, dim=-1)
        return x.square().mean()


def _tokens() -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(0, VOCABULARY, (BATCH, CONTEXT)) for _ in range(2))  # type: ignore[return-value]


def _gpt() -> Made:
    model = GPT()
    return model, lambda call, *batch: call(*batch), _tokens()


def _llama() -> Made:
    options = llama.Options(num_layers=4, width=256, num_heads=8, context=CONTEXT, vocab_size=VOCABULARY)
    return llama.build(options), llama.loss, (_tokens(),)


def _resnet() -> Made:
    options = resnet.Options()
    batch = resnet.make_batch(options, 32, torch.Generator().manual_seed(0))
    return resnet.build(options), resnet.loss, (batch,)


def _gates() -> Made:
    return Gates(), lambda call, x: call(x), (torch.randn(4096, 1024),)


# Each gives the model, how its loss is called, and what with.
MODELS = {"gpt": _gpt, "llama": _llama, "resnet": _resnet, "gates": _gates}
TITLES = {
    "gpt": f"GPT, 4 layers of width 256, {BATCH} x {CONTEXT} tokens, vocabulary {VOCABULARY:,}",
    "llama": "Llama shape of that size",
    "resnet": "ResNet-20, 32 images",
    "gates": "norms, gates and softmaxes, 4096 x 1024",
}


if __name__ == "__main__":
    print("A part of another command: python scripts/bench_kernels.py --help")
