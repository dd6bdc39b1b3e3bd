"""What recipes of text share: how they write it, token by token, each drawn from what the model makes of those before
it; and how many tokens a batch's loss is the mean of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

IGNORED = -100  # the target that torch's losses leave out
NUM_BYTES = 256  # a model of bytes may have more tokens, which stand for none


@torch.no_grad()
def continuation(
    model: nn.Module,
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    prompt: bytes | list[int],
    num_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
    top_k: int | None,
) -> bytes | list[int]:
    """`num_tokens` tokens that follow `prompt`, bytes after bytes and a list after a list; the contract of `generate`.

    next_logits: of the tokens so far, int64 of (1, time) on the model's device, the logits of the next one, (1, num).
    The model is in evaluation mode meanwhile, and left in the mode it was in. ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("prompt: must have at least one token")
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        tokens = torch.tensor([list(prompt)], dtype=torch.int64)
        for _ in range(num_tokens):
            logits = next_logits(tokens.to(device)).float().cpu()
            logits = logits[:, :NUM_BYTES] if isinstance(prompt, bytes) else logits
            tokens = torch.cat((tokens, next_token(logits, temperature, generator, top_k)), dim=1)
    finally:
        model.train(was_training)
    return type(prompt)(tokens[0, len(prompt) :].tolist())


def next_token(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None = None, top_k: int | None = None
) -> torch.Tensor:
    """A token for each row, int64 of (batch, 1), of logits on the CPU, float32 of (batch, num).

    temperature: what logits are divided by before one is drawn; 0 takes the likeliest. top_k: only that many of the
    likeliest are drawn from (Fan, Lewis & Dauphin, 2018, arXiv:1805.04833); None, or as many as there are, is all.
    FloatingPointError: the largest logit of a row is not finite, as where weights have grown without bound.
    """
    if not logits.amax(dim=-1).isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    likeliest, tokens = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    below = likeliest.double() - likeliest[:, :1]  # so that even a tiny temperature makes no infinity of the largest
    chosen = torch.multinomial((below / temperature).softmax(dim=-1), 1, generator=generator)
    return tokens.gather(-1, chosen)


def num_targets(batch: tuple[torch.Tensor, ...]) -> int | torch.Tensor:
    """Of (inputs, targets) all of them; of packed documents, (inputs, targets, starts), those that are not IGNORED."""
    return batch[1].numel() if len(batch) == 2 else (batch[1] != IGNORED).sum()
