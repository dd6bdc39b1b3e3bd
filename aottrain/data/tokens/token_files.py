"""Files of tokens, mapped from memory: a corpus may be larger than it.

Two kinds: raw little-endian numbers (nanoGPT's train.bin and val.bin), and llm.c's, where a header of 256 int32 (magic,
version, number of tokens, zeros) comes first. Each file is read through once, for its largest token and its SHA-256;
both are remembered by its path, size and time of change, so that later runs begin at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aottrain.config.choices import TOKEN_TYPES
from aottrain.data.array_files import is_gzip
from aottrain.data.batches import Codec, Source
from aottrain.data.order import Numbers
from aottrain.data.tokens.documents import existing
from aottrain.data.tokens.tokenizer import Tokenizer, read_tokenizer
from aottrain.data.tokens.windows import Windows, check_lengths, held_out_end, strides
from aottrain.errors import ConfigError
from aottrain.toolchain.cache import has_fields, table

AUTO = "auto"
SUFFIX = ".bin"
HELD_OUT_NAME = "val"  # what the name of a file that is held out as a whole has in it
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
CHUNK_TOKENS = 1 << 22
LOOK_TOKENS = 1 << 12  # at the start of a raw file, from which a wrong type is seen
_INSPECTED = partial(has_fields, fields={"largest": int, "at": int, "sha256": str})  # what is kept of a file
BYTES_PER_TOKEN_SAMPLE = 1 << 16  # held-out tokens that are decoded to see how many bytes a token has


@dataclass(frozen=True)
class TokenFile:
    """One file, found to be whole."""

    path: Path
    tokens: Numbers
    """Mapped; read only."""
    largest: int
    """Of its tokens."""
    at: int
    """The position of the first such."""
    sha256: str
    """Of its tokens."""


def load_tokens(
    path: str,
    *,
    held_out: float,
    context: int,
    vocab_size: int,
    order: str = "random",
    dtype: str = AUTO,
    tokenizer: str | None = None,
) -> Source:
    """The tokens of a file, or of every .bin file of a folder; files with "val" in their names are held out as a whole,
    and where there is none the last `held_out` fraction of the last file is.

    dtype: one of TOKEN_TYPES for raw numbers; "auto" is uint16 after looking for a header. tokenizer: a tokenizer.json,
    to show text. ConfigError: a file is missing, empty, cut short, of another kind or type, too short for one example,
    or has a token beyond the vocabulary, whose position is named.
    """
    files = [opened(file, dtype) for file in files_of(path)]
    for file in files:
        if file.largest >= vocab_size:
            raise ConfigError(
                f"data.path={file.path}: has token {file.largest} at position {file.at:,}, but the model's vocab_size "
                f"is {vocab_size} (its numbers are read as {file.tokens.dtype}: data.dtype)"
            )
    kept = [file.tokens for file in files if HELD_OUT_NAME in file.path.stem]
    parts = [file.tokens for file in files if HELD_OUT_NAME not in file.path.stem]
    named = list(zip(["training"] * len(parts) + ["held-out"] * len(kept), parts + kept, strict=True))
    if not parts:
        raise ConfigError(f"data.path={path}: every file is held out, by '{HELD_OUT_NAME}' in its name")
    if not kept:
        parts[-1], rest = held_out_end(parts[-1], held_out)
        kept, named = [rest], [("training", parts[-1]), ("held-out", rest)]
    by_name = any(HELD_OUT_NAME in file.path.stem for file in files)
    check_lengths(path, named, context, None if by_name else held_out, "tokens")
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    note = f"tokens: {path}, {count}, {sum(map(len, parts)):,} trained on, {sum(map(len, kept)):,} held out"
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    largest = max(file.largest for file in files)
    train = Windows(tuple(parts), context, strides(order, context), largest)
    rest_windows = Windows(tuple(kept), context, largest=largest)
    codec = None if tokenizer is None else _codec(tokenizer, vocab_size, kept)
    return Source(train, rest_windows, digest, (note,), tokens_per_example=context, codec=codec)


def _codec(path: str, vocab_size: int, kept: Sequence[Numbers]) -> Codec:
    """ConfigError: the tokenizer is missing or another's (it has not every token)."""
    made, sample = read_tokenizer(path, vocab_size), kept[0][:BYTES_PER_TOKEN_SAMPLE]
    if int(sample.max()) >= made.get_vocab_size():
        text = f"has {made.get_vocab_size():,} tokens, but the data has token {int(sample.max())}"
        raise ConfigError(f"data.tokenizer={path}: {text}")
    return Tokenizer(made, len(made.decode(sample.tolist(), skip_special_tokens=False).encode()) / len(sample))


