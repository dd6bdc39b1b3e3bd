"""What recipes have in common that predict the next token: their loss, and how they write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ._sampling import continuation, num_targets


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per token; batch = (inputs, targets), each int64 of (batch_size, context), or of
    packed documents (inputs, targets, starts). A model with `label_smoothing` is trained with it."""
    inputs, targets, *starts = batch
    logits = model(inputs, *starts)
    smoothing = getattr(model, "label_smoothing", 0.0) if model.training else 0.0
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)


def weight(batch: tuple[torch.Tensor, ...]) -> int | torch.Tensor:
    """Tokens that the loss is the mean of."""
    return num_targets(batch)


def generate(
    model: nn.Module,
    prompt: bytes | list[int],
    num_tokens: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    top_k: int | None = None,
) -> bytes | list[int]:
    """`num_tokens` tokens that follow `prompt` (at least one), bytes after bytes and a list after a list.

    model: tokens -> logits of each next one, with the attribute `context`, how many tokens it can read. temperature: 0
    takes the likeliest token each time. generator: a CPU generator to draw from. top_k: how many of the likeliest
    tokens are drawn from; None is all. Dropout is off meanwhile; the model is left in the mode it was in.
    """

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, -model.context :])[:, -1]

    return continuation(model, next_logits, prompt, num_tokens, temperature, generator, top_k)
