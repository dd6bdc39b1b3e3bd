"""Text: what is read, as which tokens, and which part is held out.

Without `data.path` the text is the language reference that every Python carries (`pydoc_data.topics`, about 0.4 MB of
English), so that a first run needs neither a download nor a file.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aottrain.config.choices import BPE
from aottrain.data.array_files import is_gzip
from aottrain.data.batches import Source
from aottrain.data.order import Numbers
from aottrain.data.tokens.documents import BETWEEN, files_below, is_saved_dataset, of_json_lines, of_table
from aottrain.data.tokens.packing import packed_source
from aottrain.data.tokens.tokenizer import Bytes, Tokenizer, cut_at_character, encoded, read_tokenizer, trained_bpe
from aottrain.data.tokens.windows import Windows, check_lengths, strides
from aottrain.errors import ConfigError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py", ".jsonl", ".parquet")
NO_TEXT = f"the folder has no file that ends in {', '.join(TEXT_SUFFIXES)}, hidden ones left out"
MAX_WARNINGS = 3  # about single files


def builtin_text() -> bytes:
    """The topics of `pydoc`, in the order of their names: the same bytes for one Python version."""
    return BETWEEN.join(_builtin_documents())


def _builtin_documents() -> list[bytes]:
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def read_text(path: str, key: str = "text") -> bytes:
    """The bytes of a file, or of every text file below a folder, sorted by path and joined by an empty line.

    key: under which lines of JSON and tables have their text. ConfigError names the path that is missing, cannot be
    read, or holds no text.
    """
    return joined(read_files(path, key), path)


def read_files(path: str, key: str = "text") -> dict[Path, bytes]:
    """What each of the files holds. ConfigError: see `read_text`."""
    return {file: BETWEEN.join(documents) for file, documents in read_documents(path, key).items()}


def read_documents(path: str, key: str = "text") -> dict[Path, list[bytes]]:
    """The documents of each of the files: entries, or the file itself. ConfigError: see `read_text`."""
    root = Path(path).expanduser()
    try:
        if not root.exists():
            raise ConfigError(f"data.path={path}: there is no such file or folder")
        files = text_files(root) if root.is_dir() and not is_saved_dataset(root) else [root]
        if not files:
            raise ConfigError(f"data.path={path}: {NO_TEXT}")
        return {file: _documents(file, key) for file in files}
    except OSError as error:
        raise ConfigError(f"data.path={error.filename or path}: cannot be read: {error.strerror or error}") from error


def _documents(file: Path, key: str) -> list[bytes]:
    if file.is_dir() or file.suffix.lower() == ".parquet":
        return of_table(file, key)
    content = file.read_bytes()
    return of_json_lines(content, file, key) if file.suffix.lower() == ".jsonl" else [content]


def joined(files: Mapping[Path, bytes], path: str) -> bytes:
    text = BETWEEN.join(part for part in files.values() if part)
    if not text:
        raise ConfigError(f"data.path={path}: is empty")
    return text


def notes_on(files: Mapping[Path, bytes], path: str) -> tuple[str, ...]:
    """How much there is, and a warning for each of the first files that are no text; any bytes can be learned."""
    size = sum(map(len, files.values()))
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    strange = {file: reason for file, content in files.items() if (reason := _not_text(content))}
    shown = list(strange.items())[:MAX_WARNINGS]
    lines = [f"text: {path}, {count}, {size:,} bytes"]
    lines += [f"warning: {file} {reason}; its bytes are learned as they are" for file, reason in shown]
    more = len(strange) - len(shown)
    return (*lines, *([f"warning: and {more:,} more files that are no text"] if more else []))


def _not_text(content: bytes) -> str:
    """Why these bytes are no UTF-8 text; empty if they are."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16, not UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)"
    if is_gzip(content):
        return "is compressed by gzip (gunzip unpacks it)"
    if b"\0" in content:
        return f"is no text: it has {content.count(0):,} zero bytes"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {error.start:,} is 0x{content[error.start]:02x}"
    return ""


def text_files(root: Path) -> list[Path]:
    """Those below a folder; see `files_below`."""
    return files_below(root, TEXT_SUFFIXES)


def load_text(
    path: str | None,
    *,
    held_out: float,
    context: int,
    vocab_size: int,
    order: str = "random",
    tokenizer: str | None = None,
    key: str = "text",
    packing: bool = False,
) -> Source:
    """Read, check and cut the text: the last `held_out` fraction is never trained on, by a tokenizer neither.

    tokenizer: None (each byte is a token), "bpe" (learned from the part that is trained on), or the path of a
    tokenizer.json. key: see `read_text`. packing: whole documents share rows, see `packing.py`. ConfigError: see there;
    and where a part is shorter than one example (context + 1 tokens) or a token is none of the model's (checked here,
    because an embedding would fail late, or on a GPU without saying where).
    """
    source = path if path is not None else "the built-in text"
    within = {} if path is None else read_documents(path, key)
    files = {file: BETWEEN.join(documents) for file, documents in within.items()}
    if packing:
        if path is not None:
            joined(files, path)
        documents = _builtin_documents() if path is None else [one for each in within.values() for one in each if one]
        notes = () if path is None else notes_on(files, path)
        return packed_source(documents, source, notes, held_out, context, vocab_size, tokenizer)
    text = builtin_text() if path is None else joined(files, path)
    cut = len(text) - int(len(text) * held_out)
    codec: Bytes | Tokenizer = Bytes()
    notes = () if path is None else notes_on(files, path)
    fingerprint = hashlib.sha256(text)
    if tokenizer is None:
        tokens = np.frombuffer(text, dtype=np.uint8)
        parts = tokens[:cut], tokens[cut:]
    else:
        start = text[: cut_at_character(text, cut)]
        parts, codec = _tokenized(start, text[len(start) :], tokenizer, vocab_size, source)
        fingerprint.update(codec.implementation.to_str().encode())
        note = f"tokenizer {tokenizer}: {codec.implementation.get_vocab_size():,} tokens, {len(parts[0]):,} trained on"
        notes = (*notes, f"{note}; {codec.bytes_per_token:.2f} bytes a token of the held-out text")
    unit = "bytes" if tokenizer is None else "tokens"
    check_lengths(source, list(zip(("training", "held-out"), parts, strict=True)), context, held_out, unit)
    largest = max(int(part.max()) for part in parts)
    if largest >= vocab_size:
        token = "byte" if tokenizer is None else "token"
        raise ConfigError(f"data.path={source}: has {token} {largest}, but the model's vocab_size is {vocab_size}")
    train, rest = Windows(parts[:1], context, strides(order, context)), Windows(parts[1:], context)
    return Source(train, rest, fingerprint.hexdigest(), notes, tokens_per_example=context, codec=codec)


def _tokenized(
    start: bytes, rest: bytes, tokenizer: str, vocab_size: int, source: str
) -> tuple[tuple[Numbers, Numbers], Tokenizer]:
    """Both parts as tokens, each alone, and what made them."""
    made = trained_bpe(start, vocab_size, source) if tokenizer == BPE else read_tokenizer(tokenizer, vocab_size)
    parts = encoded(made, start, source), encoded(made, rest, source)
    return parts, Tokenizer(made, len(rest) / max(1, len(parts[1])))