def files_of(path: str) -> list[Path]:
    """A file, or the files of a folder, by name. ConfigError: there is none."""
    root = Path(path).expanduser()
    if not root.is_dir():
        return [root]
    files = sorted(existing(file for file in root.iterdir() if file.suffix == SUFFIX))
    if not files:
        raise ConfigError(f"data.path={path}: the folder has no file that ends in {SUFFIX}")
    return files


def opened(file: Path, dtype: str) -> TokenFile:
    """Map a file, and read through it unless that has been done since it last changed. ConfigError: see
    `load_tokens`."""
    try:
        kind, offset, count = _layout(file, dtype)
        tokens: Numbers = np.memmap(file, dtype=kind, mode="r", offset=offset, shape=(count,))
        known = _inspected(file, kind, offset)
    except FileNotFoundError as error:
        raise ConfigError(f"data.path={file}: there is no such file or folder") from error
    except OSError as error:
        raise ConfigError(f"data.path={file}: cannot be read: {error.strerror or error}") from error
    return TokenFile(file, tokens, known["largest"], known["at"], known["sha256"])


def _layout(file: Path, dtype: str) -> tuple[str, int, int]:
    """(type of a number, where the first begins in bytes, how many). ConfigError: it is not what it should be."""
    size, where = file.stat().st_size, f"data.path={file}:"
    if size == 0:
        raise ConfigError(f"{where} is empty")
    with file.open("rb") as stream:
        head = stream.read(max(HEADER_BYTES, LOOK_TOKENS * 4))
    if head.startswith((b"\x93NUMPY", b"PK\x03\x04")):
        raise ConfigError(f"{where} is a file of numpy's (.npy, .npz); raw tokens are written by tokens.tofile(path)")
    if is_gzip(head):
        raise ConfigError(f"{where} is compressed by gzip; gunzip unpacks it")
    if dtype == AUTO and (header := _header(head, size)) is not None:
        magic, version, count = header
        if magic != MAGIC or version != VERSION:
            text = f"has a header of magic {magic} and version {version}; known: magic {MAGIC} and version {VERSION}"
            raise ConfigError(f"{where} {text}")
        if size != HEADER_BYTES + 2 * count:
            text = f"its header promises {count:,} tokens, which are {HEADER_BYTES + 2 * count:,} bytes with it"
            raise ConfigError(f"{where} is cut short or damaged: {text}; it has {size:,}")
        if count == 0:
            raise ConfigError(f"{where} is empty: its header promises no tokens")
        return "<u2", HEADER_BYTES, count
    name = TOKEN_TYPES[0] if dtype == AUTO else dtype
    kind = np.dtype(name).newbyteorder("<")
    if size % kind.itemsize:
        text = f"{size:,} bytes are no whole number of {name}, {kind.itemsize} bytes each"
        raise ConfigError(f"{where} is cut short or of another type: {text}")
    first = np.frombuffer(head[: len(head) // 4 * 4], dtype=kind)
    if kind.itemsize == 2 and first[::2].any() and not first[1::2].any() and len(first) >= 4:
        text = f"every second {name} is 0, as in a file of {TOKEN_TYPES[1]}; data.dtype={TOKEN_TYPES[1]} reads it so"
        raise ConfigError(f"{where} is of another type: {text}")
    return kind.str, 0, size // kind.itemsize


def _header(head: bytes, size: int) -> tuple[int, int, int] | None:
    """(magic, version, number of tokens) of a file that begins with a header of this kind, whoever wrote it."""
    if len(head) < HEADER_BYTES:
        return None
    values = np.frombuffer(head[:HEADER_BYTES], dtype="<i4")
    magic, version, count = (int(value) for value in values[:3])
    fits = not values[3:].any() and size in (HEADER_BYTES + 2 * count, HEADER_BYTES + 4 * count)
    return (magic, version, count) if magic == MAGIC or fits else None


def _inspected(file: Path, kind: str, offset: int) -> dict[str, Any]:
    """What reading through a file gives; remembered for as long as its size and time of change stay."""
    status, known = file.stat(), table("token_files", _INSPECTED)
    key = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{kind}|{offset}"
    values = known.get(key)
    if values is None:
        values = inspect(file, kind, offset)
        known.add({key: values})
    return values


def inspect(file: Path, kind: str, offset: int) -> dict[str, Any]:
    """The largest token, its first position, and the SHA-256 of all, in pieces of a few MB."""
    digest, largest, at, position = hashlib.sha256(), -1, 0, 0
    with file.open("rb") as stream:
        stream.seek(offset)
        while chunk := stream.read(CHUNK_TOKENS * np.dtype(kind).itemsize):
            digest.update(chunk)
            values = np.frombuffer(chunk, dtype=kind)
            if (found := int(values.max())) > largest:
                largest, at = found, position + int(values.argmax())
            position += len(values)
    return {"largest": largest, "at": at, "sha256": digest.hexdigest()}
