"""Documents as examples: several in a row of `context` places, none of which sees another.

A row is filled by whole documents, each as long as it may be; what is longer is cut into pieces first, each of which
begins anew. The longest come first, each into the fullest row that has room for it: best-fit decreasing, as Ding et al.
(2024), "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, pack. So a row's content follows from the
documents alone, and any row is read at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aottrain.config.choices import BPE
from aottrain.data.batches import Source
from aottrain.data.order import Numbers
from aottrain.data.tokens.documents import BETWEEN
from aottrain.data.tokens.tokenizer import Bytes, Tokenizer, encoded_each, read_tokenizer, trained_bpe
from aottrain.errors import ConfigError
from aottrain.step import Batch

IGNORED = -100  # the target that torch's losses leave out


@dataclass(frozen=True)
class Packed:
    """Rows of pieces of documents. Example: (inputs, targets, starts); `starts` has of each place the one at which its
    document begins. A place behind the last document is one of its own, and its target is IGNORED."""

    tokens: Numbers
    """Of all documents, one after the other, of (num_tokens,)."""
    pieces: Numbers
    """int64 of (num_pieces, 2): where a piece begins in `tokens`, and how many targets it has; in order of rows."""
    ends: Numbers
    """int64 of (num_rows,): of each row the number of pieces up to its end."""
    context: int

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_targets(self) -> int:
        return int(self.pieces[:, 1].sum())

    def read(self, numbers: Numbers, keys: Numbers | None) -> Batch:
        """int64 of (len(numbers), context), each; nothing is drawn."""
        shape = (len(numbers), self.context)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        starts = np.tile(np.arange(self.context), (len(numbers), 1))
        for row, number in enumerate(numbers):
            place = 0
            for begin, count in self.pieces[self.ends[number - 1] if number else 0 : self.ends[number]]:
                end = place + count
                inputs[row, place:end] = self.tokens[begin : begin + count]
                targets[row, place:end] = self.tokens[begin + 1 : begin + count + 1]
                starts[row, place:end] = place
                place = end
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(starts)


def packed(documents: Sequence[Numbers], context: int) -> Packed:
    """Rows of these documents, each the tokens of one, of (num_tokens,); one of a single token has nothing to learn."""
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint8)
    begins = np.cumsum([0, *map(len, documents)])
    pieces = [
        (int(begin) + cut, min(context, len(document) - 1 - cut))
        for begin, document in zip(begins, documents, strict=False)
        for cut in range(0, len(document) - 1, context)
    ]
    rows: list[list[tuple[int, int]]] = []
    with_room: list[list[int]] = [[] for _ in range(context + 1)]  # rows by the places that they have left
    rooms = 0  # bit r is set where there is a row with r places left
    for piece in sorted(pieces, key=lambda item: (-item[1], item[0])):
        above = rooms >> piece[1]
        if above:
            room = piece[1] + (above & -above).bit_length() - 1  # the lowest bit
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, row = context, len(rows)
            rows.append([])
        rows[row].append(piece)
        with_room[room - piece[1]].append(row)
        rooms |= 1 << (room - piece[1])
    flat = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 2)
    return Packed(tokens, flat, np.cumsum([len(row) for row in rows]).astype(np.int64), context)


def packed_source(
    documents: Sequence[bytes],
    source: str,
    notes: tuple[str, ...],
    held_out: float,
    context: int,
    vocab_size: int,
    tokenizer: str | None,
) -> Source:
    """The last documents are held out, as many as have that fraction of the bytes. ConfigError: there are none for a
    part, none has two tokens, or a token is none of the model's. See `load_text`."""
    if len(documents) < 2:
        text = f"has {len(documents)} document, of which one is held out; data.packing=false learns from one"
        raise ConfigError(f"data.path={source}: {text}")
    sizes = np.cumsum([len(document) for document in documents])
    cut = int(np.searchsorted(sizes, sizes[-1] * (1 - held_out))) + 1
    cut = min(cut, len(documents) - 1)
    fingerprint = hashlib.sha256()
    for document in documents:
        fingerprint.update(hashlib.sha256(document).digest())
    codec: Bytes | Tokenizer = Bytes()
    if tokenizer is None:
        encoded = [np.frombuffer(document, np.uint8) for document in documents]
    else:
        train = BETWEEN.join(documents[:cut])
        made = trained_bpe(train, vocab_size, source) if tokenizer == BPE else read_tokenizer(tokenizer, vocab_size)
        encoded = encoded_each(made, documents, source)
        fingerprint.update(made.to_str().encode())
        rest = sum(map(len, documents[cut:])), sum(map(len, encoded[cut:]))
        codec = Tokenizer(made, rest[0] / max(1, rest[1]))
        size = f"{made.get_vocab_size():,} tokens; {codec.bytes_per_token:.2f} bytes each of the held-out text"
        notes = (*notes, f"tokenizer {tokenizer}: {size}")
    largest = max(int(document.max(initial=0)) for document in encoded)
    if largest >= vocab_size:
        raise ConfigError(f"data.path={source}: has token {largest}, but the model's vocab_size is {vocab_size}")
    parts = packed(encoded[:cut], context), packed(encoded[cut:], context)
    for name, part in zip(("training", "held-out"), parts, strict=True):
        if not len(part):
            raise ConfigError(f"data.path={source}: no document of its {name} part has two tokens")
    filled = parts[0].num_targets / (len(parts[0]) * context)
    note = f"packed: {cut:,} documents in {len(parts[0]):,} rows of {context}, {filled:.1%} of the places filled"
    notes = (*notes, f"{note}; {len(documents) - cut:,} documents held out")
    return Source(*parts, fingerprint.hexdigest(), notes, tokens_per_example=context, codec=codec)
