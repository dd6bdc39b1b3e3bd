"""A T5 of bytes or other tokens: an encoder reads text with holes, a decoder writes what was in them.

Raffel et al. (2020), "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
arXiv:1910.10683: spans of three tokens in the mean, 15 % of all, are each replaced by a token of its own, and written
after these tokens by the decoder. No biases, norms by the root mean square, relu, scores that are not scaled and to
which a learned number for each distance is added, one table for all blocks of a half. The head is tied to the
embedding. As many tokens are hidden in every row, in as many spans, so that all shapes are known before. The contract
of a recipe is told in transformer.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._checks import checked, rates, whole_numbers

NORM_EPS = 1e-6
HIDDEN_FRACTION, MEAN_SPAN = 0.15, 3
NUM_BUCKETS, FARTHEST = 32, 128  # of distances; those beyond the farthest share a bucket


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 2
    """Blocks of the encoder, and of the decoder, from 1."""
    width: int = 128
    """Model dimension, from 1."""
    num_heads: int = 4
    """Attention heads, from 1."""
    head_width: int = 32
    """Numbers of a head, from 1."""
    mlp_width: int = 512
    """Width of the layer after attention, from 1."""
    context: int = 64
    """Length of a text in tokens, before any is hidden, from 8."""
    dropout: float = 0.0
    """Probability that dropout zeroes a value, from 0 to below 1; one rate everywhere."""
    vocab_size: int = 256
    """Distinct tokens of the text, from 1; those that mark spans are further ones."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        sizes = ("num_layers", "width", "num_heads", "head_width", "mlp_width", "vocab_size")
        return whole_numbers(self, *sizes) + whole_numbers(self, "context", least=8) + rates(self, "dropout")

    @property
    def num_hidden(self) -> int:
        """Tokens of a text that are hidden."""
        return max(round(HIDDEN_FRACTION * self.context), 1)

    @property
    def num_spans(self) -> int:
        """Into how many spans they fall."""
        return max(round(self.num_hidden / MEAN_SPAN), 1)

    @property
    def num_read(self) -> int:
        """Length of what the encoder reads: the text with a token for each span."""
        return self.context - self.num_hidden + self.num_spans

    @property
    def num_written(self) -> int:
        """Length of what the decoder writes: each span after its token, and a last one."""
        return self.num_hidden + self.num_spans + 1


class Distances(nn.Module):
    """What is added to the scores of each head: a learned number for each distance, (heads, queries, keys).

    Half of the buckets are exact distances, the other half wider and wider ones. Where both directions count, each has
    half of all; else the future's scores are -inf.
    """

    def __init__(self, options: Options, queries: int, is_causal: bool):
        super().__init__()
        self.bias = nn.Embedding(NUM_BUCKETS, options.num_heads)
        distances = torch.arange(queries)[None, :] - torch.arange(queries)[:, None]  # of key from query
        count = NUM_BUCKETS if is_causal else NUM_BUCKETS // 2
        away = (-distances).clamp(min=0) if is_causal else distances.abs()
        exact = count // 2
        wide = (away.clamp(min=1) / exact).log() / math.log(FARTHEST / exact) * (count - exact)
        buckets = torch.where(away < exact, away, (exact + wide.long()).clamp(max=count - 1))
        self.register_buffer("buckets", buckets + (0 if is_causal else count * (distances > 0)), persistent=False)
        future = torch.zeros(queries, queries).masked_fill(distances > 0, -math.inf) if is_causal else None
        self.register_buffer("future", future, persistent=False)

    def forward(self) -> torch.Tensor:
        bias = self.bias(self.buckets).permute(2, 0, 1)
        return bias if self.future is None else bias + self.future


