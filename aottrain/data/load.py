"""What `data=` names, read and checked; and whether a recipe takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aottrain.config.choices import BYTES, DATA_KINDS
from aottrain.config.extensions.recipes import kinds_taken, not_taken
from aottrain.data.arrays import load_arrays
from aottrain.data.batches import Source
from aottrain.data.image_files import load_images
from aottrain.data.tokens.text import load_text
from aottrain.data.tokens.token_files import load_tokens
from aottrain.errors import ConfigError

if TYPE_CHECKING:
    from aottrain.config.run import DataConfig


def load(data: DataConfig, options: Any, examples_per_step: int) -> Source:
    """The source that `data` names, for a model with these options. ConfigError: the model takes another kind, the
    data is missing or wrong, or has fewer examples to train on than a step."""
    if DATA_KINDS[data.name] not in kinds_taken(options):
        raise ConfigError(not_taken(data.name, options))
    source = _LOADERS[data.name](data, options)
    count = len(source.train)
    if not count or not len(source.held_out):
        part = "trained on" if not count else "held out"
        raise ConfigError(f"data.path={data.path}: no example is {part} (data.held_out={data.held_out})")
    if data.order == "epochs":
        check_count(f"data.path={data.path}", count, examples_per_step, " or data.order=random")
    return source


def check_count(key: str, count: int, examples_per_step: int, instead: str = "") -> None:
    """ConfigError: a step takes more examples than there are to train on."""
    if count < examples_per_step:
        text = f"has {count:,} examples to train on, fewer than a step takes ({examples_per_step:,})"
        raise ConfigError(f"{key}: {text}: a smaller data.batch_size{instead}")


def _text(data: DataConfig, options: Any) -> Source:
    if data.packing and (reads := getattr(options, "reads_packed", False)) is not True:
        why = reads or "the loss of this recipe takes no packed documents"
        raise ConfigError(f"data.packing=true: {why}; use false")
    return load_text(
        data.path,
        held_out=data.held_out,
        context=options.context,
        vocab_size=options.vocab_size,
        order=data.order,
        tokenizer=None if data.tokenizer == BYTES else data.tokenizer or getattr(options, "tokenizer", None),
        key=data.key,
        packing=data.packing,
    )


def _tokens(data: DataConfig, options: Any) -> Source:
    if data.path is None:
        raise ConfigError("data.path=null: data=tokens needs a file of tokens or a folder of them")
    return load_tokens(
        data.path,
        held_out=data.held_out,
        context=options.context,
        vocab_size=options.vocab_size,
        order=data.order,
        dtype=data.dtype,
        tokenizer=data.tokenizer,
    )


_LOADERS: dict[str, Callable[[DataConfig, Any], Source]] = {
    "text": _text,
    "tokens": _tokens,
    "images": load_images,
    "arrays": load_arrays,
}
