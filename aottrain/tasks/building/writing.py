"""A model of text as compiled programs, for `generate`: the prompt grows by a token at each call, and each length of it
would be a program of its own where a model's code has lengths as numbers. So there are few lengths: what is shorter is
filled up behind its last token, of which a causal model's logits know nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from aottrain.compiler.frontends.refusals import count_fallback
from aottrain.errors import UnsupportedError
from aottrain.explain.report import CompileReport

SHORTEST = 16  # tokens of the shortest program
# Of the largest logit; how far those of a filled-up prompt may be from eager's: float32 rounds far less, bfloat16 about
# so much, and a model that looks at what follows is farther off.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
NOT_CAUSAL = "what stands behind a token changes the model's logits, so prompts are not filled up to few lengths"


class Logits(nn.Module):
    """Tokens, int64 of (1, time) -> logits, (1, time, num), without what transformers' models return beside."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model(tokens))


class FewLengths(nn.Module):
    """Stands for a model in a recipe's `generate`, with its attributes: tokens of (1, time) go through the program of
    the next power of two, and every other call to the model itself.

    The first filled-up call is compared with eager. A model whose logits are others runs eagerly from then on, which
    is counted in `report`, as is what cannot be compiled.
    """

    def __init__(self, model: nn.Module, compile_: Callable[[nn.Module], Any], longest: int | None):
        """compile_: of a module the compiled one, with `report`. longest: tokens that the model reads at most."""
        super().__init__()
        self.model = model
        self.longest_read = longest
        self.program = compile_(Logits(model))
        self.is_causal: bool | None = None  # None: not known yet
        self.train(model.training)

    @property
    def report(self) -> CompileReport:
        return self.program.report

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _is_prompt(args[0]) or self.model.training or self.is_causal is False:
            return self.model(*args, **kwargs)
        (tokens,) = args
        logits = self.program(self._filled(tokens))[:, : tokens.shape[1]]
        if self.is_causal is None:
            return self._first(tokens, logits)
        return logits if self.is_bare else self.kind(logits=logits)

    def _first(self, tokens: torch.Tensor, logits: torch.Tensor) -> Any:
        """Eager's own result, which also tells in what the model returns its logits."""
        result = self.model(tokens)
        expected = logits_of(result)
        self.is_bare, self.kind = isinstance(result, torch.Tensor), type(result)
        allowed = TOLERANCE if expected.dtype == torch.float32 and not _is_half(self.model) else HALF_TOLERANCE
        if not _is_near(logits.float(), expected.float(), allowed):
            self.is_causal = False
            count_fallback(self.report, UnsupportedError(NOT_CAUSAL), 1)  # said as ours: its caller is torch's code
        elif tokens.shape[1] != self._length(tokens.shape[1]):
            self.is_causal = True
        return result

    def _length(self, num_tokens: int) -> int:
        length = max(SHORTEST, 1 << (num_tokens - 1).bit_length())
        return length if self.longest_read is None else max(num_tokens, min(length, self.longest_read))

    def _filled(self, tokens: torch.Tensor) -> torch.Tensor:
        """With its last token again and again: one that the model is sure to have."""
        missing = self._length(tokens.shape[1]) - tokens.shape[1]
        return torch.cat((tokens, tokens[:, -1:].expand(-1, missing)), dim=1)


def logits_of(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.logits


def _is_near(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    """Whether no finite number is farther off than a share of the largest one, and all others are the same ones."""
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    return torch.allclose(found, expected, rtol=0.0, atol=allowed * float(largest), equal_nan=True)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 2 and value.shape[1] > 0


def _is_half(model: nn.Module) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
