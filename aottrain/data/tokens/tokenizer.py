"""Text as tokens: its bytes, byte-pair encoding trained once on the corpus, or a tokenizer's own file.

Byte-pair encoding: Sennrich, Haddow & Birch (2016), arXiv:1508.07909, over bytes as GPT-2 has it; trained and run by
the library `tokenizers` (the extra `aottrain[data]`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aottrain.config.choices import BPE, TOKENIZERS
from aottrain.data.order import Numbers
from aottrain.data.tokens.documents import imported
from aottrain.errors import ConfigError
from aottrain.toolchain.kept import keep, key_of, read_kept

PIECE_BYTES = 1 << 16  # that text is cut into at ends of lines, so that pieces are encoded side by side
NUM_BYTES = 256
_KIND = "tokenizers"  # of what is kept for other processes


@dataclass(frozen=True)
class Bytes:
    """Each byte is a token; bytes that are no UTF-8 are shown as escapes, \\xff."""

    bytes_per_token: float = 1.0

    def encode(self, text: str) -> bytes:
        return text.encode()

    def decode(self, tokens: bytes | list[int]) -> str:
        return bytes(tokens).decode(errors="backslashreplace")


@dataclass(frozen=True)
class Tokenizer:
    """One of the library's."""

    implementation: Any
    bytes_per_token: float

    def encode(self, text: str) -> list[int]:
        return list(self.implementation.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: bytes | list[int]) -> str:
        return str(self.implementation.decode(list(tokens), skip_special_tokens=False))


def read_tokenizer(path: str, vocab_size: int) -> Any:
    """The tokenizer of a tokenizer.json. ConfigError: it is missing, something else, or has more tokens than the
    model."""
    library = imported("tokenizers", f"data.tokenizer={path}")
    if not Path(path).is_file():
        allowed = f"{', '.join(TOKENIZERS)}, null, or a tokenizer.json"
        raise ConfigError(f"data.tokenizer={path}: there is no such file; allowed: {allowed}")
    try:
        tokenizer = library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises a plain Exception
        raise ConfigError(f"data.tokenizer={path}: is no tokenizer of the library tokenizers: {error}") from error
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise ConfigError(f"data.tokenizer={path}: has {size} tokens, but the model's vocab_size is {vocab_size}")
    return tokenizer


def trained_bpe(text: bytes, vocab_size: int, source: str) -> Any:
    """Byte-pair encoding of at most `vocab_size` tokens, trained on this text, or as an earlier run trained it on the
    same. ConfigError: the text is not UTF-8, or there is no room for the bytes."""
    library = imported("tokenizers", f"data.tokenizer={BPE}")
    if vocab_size <= NUM_BYTES:
        text = f"needs a larger recipe.model.vocab_size: {NUM_BYTES} are bytes, the rest is learned"
        raise ConfigError(f"data.tokenizer={BPE}: {text}")
    pieces = list(_pieces(text, source))
    key = key_of((hashlib.sha256(text).hexdigest(), vocab_size, library.__version__))
    if isinstance(kept := read_kept(_KIND, key), str):
        with suppress(Exception):  # of the library, for a text that it does not take
            return library.Tokenizer.from_str(kept)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    keep(_KIND, key, tokenizer.to_str())
    return tokenizer


def encoded(tokenizer: Any, text: bytes, source: str) -> Numbers:
    """The text's tokens, uint32 of (num_tokens,); pieces of it are encoded each alone."""
    encodings = tokenizer.encode_batch_fast(list(_pieces(text, source)), add_special_tokens=False)
    arrays = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint32)


def encoded_each(tokenizer: Any, texts: Sequence[bytes], source: str) -> list[Numbers]:
    """The tokens of each text, uint32 of (num_tokens,). ConfigError: one is not UTF-8."""
    whole = ["".join(_pieces(text, source)) for text in texts]
    encodings = tokenizer.encode_batch_fast(whole, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def cut_at_character(text: bytes, place: int) -> int:
    """The last place up to `place` at which a character of UTF-8 begins."""
    for _ in range(3):  # a character has at most three bytes after its first
        if 0 < place < len(text) and text[place] & 0xC0 == 0x80:
            place -= 1
    return place


def _pieces(text: bytes, source: str) -> Iterator[str]:
    """The text in order, cut after ends of lines where there are any. ConfigError: it is not UTF-8."""
    start = 0
    while start < len(text):
        end = start + PIECE_BYTES
        if end < len(text):
            line = text.rfind(b"\n", start, end) + 1
            end = line if line > start else cut_at_character(text, end)
        try:
            yield text[start:end].decode()
        except UnicodeDecodeError as error:
            place = start + error.start
            reason = f"is not UTF-8: byte {place:,} is 0x{text[place]:02x}; data.tokenizer=bytes learns any bytes"
            raise ConfigError(f"data.path={source}: {reason}") from error
        start = end
