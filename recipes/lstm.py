"""A language model of LSTMs; the contract of a recipe is told in transformer.py.

Zaremba, Sutskever & Vinyals (2014), "Recurrent Neural Network Regularization", arXiv:1409.2329: layers of LSTMs
(Hochreiter & Schmidhuber, 1997) with dropout between them and none over time, between embedding and output, and
weights drawn evenly from a narrow range. Each sequence begins with a state of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ._causal import generate, loss
from ._checks import checked, rates, whole_numbers

__all__ = ["Options", "build", "flops_per_sample", "generate", "loss"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 1
    """Layers of LSTMs, from 1."""
    width: int = 192
    """Numbers of a state, and of an embedding, from 1."""
    context: int = 48
    """Longest sequence in tokens, from 1."""
    dropout: float = 0.0
    """Probability that dropout zeroes a value between layers, from 0 to below 1."""
    vocab_size: int = 256
    """Distinct tokens, from 1; 256 holds every byte."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        return whole_numbers(self, "num_layers", "width", "context", "vocab_size") + rates(self, "dropout")


class LstmModel(nn.Module):
    """tokens, int64 of (batch, time) -> logits of (batch, time, vocab_size)."""

    def __init__(self, options: Options):
        super().__init__()
        self.context = options.context
        self.token_embedding = nn.Embedding(options.vocab_size, options.width)
        self.dropout = nn.Dropout(options.dropout)
        between = options.dropout if options.num_layers > 1 else 0.0  # torch warns of a rate that has no place
        self.layers = nn.LSTM(options.width, options.width, options.num_layers, batch_first=True, dropout=between)
        self.head = nn.Linear(options.width, options.vocab_size)
        bound = options.width**-0.5  # 0.026 at the paper's 1,500, where it has 0.04
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.layers(self.dropout(self.token_embedding(tokens)))
        return self.head(self.dropout(states))


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return LstmModel(checked(options))


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one sequence, without recomputation: 2 per weight and token of four gates that
    read input and state, and of the head; the backward has two products for each of the forward, but needs no gradient
    of the first states."""
    weights = options.num_layers * 8 * options.width**2 + options.width * options.vocab_size
    return 2 * (3 * options.context * weights - options.num_layers * 4 * options.width**2)
