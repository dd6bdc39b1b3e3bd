"""What scripts/bench_kernels.py times: forward and backward of small models on a CPU, loss included."""

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

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)), self.dropout)
        return x + F.dropout(self.contract(F.gelu(self.expand(self.mlp_norm(x)))), self.dropout)


class GPT(nn.Module):
    """GPT-2's shape, with a tied head: (tokens, targets) -> the mean cross-entropy."""

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 256,
        num_heads: int = 8,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.norm(x) @ self.tokens.weight.t()).flatten(0, 1), targets.flatten())


class RepeatedHeads(nn.Module):
    """A Llama block's attention as it is often written: keys and values repeated, rotary tables of two equal halves."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int):
        super().__init__()
        self.heads, self.size = (num_heads, num_kv_heads), width // num_heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, num_kv_heads * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        num_heads, num_kv_heads = self.heads
        q, k, v = (part(x).view(batch, time, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (part * cos + _rotated_half(part) * sin for part in (q, k))
        k, v = (part.repeat_interleave(num_heads // num_kv_heads, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class TiedLlama(nn.Module):
    """The shape of `llama`, with a tied head and repeated heads: (tokens, targets) -> the mean cross-entropy."""

    def __init__(self, num_layers: int = 4, width: int = 256, num_heads: int = 8, num_kv_heads: int = 2):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.RMSNorm(width),
                "attention": RepeatedHeads(width, num_heads, num_kv_heads),
                "mlp_norm": nn.RMSNorm(width),
                "gate": nn.Linear(width, 2 * width, bias=False),
                "up": nn.Linear(width, 2 * width, bias=False),
                "down": nn.Linear(2 * width, width, bias=False),
            })
            for _ in range(num_layers)
        )  # fmt: skip
        size = width // num_heads
        angles = torch.outer(torch.arange(CONTEXT), 10000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for part in self.blocks:
            x = x + part["attention"](part["norm"](x), self.cos, self.sin)
            normal = part["mlp_norm"](x)
            x = x + part["down"](F.silu(part["gate"](normal)) * part["up"](normal))
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


def _rotated_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


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


def _of_tokens(make: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: (make(), lambda call, *batch: call(*batch), _tokens())


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
MODELS = {"gpt": _of_tokens(GPT), "llama": _llama, "resnet": _resnet, "gates": _gates}
# Other ways to write the first two, each asked for by its name.
VARIANTS = {"gpt_dropout": _of_tokens(lambda: GPT(dropout=0.1)), "llama_tied": _of_tokens(TiedLlama)}
TITLES = {
    "gpt": f"GPT, 4 layers of width 256, {BATCH} x {CONTEXT} tokens, vocabulary {VOCABULARY:,}",
    "gpt_dropout": "GPT of that size with dropout of 0.1, attention's too",
    "llama": "Llama shape of that size",
    "llama_tied": "Llama shape of that size, tied head, keys and values repeated",
    "resnet": "ResNet-20, 32 images",
    "gates": "norms, gates and softmaxes, 4096 x 1024",
}


if __name__ == "__main__":
    print("A part of another command: python scripts/bench_kernels.py --help")
