"""A GPT-2-shaped decoder of bytes or other tokens; and, as the first recipe, the pattern for the next one.

A recipe is one module that says *what* is trained and imports nothing but torch (recipes/hf.py alone asks for another
package). It is found by its name (`recipe=transformer` is `recipes/transformer.py`) and has

    Options                          frozen dataclass of its settings, with `check() -> list[str]` of every mistake
    build(options) -> nn.Module      the model, initialised from torch's default generator
    loss(model, batch) -> Tensor     a scalar, the mean over the batch

and, where they make sense,

    flops_per_token(options)         for the model FLOP/s in summary.json, or flops_per_sample(options); None: unknown
    weight(batch)                    of how many tokens or samples the batch's loss is the mean, a number; where padding
                                     or `ignore_index` makes that differ, so that accumulation and averages stay right
    generate(model, prompt, num_tokens, temperature, generator) -> tokens that follow
                                     for the sample that is printed after training, and task=generate; top_k=..., a
                                     keyword, where the draw can be limited to the likeliest tokens
    predict(model, batch) -> (scores, float of (n, num_classes); labels, int64 of (n,))
                                     of a recipe that classifies, for the accuracy that task=eval measures
    make_batch(options, batch_size, generator) -> tuple of tensors
                                     data of its own, unless `data=` names other data that the recipe takes
    prepare(options, batch, generator) -> tuple of tensors
                                     what `loss` gets of a batch of text, where it wants something else
    export(model, folder)            writes the model for other programs, for task=export

What data a recipe takes is said by the fields or properties of its Options:

    context, vocab_size              text: (inputs, targets), each int64 of (batch_size, context), bytes or other tokens
                                     below vocab_size (data=text, data=tokens)
    image_size, num_classes          images: (images, float32 of (batch_size, channels, image_size, image_size); labels,
                                     int64 of (batch_size,)); channels is 3 where Options has none (data=images)
    num_features                     rows: (x, float32 of (batch_size, num_features); y of (batch_size,), int64 where
                                     Options has num_classes, else float32) (data=arrays)

A recipe for several kinds of data says so by properties of its Options: `reads_text`, where make_batch is not asked,
and `writes_text`, where generate is.

Loops, devices, precision, compilation and logging belong to the trainer, so that they are the same for every recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._sampling import continuation


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 192
    """Model dimension, which num_heads divides."""
    num_heads: int = 6
    """Attention heads, from 1."""
    context: int = 128
    """Longest sequence in bytes, from 1."""
    dropout: float = 0.1
    """Probability that dropout zeroes a value, from 0 to below 1; one rate everywhere."""
    vocab_size: int = 256
    """Distinct tokens, from 1; 256 holds every byte."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = []
        for name in ("num_layers", "width", "num_heads", "context", "vocab_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                mistakes.append(f"{name}={value!r}: must be a whole number of at least 1")
        if not mistakes and self.width % self.num_heads != 0:
            mistakes.append(f"num_heads={self.num_heads}: must divide width={self.width}")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            mistakes.append(f"dropout={self.dropout!r}: must be at least 0 and below 1")
        return mistakes


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width).

    Written out rather than called as `scaled_dot_product_attention`: with dropout that call is this same formula on a
    CPU, and written out, each part of it can be seen, fused and recomputed by a compiler.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.num_heads = options.num_heads
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)
        self.attention_dropout = nn.Dropout(options.dropout)
        self.residual_dropout = nn.Dropout(options.dropout)
        future = torch.ones(options.context, options.context, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.num_heads)
        scores = scores.masked_fill(self.future[:time, :time], -math.inf)
        weights = self.attention_dropout(scores.softmax(dim=-1))
        merged = (weights @ v).transpose(1, 2).reshape(batch, time, width)
        return self.residual_dropout(self.out(merged))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: Options):
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.width)
        self.attention = Attention(options)
        self.mlp_norm = nn.LayerNorm(options.width)
        self.expand = nn.Linear(options.width, 4 * options.width)
        self.contract = nn.Linear(4 * options.width, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.mlp_norm(x)))))


class Transformer(nn.Module):
    """tokens, int64 of (batch, time) with time <= context -> logits of (batch, time, vocab_size)."""

    def __init__(self, options: Options):
        super().__init__()
        self.context = options.context
        self.token_embedding = nn.Embedding(options.vocab_size, options.width)
        self.position_embedding = nn.Embedding(options.context, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.final_norm = nn.LayerNorm(options.width)
        self._initialise(options.num_layers)

    def _initialise(self, num_layers: int) -> None:
        """GPT-2: N(0, 0.02), zero biases; what writes into the residual stream scaled by 1/sqrt(number of writes)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim >= 2:
                writes_residual = name.endswith(("attention.out.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if writes_residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.position_embedding.weight[: tokens.shape[1]]
        x = self.dropout(self.token_embedding(tokens) + positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)  # the head is tied to the embedding


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    mistakes = options.check()
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return Transformer(options)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per byte; batch = (inputs, targets), each int64 of (batch_size, context)."""
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token, without recomputation.

    Forward: 2 per weight of a matrix product: 12 width^2 in each block (qkv 3, out 1, mlp 4 + 4) and vocab_size * width
    in the head; and 4 * context * width in each block for the two attention products, counted whole because masked
    scores are computed too. The backward has two products for each of the forward, so the step has 3 times as many.
    """
    weights = options.num_layers * 12 * options.width**2 + options.vocab_size * options.width
    attention = options.num_layers * 4 * options.context * options.width
    return 3 * (2 * weights + attention)


def generate(
    model: nn.Module,
    prompt: bytes | list[int],
    num_tokens: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    top_k: int | None = None,
) -> bytes | list[int]:
    """`num_tokens` tokens that follow `prompt` (at least one), bytes after bytes and a list after a list.

    temperature: 0 takes the likeliest token each time. generator: a CPU generator to draw from. top_k: how many of the
    likeliest tokens are drawn from; None is all. Dropout is off meanwhile; the model is left in the mode it was in.
    """

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, -model.context :])[:, -1]

    return continuation(model, next_logits, prompt, num_tokens, temperature, generator, top_k)
