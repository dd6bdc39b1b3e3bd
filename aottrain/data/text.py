"""Text as bytes: what is read, which part is held out, and which bytes each step sees.

Without `data.path` the text is the language reference that every Python carries (`pydoc_data.topics`, about 0.4 MB of
English), so that a first run needs neither a download nor a file.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from aottrain.errors import ConfigError
from aottrain.step import Batch

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".py")
MAX_WARNINGS = 3  # about single files


@dataclass(frozen=True)
class Text:
    """The start and the end of one text, as uint8 of (num_bytes,)."""

    source: str
    train: torch.Tensor
    held_out: torch.Tensor
    """The end, for evaluation."""
    fingerprint: str
    """SHA-256 of all of it."""
    notes: tuple[str, ...] = ()
    """How much was read from the person's own files, and which of them are no text, a line each."""


def builtin_text() -> bytes:
    """The topics of `pydoc`, in the order of their names: the same bytes for one Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: str) -> bytes:
    """The bytes of a file, or of every text file below a folder, sorted by path and joined by an empty line.

    ConfigError names the path that is missing, cannot be read, or holds no text.
    """
    return joined(read_files(path), path)


def read_files(path: str) -> dict[Path, bytes]:
    """What each of the files holds. ConfigError: see `read_text`."""
    root = Path(path).expanduser()
    try:
        if not root.exists():
            raise ConfigError(f"data.path={path}: there is no such file or folder")
        files = list(_text_files(root)) if root.is_dir() else [root]
        if not files:
            raise ConfigError(f"data.path={path}: the folder has no file that ends in {', '.join(TEXT_SUFFIXES)}")
        return {file: file.read_bytes() for file in files}
    except OSError as error:
        raise ConfigError(f"data.path={error.filename or path}: cannot be read: {error.strerror or error}") from error


def joined(files: Mapping[Path, bytes], path: str) -> bytes:
    text = b"\n\n".join(part for part in files.values() if part)
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
    if b"\0" in content:
        return f"is no text: it has {content.count(0):,} zero bytes"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {error.start:,} is 0x{content[error.start]:02x}"
    return ""


def _text_files(root: Path) -> Iterator[Path]:
    for file in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.is_file() and not hidden and file.suffix.lower() in TEXT_SUFFIXES:
            yield file


def load_text(path: str | None, *, held_out: float, context: int, vocab_size: int) -> Text:
    """Read, check and cut the text: the last `held_out` fraction is never trained on.

    ConfigError: see `read_text`; and where a part is shorter than one example (context + 1 bytes) or a byte is no
    token of the model (checked here, because an embedding would fail late, or on a GPU without saying where).
    """
    source = path if path is not None else "the built-in text"
    files = {} if path is None else read_files(path)
    text = builtin_text() if path is None else joined(files, path)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    num_held_out = int(len(text) * held_out)
    train, rest = tokens[: len(text) - num_held_out], tokens[len(text) - num_held_out :]
    for name, part in (("training", train), ("held-out", rest)):
        if len(part) <= context:
            raise ConfigError(
                f"data.path={source}: has {len(text)} bytes, of which {len(part)} are its {name} part "
                f"(data.held_out={held_out}); one example needs {context + 1}: give more text or a smaller context"
            )
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise ConfigError(f"data.path={source}: has byte {largest}, but the model's vocab_size is {vocab_size}")
    notes = () if path is None else notes_on(files, path)
    return Text(source, train, rest, hashlib.sha256(text).hexdigest(), notes)


def cut(tokens: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    """(inputs, targets), int64 of (len(starts), context); a target is the byte after its input."""
    windows = tokens[starts[:, None] + torch.arange(context + 1)].to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
