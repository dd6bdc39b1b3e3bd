"""Models of the package transformers, by type or from a folder; a recipe's contract is told in recipes/transformer.py.

    recipe=hf recipe.model.type=bert recipe.model.config.num_hidden_layers=4
    recipe=hf recipe.model.path=models/qwen3

Text is bytes, or for a folder that has a tokenizer.json what that makes of it. The loss is the one that the model's own
forward computes from labels: of the next token (`causal`, where the model itself compares each prediction with the
label after it), of the hidden ones (`masked`), of all of the text where the source has some hidden (`seq2seq`), or of
the class of images and sounds that are made here. This recipe alone imports something beside torch: transformers, which
`pip install 'aottrain[hf]'` installs, when a model is asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from . import _hf_data as data
from . import _hf_models as models
from . import _hf_packing as packing
from ._checks import rates
from ._sampling import continuation

# Beyond it, a step by which FLOPs are counted would take long.
MOST_PARAMETERS_COUNTED_WITH = 50_000_000
EXPORTS = "hf"  # what `export` writes, as export.format has it
TASKS = ("causal", "masked", "seq2seq", "image", "audio")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    type: str | None = None
    """Model type of transformers, as bert, t5 or vit; null is that of path, or qwen3."""
    task: str | None = None
    """What it is trained for: causal, masked, seq2seq, image or audio; null is what the type is first of all for."""
    path: str | None = None
    """Folder with config.json and safetensors weights to go on from; null is a small model with new weights."""
    config: dict | None = None
    """Keys of the type's configuration class, set one by one as config.hidden_size=256; the others are small."""
    context: int = 128
    """Length of a text in tokens, from 2."""
    dropout: float | None = 0.0
    """Probability of every dropout in the configuration, from 0 to below 1; null is as the configuration has them."""
    num_classes: int = 10
    """Kinds of images or sounds, from 2."""
    label_smoothing: float = 0.0
    """Part of each label that is spread over all of them in training, from 0 to below 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = []
        for name, least in (("context", 2), ("num_classes", 2)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                mistakes.append(f"{name}={value!r}: must be a whole number of at least {least}")
        rate = self.dropout
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1):
            mistakes.append(f"dropout={rate!r}: must be at least 0 and below 1, or null")
        if self.task is not None and self.task not in TASKS:
            mistakes.append(f"task={self.task}: must be one of {', '.join(TASKS)}, or null")
        if self.config is not None and not isinstance(self.config, Mapping):
            mistakes.append(f"config={self.config!r}: give its keys one by one, as config.hidden_size=256")
        mistakes += rates(self, "label_smoothing")
        mistakes = mistakes or models.mistakes(self)
        if not mistakes and self.label_smoothing and (unlike := packing.own_loss(self)):
            mistakes.append(
                f"label_smoothing={self.label_smoothing}: of type {models.type_of(self)}, {unlike}; use 0.0"
            )
        return mistakes

    @property
    def reads_text(self) -> bool:
        """Whether it is trained on text, and not on what `make_batch` gives."""
        return models.task_of(self) in models.TEXT_TASKS

    @property
    def writes_text(self) -> bool:
        """Whether `generate` makes sense."""
        return models.task_of(self) == "causal"

    @property
    def reads_packed(self) -> bool | str:
        """Whether `loss` takes packed documents, or why it does not."""
        way = packing.way_of(self)
        return way if isinstance(way, str) else True

    @property
    def image_size(self) -> int | None:
        """Height and width of the images that it classifies; None where it takes no square ones."""
        size = data.image_size(_configuration(self)) if models.task_of(self) == "image" else (0, 1)
        return size[0] if size[0] == size[1] else None

    @property
    def channels(self) -> int:
        """Of its images."""
        return data.num_channels(_configuration(self))

    @property
    def data_keys(self) -> dict[str, str]:
        """By which keys of this recipe what its data must fit is set, where they have other names."""
        section = "config.vision_config" if hasattr(_configuration(self), "vision_config") else "config"
        return {"image_size": f"{section}.image_size", "channels": f"{section}.num_channels"}

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer.json of the folder, where it has one."""
        return models.tokenizer_file(self)

    @property
    def vocab_size(self) -> int:
        """Distinct tokens of the model."""
        return models.configuration(self).get_text_config().vocab_size


