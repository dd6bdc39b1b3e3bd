"""A state-space model of text: the recurrence of Mamba-2 as products of small matrices; see transformer.py.

Dao & Gu (2024), "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality", arXiv:2405.21060. A head keeps a state S of (state_width, head_width), which decays by a_t and takes b_t x_t
in at each position, and reads y_t = c_t S_t; decay, b and c are made of the input. Within a chunk of positions this is
attention whose scores are c_i b_j times the decay between j and i; from chunk to chunk the state is carried on, so
that the cost grows with the length alone. Around it, as there: a convolution over 4 positions, a gate, and norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._causal import generate, loss
from ._checks import checked, whole_numbers

__all__ = ["Options", "build", "flops_per_token", "generate", "loss"]

NORM_EPS = 1e-5
NUM_TAPS = 4  # positions that the convolution reads
EXPANSION = 2  # what is mixed, of the model's width


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Blocks, from 1."""
    width: int = 128
    """Model dimension, half of a multiple of head_width."""
    head_width: int = 32
    """Numbers of a head, from 1."""
    state_width: int = 16
    """Rows of a head's state, from 1."""
    chunk: int = 32
    """Positions whose scores are computed at once, from 1."""
    context: int = 128
    """Longest sequence in tokens, from 1."""
    vocab_size: int = 256
    """Distinct tokens, from 1; 256 holds every byte."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        sizes = ("num_layers", "width", "head_width", "state_width", "chunk", "context", "vocab_size")
        mistakes = whole_numbers(self, *sizes)
        if not mistakes and self.inner % self.head_width:
            mistakes.append(f"head_width={self.head_width}: must divide {EXPANSION} * width={self.inner}")
        return mistakes

    @property
    def inner(self) -> int:
        """Width of what is mixed over time."""
        return EXPANSION * self.width

    @property
    def num_heads(self) -> int:
        return self.inner // self.head_width


def scan(x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk: int) -> torch.Tensor:
    """y_t = c_t S_t, where S_t = exp(log_decay_t) S_(t-1) + b_t x_t for each head, and S is 0 before.

    x: (batch, heads, time, head_width); log_decay: (batch, heads, time), at most 0; b, c: (batch, time, state_width),
    of all heads -> as x. `chunk` positions at once; the last ones are filled up with zeros.
    """
    time, fill = x.shape[2], -x.shape[2] % chunk
    x = F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, chunk))
    total = F.pad(log_decay, (0, fill)).unflatten(2, (-1, chunk)).cumsum(dim=-1)  # since the chunk began
    b, c = (F.pad(each, (0, 0, 0, fill)).unflatten(1, (-1, chunk))[:, None] for each in (b, c))
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(diagonal=1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -math.inf).exp()
    within = (c @ b.transpose(-2, -1) * decay) @ x
    to_end = (total[..., -1:] - total).exp()
    taken = (b * to_end[..., None]).transpose(-2, -1) @ x  # what each chunk adds to the state: (..., state, head_width)
    state, states = torch.zeros_like(taken[:, :, 0]), []
    for index in range(taken.shape[2]):
        states.append(state)
        state = total[:, :, index, -1, None, None].exp() * state + taken[:, :, index]
    before = (c * total.exp()[..., None]) @ torch.stack(states, dim=2)
    return (within + before).flatten(2, 3)[:, :, :time]


class Mixer(nn.Module):
    """x of (batch, time, width) -> the same shape; every position reads those before it."""

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        mixed = options.inner + 2 * options.state_width
        self.project = nn.Linear(options.width, options.inner + mixed + options.num_heads, bias=False)
        self.taps = nn.Parameter(torch.empty(NUM_TAPS, mixed).uniform_(-(NUM_TAPS**-0.5), NUM_TAPS**-0.5))
        self.taps_bias = nn.Parameter(torch.zeros(mixed))
        # Steps between 0.001 and 0.1, evenly by their logarithm, and decays from 1 to 16 times as fast.
        steps = torch.empty(options.num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.step_bias = nn.Parameter(steps.expm1().log())  # what softplus makes them of
        self.log_rate = nn.Parameter(torch.empty(options.num_heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(options.num_heads))
        self.norm = nn.RMSNorm(options.inner, eps=NORM_EPS)
        self.out = nn.Linear(options.inner, options.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = self.options
        sizes = (options.inner, options.inner + 2 * options.state_width, options.num_heads)
        gate, mixed, steps = self.project(x).split(sizes, dim=-1)
        mixed = F.silu(self._convolved(mixed))
        mixed, b, c = mixed.split((options.inner, options.state_width, options.state_width), dim=-1)
        steps = F.softplus(steps.float() + self.step_bias).transpose(1, 2)  # (batch, heads, time)
        heads = mixed.unflatten(-1, (options.num_heads, -1)).transpose(1, 2)
        read = scan(heads * steps[..., None].type_as(heads), -self.log_rate.exp()[:, None] * steps, b, c, options.chunk)
        read = (read + self.skip[:, None, None] * heads).transpose(1, 2).flatten(2)
        return self.out(self.norm(read * F.silu(gate)))

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        """Each channel with its own taps over this position and those before it."""
        padded = F.pad(x, (0, 0, NUM_TAPS - 1, 0))
        shifted = (padded[:, index : index + x.shape[1]] * self.taps[index] for index in range(NUM_TAPS))
        return sum(shifted, self.taps_bias)


class Mamba(nn.Module):
    """tokens, int64 of (batch, time) -> logits of (batch, time, vocab_size)."""

    def __init__(self, options: Options):
        super().__init__()
        self.context = options.context
        self.token_embedding = nn.Embedding(options.vocab_size, options.width)
        self.norms = nn.ModuleList(nn.RMSNorm(options.width, eps=NORM_EPS) for _ in range(options.num_layers))
        self.mixers = nn.ModuleList(Mixer(options) for _ in range(options.num_layers))
        self.final_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        for mixer in self.mixers:  # what writes into the residual stream is smaller where there are many
            nn.init.normal_(mixer.project.weight, std=options.width**-0.5)
            nn.init.normal_(mixer.out.weight, std=(options.inner * options.num_layers) ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return F.linear(self.final_norm(x), self.token_embedding.weight)  # the head is tied to the embedding


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Mamba(checked(options))


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token, without recomputation, of sequences that are whole chunks.

    Forward: 2 per weight of a matrix product; of each block 2 * chunk * state_width for the scores of a chunk, for each
    head 2 * chunk * head_width to mix by them and 4 * state_width * head_width to write and read states. The backward
    has two products for each of the forward.
    """
    inner, state = options.inner, options.state_width
    project = options.width * (2 * inner + 2 * state + options.num_heads) + inner * options.width
    mixing = options.chunk * state + options.chunk * inner + 2 * state * inner
    return 3 * 2 * (options.num_layers * (project + mixing) + options.width * options.vocab_size)
