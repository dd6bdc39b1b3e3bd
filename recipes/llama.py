"""A Llama-shaped decoder that reads and writes bytes; the contract of a recipe is told in recipes/transformer.py.

What differs from a GPT-2, and where each part is from:

    RMSNorm                  Zhang & Sennrich (2019), "Root Mean Square Layer Normalization", arXiv:1910.07467
    rotary embedding         Su et al. (2021), "RoFormer: Enhanced Transformer with Rotary Position Embedding",
                             arXiv:2104.09864
    SwiGLU                   Shazeer (2020), "GLU Variants Improve Transformer", arXiv:2002.05202
    grouped-query attention  Ainslie et al. (2023), "GQA: Training Generalized Multi-Query Transformer Models from
                             Multi-Head Checkpoints", arXiv:2305.13245
    the whole                Touvron et al. (2023), "LLaMA: Open and Efficient Foundation Language Models",
                             arXiv:2302.13971

No layer has a bias and there is no dropout, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._causal import generate, loss, weight
from ._checks import checked, divides, rates, whole_numbers

__all__ = ["Options", "build", "flops_per_token", "generate", "loss", "weight"]

NORM_EPS = 1e-5
# Positions within documents, int64 of (batch, time), and which places a place sees, bool of (batch, 1, time, time).
Packed = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 192
    """Model dimension, which 2 * num_heads divides."""
    num_heads: int = 6
    """Query heads, from 1."""
    num_kv_heads: int = 2
    """Heads of keys and values, each read by as many query heads as another; it divides num_heads."""
    mlp_width: int = 512
    """Width of the gated layer, from 1; 8/3 of width gives as many weights as a plain layer of 4 * width."""
    context: int = 128
    """Longest sequence in bytes, from 1."""
    rope_base: float = 10000.0
    """Base of the rotary embedding, above 1: the slowest pair of a head turns by about 1/base radians a position."""
    tie_head: bool = False
    """Whether the output head is the embedding's matrix."""
    vocab_size: int = 256
    """Distinct tokens, from 1; 256 holds every byte."""
    label_smoothing: float = 0.0
    """Part of each target that is spread over all tokens in training, from 0 to below 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        sizes = ("num_layers", "width", "num_heads", "num_kv_heads", "mlp_width", "context", "vocab_size")
        mistakes = whole_numbers(self, *sizes) or self._check_heads()
        base = self.rope_base
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 1 < base < math.inf:
            mistakes.append(f"rope_base={base!r}: must be a finite number above 1")
        mistakes += rates(self, "label_smoothing")
        if not isinstance(self.tie_head, bool):
            mistakes.append(f"tie_head={self.tie_head!r}: must be true or false")
        return mistakes

    def _check_heads(self) -> list[str]:
        mistakes = []
        if self.width % (2 * self.num_heads) != 0:
            text = f"twice it must divide width={self.width}, because rotary embedding turns pairs of a head's numbers"
            mistakes.append(f"num_heads={self.num_heads}: {text}")
        return mistakes + divides(self, "num_kv_heads", "num_heads")

    @property
    def reads_packed(self) -> bool:
        """Whether `loss` takes packed documents."""
        return True

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


class Rotary(nn.Module):
    """Turns pair i of a head's numbers at position t by the angle t * base^(-2i / head_width).

    x of (batch, heads, time, head_width) -> the same shape, so that q @ k depends on positions by their difference
    alone. A pair is (i, i + head_width / 2); the paper's (2i, 2i + 1) is the same model with the weights in another
    order.
    """

    def __init__(self, head_width: int, context: int, base: float):
        super().__init__()
        rates = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), rates)
        # Of (context, head_width / 2). In float64 until here: float32 angles would be off by 1e-4 after 2000 positions.
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """positions: int64 of (batch, time), where they are not 0, 1, ..."""
        time = x.shape[-2]
        if positions is None:
            cos, sin = self.cos[:time], self.sin[:time]
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.type_as(x)  # under autocast x is bfloat16 and the product with cos float32


class Attention(nn.Module):
    """Causal grouped-query self-attention over (batch, time, width); query head h reads kv head h // group.

    `enable_gqa` leaves the repetition of keys and values to the kernel: those that can (flash attention, on CPU and
    CUDA) never make it, for the others PyTorch does.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.head_width = options.head_width
        kv_width = options.num_kv_heads * options.head_width
        self.query = nn.Linear(options.width, options.width, bias=False)
        self.key = nn.Linear(options.width, kv_width, bias=False)
        self.value = nn.Linear(options.width, kv_width, bias=False)
        self.out = nn.Linear(options.width, options.width, bias=False)
        self.grouped = options.num_kv_heads < options.num_heads

    def forward(self, x: torch.Tensor, rotary: Rotary, packed: Packed | None = None) -> torch.Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        if packed is None:
            mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=self.grouped)
        else:
            positions, seen = packed
            q, k = rotary(q, positions), rotary(k, positions)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, heads * head_width) -> (batch, heads, time, head_width)"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, width: int, mlp_width: int):
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: Options):
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.attention = Attention(options)
        self.mlp_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.mlp = SwiGLU(options.width, options.mlp_width)

    def forward(self, x: torch.Tensor, rotary: Rotary, packed: Packed | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, packed)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """tokens, int64 of (batch, time) with time <= context -> logits of (batch, time, vocab_size).

    starts: of packed documents, as tokens: of each place the one at which its document begins."""

    def __init__(self, options: Options, block: Callable[[Options], nn.Module] = Block):
        super().__init__()
        self.context, self.label_smoothing = options.context, options.label_smoothing
        self.token_embedding = nn.Embedding(options.vocab_size, options.width)
        self.rotary = Rotary(options.head_width, options.context, options.rope_base)  # one table for all blocks
        self.blocks = nn.ModuleList(block(options) for _ in range(options.num_layers))
        self.final_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.head = nn.Linear(options.width, options.vocab_size, bias=False)
        if options.tie_head:
            self.head.weight = self.token_embedding.weight
        self._initialise(options.num_layers)

    def _initialise(self, num_layers: int) -> None:
        """N(0, 0.02); what writes into the residual stream scaled by 1/sqrt(number of writes), as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                writes_residual = name.endswith(("attention.out.weight", ".down.weight", ".down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if writes_residual else 0.02)

    def forward(self, tokens: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        x = self.token_embedding(tokens)
        packed = None if starts is None else _packed(starts)
        for block in self.blocks:
            x = block(x, self.rotary, packed)
        return self.head(self.final_norm(x))


def _packed(starts: torch.Tensor) -> Packed:
    places = torch.arange(starts.shape[1], device=starts.device)
    seen = (starts[:, :, None] == starts[:, None, :]) & (places[:, None] >= places)
    return places - starts, seen[:, None]


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Llama(checked(options))


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token, without recomputation.

    Forward: 2 per weight of a matrix product: in each block 2 width^2 (query, out), 2 width * kv_width (key, value) and
    3 width * mlp_width; vocab_size * width in the head; and 4 * context * width in each block for the two attention
    products, counted whole as if nothing were masked. The backward has two products for each of the forward; that a
    fused attention kernel computes the scores once more there is not counted.
    """
    kv_width = options.num_kv_heads * options.head_width
    block = 2 * options.width**2 + 2 * options.width * kv_width + 3 * options.width * options.mlp_width
    weights = options.num_layers * block + options.vocab_size * options.width
    attention = options.num_layers * 4 * options.context * options.width
    return 3 * (2 * weights + attention)
