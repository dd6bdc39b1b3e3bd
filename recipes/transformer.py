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
    metrics(model, batch) -> {name: number}
                                     of held-out batches, beside the loss: means are taken as of the loss, and stand
                                     wherever the held-out loss does
    make_batch(options, batch_size, generator) -> tuple of tensors
                                     data of its own, unless `data=` names other data that the recipe takes
    prepare(options, batch, generator) -> tuple of tensors
                                     what `loss` gets of a batch that `data=` gives, where it wants something else
    export(model, folder)            writes the model for other programs, for task=export; EXPORTS, a text, is the
                                     export.format that this is, where it is one of these

What data a recipe takes is said by the fields or properties of its Options:

    context, vocab_size              text: (inputs, targets), each int64 of (batch_size, context), bytes or other tokens
                                     below vocab_size (data=text, data=tokens)
    image_size, num_classes          images: (images, float32 of (batch_size, channels, image_size, image_size); labels,
                                     int64 of (batch_size,)); channels is 3 where Options has none (data=images)
    num_features                     rows: (x, float32 of (batch_size, num_features); y of (batch_size,), int64 where
                                     Options has num_classes, else float32) (data=arrays)

A recipe for several kinds of data says so by properties of its Options: `reads_text`, where make_batch is not asked,
and `writes_text`, where generate is. `tokenizer` is the path of a tokenizer.json that the model was made with, or None.
`reads_packed` is True where `loss` takes documents that are packed into rows (data.packing): (inputs, targets, starts),
by which attention and positions stay within a document, and where a target of -100 is none; or a text, why it does not.
`image_size` is None where it takes no images, and `data_keys` names the keys by which it and `channels` are set, if
they are others.

Loops, devices, precision, compilation and logging belong to the trainer, so that they are the same for every recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._causal import generate, loss, weight
from ._checks import checked, divides, rates, whole_numbers

__all__ = ["Options", "build", "flops_per_token", "generate", "loss", "weight"]


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
    label_smoothing: float = 0.0
    """Part of each target that is spread over all tokens in training, from 0 to below 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "num_layers", "width", "num_heads", "context", "vocab_size")
        mistakes = mistakes or divides(self, "num_heads", "width")
        return mistakes + rates(self, "dropout", "label_smoothing")

    @property
    def reads_packed(self) -> bool:
        """Whether `loss` takes packed documents."""
        return True


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

    def forward(self, x: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.num_heads)
        hidden = self.future[:time, :time] if others is None else self.future[:time, :time] | others
        scores = scores.masked_fill(hidden, -math.inf)
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

    def forward(self, x: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), others)
        return x + self.dropout(self.contract(F.gelu(self.expand(self.mlp_norm(x)))))


class Transformer(nn.Module):
    """tokens, int64 of (batch, time) with time <= context -> logits of (batch, time, vocab_size).

    starts: of packed documents, as tokens: of each place the one at which its document begins."""

    def __init__(self, options: Options):
        super().__init__()
        self.context, self.label_smoothing = options.context, options.label_smoothing
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

    def forward(self, tokens: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        if starts is None:
            positions, others = self.position_embedding.weight[: tokens.shape[1]], None
        else:
            positions = self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device) - starts)
            others = (starts[:, :, None] != starts[:, None, :])[:, None]  # (batch, 1, time, time): another document
        x = self.dropout(self.token_embedding(tokens) + positions)
        for block in self.blocks:
            x = block(x, others)
        return F.linear(self.final_norm(x), self.token_embedding.weight)  # the head is tied to the embedding


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Transformer(checked(options))


def flops_per_token(options: Options) -> int:
    """FLOPs of forward and backward for one token, without recomputation.

    Forward: 2 per weight of a matrix product: 12 width^2 in each block (qkv 3, out 1, mlp 4 + 4) and vocab_size * width
    in the head; and 4 * context * width in each block for the two attention products, counted whole because masked
    scores are computed too. The backward has two products for each of the forward, so the step has 3 times as many.
    """
    weights = options.num_layers * 12 * options.width**2 + options.vocab_size * options.width
    attention = options.num_layers * 4 * options.context * options.width
    return 3 * (2 * weights + attention)
