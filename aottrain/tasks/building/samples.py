"""Text that a model writes: what its recipe's `generate` gives, as text and in a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aottrain.config.choices import BF16_WEIGHTS
from aottrain.config.extensions.recipes import writes_text
from aottrain.data.batches import Codec
from aottrain.errors import NumericsError
from aottrain.ir.settings.files import printable
from aottrain.metrics.sinks import write_result
from aottrain.trainer.engines import casts_of
from aottrain.trainer.job import Job

FILE = "sample.txt"
PROMPT = "The "
TEMPERATURE = 0.8


def unknown_token(prompt: bytes | list[int], options: Any) -> int | None:
    """The first token of the prompt that the model has none of; None where it has all, or does not say."""
    size = getattr(options, "vocab_size", None)
    return None if size is None else next((token for token in prompt if token >= size), None)


def written(
    recipe: ModuleType,
    model: torch.nn.Module,
    codec: Codec,
    prompt: bytes | list[int],
    num_tokens: int,
    temperature: float,
    seed: int,
    precision: str,
    **limits: int,
) -> str:
    """The prompt and what the model makes of it, for a terminal. precision: weights of two types need autocast.
    limits: keywords of `generate` that not every recipe has. NumericsError: the model gives nothing to draw from."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    with casts_of(precision, device) if precision == BF16_WEIGHTS else nullcontext():
        try:
            tokens = recipe.generate(model, prompt, num_tokens, temperature, generator, **limits)
        except FloatingPointError as error:
            raise NumericsError(f"no text can be written: {error}") from error
    return printable(codec.decode(prompt + tokens))


def sampler(
    recipe: ModuleType, options: Any, model: torch.nn.Module, seed: int, codec: Codec | None, precision: str
) -> Callable[[int], str] | None:
    """None where the recipe writes nothing, its tokens stand for no text that is known, or the prompt has others."""
    if not writes_text(recipe, options) or codec is None:
        return None
    prompt = codec.encode(PROMPT)
    if unknown_token(prompt, options) is not None:
        return None

    def sample(num_bytes: int) -> str:
        """Text by the model as it is now, of about that many bytes."""
        num_tokens = math.ceil(num_bytes / codec.bytes_per_token)
        return written(recipe, model, codec, prompt, num_tokens, TEMPERATURE, seed, precision)

    return sample


def write_sample(folder: Path, text: str) -> Path:
    """Where it has been written. OutputError: it cannot be."""
    path = folder / FILE
    write_result(path, text + "\n")
    return path


def leave_sample(job: Job, num_bytes: int, folder: Path, say: Callable[[str], None]) -> None:
    """Say and write what the model writes, where it does. A run has ended well without it, whatever its weights are.
    OutputError: the file cannot be written."""
    if job.sample is None:
        return
    try:
        with torch.no_grad(), job.with_averages(), job.module.whole():
            text = job.sample(num_bytes)
    except NumericsError as error:
        say(f"warning: {error}")
        return
    say(f"--- it writes ({FILE}):\n{text}\n---")
    write_sample(folder, text)