class Attention(nn.Module):
    """x of (batch, queries, width) reads `memory` of (batch, keys, width), with `bias` added to the scores."""

    def __init__(self, options: Options):
        super().__init__()
        inner = options.num_heads * options.head_width
        self.num_heads = options.num_heads
        self.query = nn.Linear(options.width, inner, bias=False)
        self.key = nn.Linear(options.width, inner, bias=False)
        self.value = nn.Linear(options.width, inner, bias=False)
        self.out = nn.Linear(inner, options.width, bias=False)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self._heads(self.query(x)), self._heads(self.key(memory)), self._heads(self.value(memory))
        scores = q @ k.transpose(-2, -1)
        weights = self.dropout((scores if bias is None else scores + bias).softmax(dim=-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm: x + attention(x, x), in the decoder x + attention(x, memory), x + contract(relu(expand(x)))."""

    def __init__(self, options: Options, reads_memory: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.attention = Attention(options)
        if reads_memory:
            self.memory_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
            self.memory_attention = Attention(options)
        self.mlp_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.expand = nn.Linear(options.width, options.mlp_width, bias=False)
        self.contract = nn.Linear(options.mlp_width, options.width, bias=False)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        if memory is not None:
            x = x + self.dropout(self.memory_attention(self.memory_norm(x), memory, None))
        hidden = self.dropout(F.relu(self.expand(self.mlp_norm(x))))
        return x + self.dropout(self.contract(hidden))


class Half(nn.Module):
    """Encoder or decoder: (batch, time, width) -> the same shape, normed; `memory` is what a decoder reads besides."""

    def __init__(self, options: Options, time: int, is_decoder: bool):
        super().__init__()
        self.distances = Distances(options, time, is_causal=is_decoder)
        self.blocks = nn.ModuleList(Block(options, reads_memory=is_decoder) for _ in range(options.num_layers))
        self.final_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x, bias = self.dropout(x), self.distances()
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.dropout(self.final_norm(x))


class T5(nn.Module):
    """(read, int64 of (batch, num_read); before, int64 of (batch, num_written), what the decoder has written before
    each token) -> logits of (batch, num_written, all tokens)."""

    def __init__(self, options: Options):
        super().__init__()
        # After the text's tokens one for each span, one for the end, and one that the decoder begins with.
        self.embedding = nn.Embedding(options.vocab_size + options.num_spans + 2, options.width)
        self.encoder = Half(options, options.num_read, is_decoder=False)
        self.decoder = Half(options, options.num_written, is_decoder=True)
        self._initialise(options)

    def _initialise(self, options: Options) -> None:
        """As their program does: by what each matrix reads, queries smaller since scores are not scaled."""
        inner = options.num_heads * options.head_width
        stds = {
            "query": (options.width * options.head_width) ** -0.5, "key": options.width**-0.5,
            "value": options.width**-0.5, "out": inner**-0.5, "expand": options.width**-0.5,
            "contract": options.mlp_width**-0.5, "bias": options.width**-0.5, "embedding": 1.0,
        }  # fmt: skip
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=stds[name.split(".")[-2]])

    def forward(self, read: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.embedding(read))
        x = self.decoder(self.embedding(before), memory)
        return F.linear(x * x.shape[-1] ** -0.5, self.embedding.weight)  # as the tied embedding is of deviation 1


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return T5(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per token that is written; batch: see `prepare`."""
    scores, labels = predict(model, batch)
    return F.cross_entropy(scores, labels)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, of (batch_size * num_written, all tokens); the tokens that they are of, int64)."""
    read, before, written = batch
    return model(read, before).flatten(0, 1), written.flatten()


def prepare(options: Options, batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(read, int64 of (batch_size, num_read); before and written, int64 of (batch_size, num_written)), of a batch of
    text, which begins with a token that is read and ends with a span."""
    tokens = batch[0].cpu()
    count, time = tokens.shape
    shown = _parts(time - options.num_hidden, options.num_spans, count, generator)
    hidden = _parts(options.num_hidden, options.num_spans, count, generator)
    ends = torch.stack((shown, hidden), dim=2).flatten(1).cumsum(dim=1)  # of what is shown and hidden in turns
    stretch = torch.searchsorted(ends, torch.arange(time).expand(count, -1).contiguous(), right=True)
    is_hidden = stretch % 2 == 1
    begins = is_hidden & ~F.pad(is_hidden, (1, -1))
    marks = options.vocab_size + stretch // 2
    read = torch.where(begins, marks, tokens)[begins | ~is_hidden].view(count, -1)
    pairs = torch.stack((marks, tokens), dim=2)[torch.stack((begins, is_hidden), dim=2)].view(count, -1)
    written = F.pad(pairs, (0, 1), value=options.vocab_size + options.num_spans)
    before = F.pad(written, (1, -1), value=options.vocab_size + options.num_spans + 1)
    return tuple(each.to(batch[0].device) for each in (read, before, written))


def _parts(total: int, num_parts: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`total` as a sum of `num_parts` whole numbers from 1, each way as likely: int64 of (count, num_parts)."""
    cuts = torch.rand(count, total - 1, generator=generator).argsort(dim=1)[:, : num_parts - 1].sort(dim=1).values
    return F.pad(cuts + 1, (1, 0)).diff(dim=1, append=torch.full((count, 1), total))


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one text, without recomputation: 2 for each multiplication of projections,
    scores, what is mixed by them, layers and head; the backward has two products for each of the forward."""
    read, written = options.num_read, options.num_written
    inner = options.num_heads * options.head_width
    project, layer = options.width * inner, 2 * options.width * options.mlp_width
    encoder = read * (4 * project + layer) + 2 * read**2 * inner
    decoder = written * (6 * project + layer) + 2 * read * project + 2 * written * (written + read) * inner
    head = written * options.width * (options.vocab_size + options.num_spans + 2)
    return 3 * 2 * (options.num_layers * (encoder + decoder) + head)