def build(options: Options) -> nn.Module:
    """The model; ValueError lists every mistake in the options."""
    mistakes = options.check()
    if mistakes:
        raise ValueError("\n".join(mistakes))
    model = models.model(options)
    model.longest = options.context  # which `generate` reads at a time
    model.tokenizer_files = models.tokenizer_files(options)  # which `export` writes, too
    if torch.get_default_device().type != "meta":
        _call_once(model, _example(options, 1))
    return model


@torch.no_grad()
def _call_once(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    """Some models write down on themselves, in their first call, what they find out then: a call of another kind, which
    no compiler would take for the ones after it. Weights, buffers and random streams stay."""
    was_training = model.training
    with torch.random.fork_rng(devices=[]):
        loss(model.eval(), batch)
    model.train(was_training)


def _example(options: Options, batch_size: int) -> tuple[torch.Tensor, ...]:
    """Some batch."""
    generator = torch.Generator().manual_seed(0)
    if not options.reads_text:
        return make_batch(options, batch_size, generator)
    text = torch.ones(batch_size, options.context, dtype=torch.int64)
    return prepare(options, (text, text), generator)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The model's own loss of (inputs, labels), or of (tokens,), which are their own labels; of packed documents, see
    `prepare`, the cross-entropy of its logits, and so with label smoothing."""
    inputs, labels = batch[0], batch[-1]
    smoothing = model.label_smoothing if model.training else 0.0
    if len(batch) > 2:
        logits = model(**packing.arguments(batch, model.task == "causal")).logits
        return packing.entropy(logits, labels, smoothing)
    if smoothing:
        return packing.unpacked(model, inputs, labels, smoothing)
    return model(**{model.main_input_name: inputs}, labels=labels).loss


def weight(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """How many labels the loss is the mean of."""
    return (batch[-1] != data.IGNORED).sum()


def prepare(options: Options, batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """What the model reads of a batch of text, (tokens, the ones after them): see the head of this module. Another
    batch stays as it is."""
    if not options.reads_text:
        return batch
    tokens, task = batch[0], models.task_of(options)
    if task == "causal":
        inputs, labels = tokens, batch[1]
    else:
        inputs, where = data.hide(tokens, models.mask_token(options), generator)
        labels = tokens if task == "seq2seq" else tokens.masked_fill(~where, data.IGNORED)
    if len(batch) > 2:  # packed documents; a place behind them has no label
        way = packing.way_of(options)
        return packing.told((inputs, labels.masked_fill(batch[1] == data.IGNORED, data.IGNORED), batch[2]), way)
    return (tokens,) if task == "causal" else (inputs, labels)


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, float32 of (batch_size, channels, height, width), or sounds; labels, int64 of (batch_size,))."""
    config, classes = _configuration(options), options.num_classes
    labels = torch.randint(classes, (batch_size,), generator=generator)
    if models.task_of(options) == "audio":
        return data.sound_for(config, labels, classes, generator), labels
    channels = data.num_channels(config)
    return data.images(labels, classes, channels, data.image_size(config), generator), labels


def flops_per_sample(options: Options) -> int | None:
    """FLOPs of matrix products and convolutions in forward and backward for one example, without recomputation.

    Counted by torch while a step is taken: one without numbers, or, of a model that asks for some, a real one where it
    is small; else None.
    """
    batch = _example(options, 2)  # of one example alone a batch norm would have no variance
    for device in ("meta", "cpu"):
        try:
            with torch.device(device), torch.random.fork_rng(devices=[]):
                model = models.model(options).train()
                if device == "cpu" and model.num_parameters() > MOST_PARAMETERS_COUNTED_WITH:
                    return None
                with FlopCounterMode(display=False) as counter:
                    loss(model, tuple(tensor.to(device) for tensor in batch)).backward()
            return counter.get_total_flops() // 2
        except RuntimeError:  # a value was asked of a tensor that has none
            continue
    return None


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
        return model(tokens[:, -model.longest :]).logits[:, -1]

    return continuation(model, next_logits, prompt, num_tokens, temperature, generator, top_k)


def export(model: nn.Module, folder: Path) -> None:
    """Write a folder that transformers' `from_pretrained` reads: config.json, model.safetensors, and the tokenizer of
    the folder that the model is from."""
    model.save_pretrained(folder)
    for name, content in model.tokenizer_files.items():
        (folder / name).write_bytes(content)


def _configuration(options: Options) -> Any:
    """That of the model. Batches are made at each step, and no options change."""
    return _cached(json.dumps(asdict(options), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _cached(text: str) -> Any:
    return models.configuration(Options(**json.loads(text)))
