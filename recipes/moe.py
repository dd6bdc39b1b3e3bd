"""A mixture of experts: the decoder of llama.py, with several gated layers of which each token takes a few.

Shazeer et al. (2017), "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
arXiv:1701.06538; two of eight experts, and weights that are a softmax over the chosen ones, as Jiang et al. (2024),
"Mixtral of Experts", arXiv:2401.04088. An expert takes at most `capacity` tokens of a sequence, so that all shapes are
known before (Lepikhin et al., 2021, "GShard", arXiv:2006.16668): tokens are sorted into a block of rows for each
expert, the blocks are multiplied at once, and a token that comes too late is left as it is. The load-balancing loss is
that of Fedus et al. (2022), "Switch Transformers", arXiv:2101.03961. The contract of a recipe is in transformer.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import llama
from ._causal import generate
from ._checks import amounts, checked, whole_numbers

__all__ = ["Options", "build", "flops_per_token", "generate", "loss"]


@dataclass(frozen=True, kw_only=True)
class Options(llama.Options):
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 128
    """Model dimension, which 2 * num_heads divides."""
    num_heads: int = 4
    """Query heads, from 1."""
    num_kv_heads: int = 2
    """Heads of keys and values, each read by as many query heads as another; it divides num_heads."""
    mlp_width: int = 256
    """Width of one expert's gated layer, from 1."""
    context: int = 64
    """Longest sequence in tokens, from 1."""
    rope_base: float = 10000.0
    """Base of the rotary embedding, above 1: the slowest pair of a head turns by about 1/base radians a position."""
    tie_head: bool = False
    """Whether the output head is the embedding's matrix."""
    vocab_size: int = 256
    """Distinct tokens, from 1; 256 holds every byte."""
    num_experts: int = 8
    """Experts of a block, from 1."""
    num_chosen: int = 2
    """Experts that a token takes, from 1 to num_experts."""
    capacity_factor: float = 1.25
    """Rows of an expert, of those that it takes where all take as many, above 0."""
    balance: float = 0.01
    """Weight of the load-balancing loss while training, from 0."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = super().check() + whole_numbers(self, "num_experts", "num_chosen")
        if not mistakes and self.num_chosen > self.num_experts:
            mistakes.append(f"num_chosen={self.num_chosen}: must be at most num_experts={self.num_experts}")
        mistakes += amounts(self, "capacity_factor", "balance")
        return mistakes + ([] if self.capacity_factor else ["capacity_factor=0: must be above 0"])

    @property
    def reads_packed(self) -> bool:
        """No: experts take so many tokens of a row, whatever documents it has."""
        return False

    def capacity(self, time: int) -> int:
        """The most tokens of a sequence of `time` that an expert takes."""
        return min(math.ceil(self.capacity_factor * self.num_chosen * time / self.num_experts), time)


class Experts(nn.Module):
    """x of (batch, time, width) -> (what the chosen experts make of each token, their weighted sum; balance, a scalar).

    The balance is num_experts * sum over experts of (share of choices) * (mean probability), 1 where all are even.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        count, width, mlp_width = options.num_experts, options.width, options.mlp_width
        self.router = nn.Linear(width, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, width, mlp_width))
        self.up = nn.Parameter(torch.empty(count, width, mlp_width))
        self.down = nn.Parameter(torch.empty(count, mlp_width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.router(x).float()
        highest, experts = logits.topk(self.options.num_chosen, dim=-1)  # (batch, time, chosen)
        is_chosen = F.one_hot(experts, self.options.num_experts)  # (batch, time, chosen, experts)
        rows, is_kept = self._rows(is_chosen, experts)
        weights = (highest.softmax(dim=-1) * is_kept).to(x.dtype)
        made = self._experts(self._sorted(x, rows))
        taken = made.gather(1, rows.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, rows.shape[1:])
        shares = is_chosen.sum(dim=2).float().mean(dim=(0, 1)) / self.options.num_chosen
        balance = self.options.num_experts * (shares * logits.softmax(dim=-1).mean(dim=(0, 1))).sum()
        return (weights[..., None] * taken).sum(dim=2), balance

    def _rows(self, is_chosen: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each choice its row among all of the sequence's, the last one where there is none, and whether there is:
        int64 and bool of (batch, time, chosen). Of those who choose an expert the first ones get its rows."""
        capacity = self.options.capacity(is_chosen.shape[1])
        before = is_chosen.sum(dim=2).cumsum(dim=1) - is_chosen.sum(dim=2)  # a token chooses an expert once at most
        places = before.gather(2, experts)
        is_kept = places < capacity
        return torch.where(is_kept, experts * capacity + places, self.options.num_experts * capacity), is_kept

    def _sorted(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens in rows, (batch, experts, capacity, width), 0 where a row has none."""
        batch, time, width = x.shape
        num_rows = self.options.num_experts * self.options.capacity(time)
        tokens = torch.arange(time, device=x.device).repeat_interleave(self.options.num_chosen).expand(batch, -1)
        token_of = torch.full((batch, num_rows + 1), time, device=x.device).scatter(1, rows.flatten(1), tokens)
        padded = F.pad(x, (0, 0, 0, 1))  # the token after the last one is 0
        token_of = token_of[:, :num_rows, None].expand(-1, -1, width)
        return padded.gather(1, token_of).unflatten(1, (self.options.num_experts, -1))

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """Each expert's block through its own layer: (batch, rows + 1, width), the last row 0."""
        batch = len(x)
        x = x.transpose(0, 1).flatten(1, 2)  # (experts, batch * capacity, width)
        made = (F.silu(x @ self.gate) * (x @ self.up)) @ self.down
        return F.pad(made.unflatten(1, (batch, -1)).transpose(0, 1).flatten(1, 2), (0, 0, 0, 1))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + experts(norm(x)); and the balance of the experts."""

    def __init__(self, options: Options):
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width, eps=llama.NORM_EPS)
        self.attention = llama.Attention(options)
        self.experts_norm = nn.RMSNorm(options.width, eps=llama.NORM_EPS)
        self.experts = Experts(options)

    def forward(self, x: torch.Tensor, rotary: llama.Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x), rotary)
        made, balance = self.experts(self.experts_norm(x))
        return x + made, balance


class Moe(llama.Llama):
    """tokens, int64 of (batch, time) with time <= context -> logits of (batch, time, vocab_size)."""

    def __init__(self, options: Options):
        super().__init__(options, block=Block)
        self.balance = options.balance

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.with_balance(tokens)[0]

    def with_balance(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, and the mean of the blocks' balances."""
        x, balances = self.token_embedding(tokens), []
        for block in self.blocks:
            x, balance = block(x, self.rotary)
            balances.append(balance)
        return self.head(self.final_norm(x)), torch.stack(balances).mean()


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Moe(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per token, and while training the balance of the experts besides, times its weight;
    batch = (inputs, targets), each int64 of (batch_size, context)."""
    inputs, targets = batch
    logits, balance = model.with_balance(inputs)
    smoothing = model.label_smoothing if model.training else 0.0
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    return entropy + model.balance * balance if model.training else entropy


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token, without recomputation: those of llama.py, with the rows of all
    experts, used or not, in place of one gated layer, and the router."""
    rows = options.num_experts * options.capacity(options.context)
    layer = 3 * options.width * options.mlp_width
    experts = rows * layer // options.context + options.width * options.num_experts
    return llama.flops_per_token(options) + 3 * 2 * options.num_layers * (experts - layer)
