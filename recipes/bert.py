"""A BERT of bytes or other tokens: an encoder that finds hidden ones; the contract of a recipe is in transformer.py.

Devlin et al. (2019), "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
arXiv:1810.04805: learned positions, normalised after each residual sum, gelu, and a head of one more layer that is
tied to the embedding. 15 % of the tokens are to be found; of these 80 % are hidden, 10 % replaced by another one,
10 % left. As in their program as many in every row, so that the head reads these alone. Sentence pairs are left out,
as Liu et al. (2019), "RoBERTa", arXiv:1907.11692, found better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._blocks import FeedForward, SelfAttention, block_products, initialise
from ._checks import checked, divides, rates, whole_numbers

HIDDEN_FRACTION = 0.15
NORM_EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 128
    """Model dimension, which num_heads divides."""
    num_heads: int = 4
    """Attention heads, from 1."""
    mlp_width: int = 512
    """Width of the layer after attention, from 1; 4 * width in the paper."""
    context: int = 64
    """Length of a sequence in tokens, from 4."""
    dropout: float = 0.1
    """Probability that dropout zeroes a value, from 0 to below 1; one rate everywhere."""
    vocab_size: int = 256
    """Distinct tokens of the text, from 2; the one that hides is one more."""

    @property
    def num_hidden(self) -> int:
        """How many tokens of a sequence are to be found."""
        return max(round(HIDDEN_FRACTION * self.context), 1)

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "num_layers", "width", "num_heads", "mlp_width")
        mistakes = mistakes or divides(self, "num_heads", "width")
        mistakes += whole_numbers(self, "context", least=4) + whole_numbers(self, "vocab_size", least=2)
        return mistakes + rates(self, "dropout")


class Block(nn.Module):
    """Post-norm: x = norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, options: Options):
        super().__init__()
        self.attention = SelfAttention(options.width, options.num_heads, options.dropout)
        self.attention_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.mlp = FeedForward(options.width, options.mlp_width)
        self.mlp_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class Bert(nn.Module):
    """(tokens, int64 of (batch, time); positions, int64 of (batch, hidden)) -> logits of the tokens at these positions,
    (batch, hidden, vocab_size)."""

    def __init__(self, options: Options):
        super().__init__()
        self.vocab_size = options.vocab_size
        self.token_embedding = nn.Embedding(options.vocab_size + 1, options.width)
        self.position_embedding = nn.Embedding(options.context, options.width)
        self.embedding_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.head = nn.Linear(options.width, options.width)
        self.head_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.head_bias = nn.Parameter(torch.zeros(options.vocab_size))
        initialise(self)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        x = self.head_norm(F.gelu(self.head(x)))
        return F.linear(x, self.token_embedding.weight[: self.vocab_size], self.head_bias)


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Bert(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per token that is to be found; batch: see `prepare`."""
    scores, labels = predict(model, batch)
    return F.cross_entropy(scores, labels)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, of (batch_size * num_hidden, vocab_size); the tokens that they are of, int64)."""
    tokens, positions, labels = batch
    return model(tokens, positions).flatten(0, 1), labels.flatten()


def prepare(options: Options, batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(text with some tokens hidden or replaced, int64 of (batch_size, context); where, ascending, and what they were,
    int64 of (batch_size, num_hidden)), of a batch of text."""
    tokens, device = batch[0], batch[0].device
    batch_size, time = tokens.shape
    shape = (batch_size, options.num_hidden)
    positions = torch.rand(batch_size, time, generator=generator).argsort(dim=1)[:, : shape[1]].sort(dim=1).values
    others = torch.randint(options.vocab_size, shape, generator=generator).to(device)
    fates = torch.rand(shape, generator=generator).to(device)
    positions = positions.to(device)
    labels = tokens.gather(1, positions)
    shown = torch.where(fates < 0.8, options.vocab_size, torch.where(fates < 0.9, others, labels))
    return tokens.scatter(1, positions, shown), positions, labels


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one sequence, without recomputation: 2 for each multiplication of the blocks,
    and of the head at the positions to be found; the backward has two products for each of the forward."""
    head = options.num_hidden * options.width * (options.width + options.vocab_size)
    blocks = options.num_layers * block_products(options.context, options.width, options.mlp_width)
    return 3 * 2 * (blocks + head)
