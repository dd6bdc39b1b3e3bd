"""Packed documents and label smoothing for models of transformers, which know their own ways to be told of them.

Documents that share a row are kept apart by positions that begin anew, from which many models make their mask
themselves, or by a mask of four dimensions beside them. Which of these a model reads is tried, not assumed: one with
new weights gives the logits of two documents in a row and of each alone, and the first way that makes them equal is
taken. What has no attention (a state, a convolution over time) or other positions has none, and is refused.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from . import _hf_models as models

if TYPE_CHECKING:
    from .hf import Options

# Beyond it a small model of the same type is tried in its place.
MOST_PARAMETERS_TRIED = 50_000_000
# Relative to the largest logit. Right ways come to 1e-6, wrong ones to 2e-3 and more.
TOLERANCE = 2e-5
# What names how far a token sees, by which a large model differs from a small one of its type.
WINDOWS = ("sliding_window", "window_size", "attention_window", "local_attention", "attention_chunk_size")


@dataclass(frozen=True)
class Way:
    """How a model is told where documents begin."""

    first: int = 0
    """Position of a document's first token; some types begin behind the number of their padding token."""
    has_mask: bool = False
    """Whether it is given a mask, beside positions."""


def told(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], way: Way) -> tuple[torch.Tensor, ...]:
    """(tokens, positions, labels), with `starts` before the labels where a mask is made of them; of packed documents,
    (tokens, labels, starts), each int64 of (batch, time). starts: of each place that at which its document begins."""
    tokens, labels, starts = batch
    positions = torch.arange(starts.shape[1], device=starts.device) - starts + way.first
    return (tokens, positions, starts, labels) if way.has_mask else (tokens, positions, labels)


def arguments(told: tuple[torch.Tensor, ...], is_causal: bool) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model for what `told` gives."""
    tokens, positions, *starts, _ = told
    given = {"input_ids": tokens, "position_ids": positions}
    if starts:
        seen = starts[0][:, :, None] == starts[0][:, None, :]
        seen = seen.tril() if is_causal else seen
        # Added to the scores, which every implementation of attention in the package takes.
        given["attention_mask"] = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    return given


def entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy in nats of (..., num_classes) and (...), in float32 as the package has it."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), label_smoothing=smoothing)


def unpacked(model: Any, inputs: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The loss of one that is not packed, with label smoothing; of tokens that are their own labels for the next."""
    logits = model(**{model.main_input_name: inputs}, labels=labels).logits
    if model.task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return entropy(logits, labels, smoothing)


def way_of(options: Options) -> Way | str:
    """How the model of these options is told of documents; where it cannot be, a text that says so."""
    return _way(json.dumps(asdict(options), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _way(text: str) -> Way | str:
    options = _options(text)
    task = models.task_of(options)
    about = f"{models.type_of(options)} of transformers (recipe.model.task={task})"
    if task not in ("causal", "masked"):
        return f"{about} has a source and a target, which documents in a row would share"
    if unlike := own_loss(options):
        return f"{about}: {unlike}"
    with _trying(options) as (model, _):
        padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
        for way in (Way(), Way(has_mask=True), Way(padding + 1, has_mask=True)):
            if _keeps_apart(model, options.context, way, task == "causal"):
                return way
    return f"{about} keeps documents in a row apart neither by positions nor by a mask"


def _keeps_apart(model: Any, context: int, way: Way, is_causal: bool) -> bool:
    """Whether two documents in a row have the logits of each alone; a place behind them, if any, is on its own."""
    lengths = [max(1, context // 2), max(1, (context - 1) // 2)]
    documents = [_tokens(model.config.get_text_config(), length) for length in lengths]
    both, rest = sum(lengths), context - sum(lengths)
    row = torch.cat([*documents, torch.zeros(1, rest, dtype=torch.int64)], dim=1)
    starts = torch.tensor([[0] * lengths[0] + [lengths[0]] * lengths[1] + [both] * rest])
    try:
        expected = torch.cat([model(document).logits for document in documents], dim=1)
        found = model(**arguments(told((row, row, starts), way), is_causal)).logits[:, :both]
    except Exception:  # each class has its own errors for what it does not take
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _tokens(config: Any, count: int) -> torch.Tensor:
    """Some, int64 of (1, count), none of them padding."""
    size, padding = config.vocab_size, getattr(config, "pad_token_id", None)
    tokens = torch.randint(size // 2, size, (1, count), generator=torch.Generator().manual_seed(0))
    return tokens if padding is None else tokens.masked_fill(tokens == padding, size // 2 + (padding == size // 2))


def own_loss(options: Options) -> str:
    """Why a cross-entropy of the model's logits is not its own loss; "" where it is."""
    return _own_loss(json.dumps(asdict(replace(options, label_smoothing=0.0)), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _own_loss(text: str) -> str:
    from .hf import _example

    with _trying(_options(text)) as (model, options):
        batch = _example(options, 2)
        inputs, labels = batch[0], batch[-1]
        try:
            own = model(**{model.main_input_name: inputs}, labels=labels).loss
            found = unpacked(model, inputs, labels, 0.0)
        except Exception:  # no logits, or of another shape
            return "its own loss is no cross-entropy of its logits"
        is_own = torch.allclose(own.float(), found, rtol=1e-4)
        return "" if is_own else "its own loss is more than a cross-entropy of its logits"


def _options(text: str) -> Options:
    from .hf import Options

    return Options(**json.loads(text))


@contextmanager
def _trying(options: Options) -> Iterator[tuple[Any, Options]]:
    """(The model of these options, or where it is large a small one of its type that sees as far; its options)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        if _num_parameters(options) > MOST_PARAMETERS_TRIED:
            known = models.configuration(options).to_dict()
            kept = {key: value for key, value in known.items() if isinstance(value, bool) or key in WINDOWS}
            name, task = models.type_of(options), models.task_of(options)
            options = replace(options, type=name, task=task, path=None, config=kept)
        yield models.model(options).eval(), options


def _num_parameters(options: Options) -> float:
    """Infinity where it takes real numbers to find out."""
    try:
        with torch.device("meta"):
            return models.model(options).num_parameters()
    except Exception:  # each class has its own errors
        return math.inf
