"""Sequences of tokens as examples: windows of one length, from arrays in memory or mapped from files."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from aottrain.data.order import Numbers
from aottrain.errors import ConfigError
from aottrain.step import Batch


@dataclass(frozen=True)
class Windows:
    """Every window of `context` + 1 tokens that begins at a multiple of `stride`; none crosses from one part into the
    next. Example: (inputs, targets), a target is the token after its input."""

    parts: tuple[Numbers, ...]
    """Whole numbers of any type, each of (num_tokens,)."""
    context: int
    stride: int = 1
    largest: int | None = None
    """No token was above it when the parts were looked through, which mapped files may be written to after."""

    @cached_property
    def _counts(self) -> Numbers:
        lengths = np.array([len(part) for part in self.parts], dtype=np.int64)
        return np.maximum(0, (lengths - self.context - 1) // self.stride + 1)

    @cached_property
    def _ends(self) -> Numbers:
        return np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, numbers: Numbers, keys: Numbers | None) -> Batch:
        """int64 of (len(numbers), context), each; nothing is drawn."""
        which = np.searchsorted(self._ends, numbers, side="right")
        starts = (numbers - (self._ends - self._counts)[which]) * self.stride
        if len(self.parts) == 1:
            return cut(self.parts[0], starts, self.context, self.largest)
        rows = [cut(self.parts[part], starts[i : i + 1], self.context, self.largest) for i, part in enumerate(which)]
        return torch.cat([inputs for inputs, _ in rows]), torch.cat([targets for _, targets in rows])


def cut(tokens: Numbers, starts: Numbers, context: int, largest: int | None = None) -> Batch:
    """(inputs, targets), int64 of (len(starts), context); a target is the token after its input. ConfigError: the file
    of the tokens has become shorter, or has one above `largest`."""
    _check_whole(tokens)
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    _let_go(tokens)
    if largest is not None and (found := int(windows.max())) > largest:
        text = f"was written to while it was trained on: has token {found} now, and had none above {largest}"
        raise ConfigError(f"data.path={getattr(tokens, 'filename', '')}: {text}")
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _check_whole(tokens: Numbers) -> None:
    """ConfigError where a mapped file has become shorter since: the system ends a process that reads beyond its end."""
    mapping = getattr(tokens, "_mmap", None)
    if mapping is not None and mapping.size() < len(mapping):
        file, left = getattr(tokens, "filename", ""), f"{mapping.size():,} of {len(mapping):,} bytes are left"
        raise ConfigError(f"data.path={file}: has become shorter while it was trained on: {left}")


def _let_go(tokens: Numbers) -> None:
    """Of a mapped file, the pages that were read: they would stay resident, and a few hundred random places bring in
    the whole corpus where the system's cache has it in large pieces. What other threads read is mapped anew."""
    mapping = getattr(tokens, "_mmap", None)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def strides(order: str, context: int) -> int:
    """Where windows begin: anywhere where they are drawn at random, side by side where an epoch has each once."""
    return context if order == "epochs" else 1


def held_out_end(tokens: Numbers, held_out: float) -> tuple[Numbers, Numbers]:
    """(start, end): the end is the fraction that is never trained on."""
    rest = int(len(tokens) * held_out)
    return tokens[: len(tokens) - rest], tokens[len(tokens) - rest :]


def check_lengths(
    source: str, parts: Sequence[tuple[str, Numbers]], context: int, held_out: float | None, unit: str
) -> None:
    """ConfigError where a part, named, is shorter than one example (context + 1 tokens, which are called `unit`).
    held_out: the fraction that decides between parts; None where names of files do."""
    total = sum(len(part) for _, part in parts)
    cut = "" if held_out is None else f" (data.held_out={held_out})"
    for name, part in parts:
        if len(part) <= context:
            raise ConfigError(
                f"data.path={source}: has {total} {unit}, of which {len(part)} are its {name} part{cut}; "
                f"one example needs {context + 1}: give more text or a smaller context"
            )
