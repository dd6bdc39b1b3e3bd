"""Tensors in pieces: each process writes the rows that it holds into a file of its own, and reads those that it needs.

The files are safetensors whose headers say where each piece begins, as torch.distributed.checkpoint writes them: its
HuggingFaceStorageReader reads such a folder, too. They are not written by that library: it has what a process writes in
memory twice more, and flushes no folder. Its own format is none to read from strangers: its `.metadata` is a pickle,
which may run anything. What has to be known of all pieces is kept beside them, as plain values (`index_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aottrain.trainer.weights.files import opened, write_tensors

FILE = re.compile(r"part_\d{5}_of_\d{5}\.safetensors")


def file_name(part: int, num_parts: int) -> str:
    return f"part_{part + 1:05d}_of_{num_parts:05d}.safetensors"


def rows_held(rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """The first row of a part and the end of its rows, without padding."""
    each = -(-rows // num_parts)
    return min(part * each, rows), min((part + 1) * each, rows)


def write_pieces(
    write: Callable[[Any], Any], rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], part: int, count: int
) -> None:
    """The file of one part of `count`, by calls of `write` with bytes. rows: of each tensor those of this part."""
    held = {name: value for name, value in rows.items() if value.shape[0]}
    firsts = {name: rows_held(shapes[name][0] if shapes[name] else 1, part, count)[0] for name in held}
    offsets = {name: {"saved_offsets": [firsts[name], *[0] * (value.ndim - 1)]} for name, value in held.items()}
    write_tensors(write, held, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})


def index_of(rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], count: int) -> dict[str, Any]:
    """For each tensor, in plain values: its type, its shape, and which rows each of `count` files has. rows: of one
    part."""
    index = {}
    for name, shape in shapes.items():
        held = [(file_name(part, count), *rows_held(shape[0] if shape else 1, part, count)) for part in range(count)]
        pieces = [piece for piece in held if piece[1] < piece[2]]
        index[name] = {"dtype": rows[name].dtype, "shape": tuple(shape), "pieces": pieces}
    return index


class Files:
    """Those of a folder; each is opened once, when it is first read from."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.open = cache(lambda name: opened(folder / name))


@dataclass(frozen=True)
class Stored:
    """A tensor whose rows are in several files."""

    files: Files
    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[tuple[str, int, int], ...]
    """Files, each with the first row that it has and the end of its rows; in order, and all rows."""

    @classmethod
    def of(cls, files: Files, name: str, values: Mapping[str, Any]) -> Stored:
        """As `index_of` has it. ValueError, KeyError, TypeError: that is something else."""
        shape, pieces = torch.Size(values["shape"]), tuple(map(tuple, values["pieces"]))
        at = 0
        for file, first, end in pieces:
            if not (FILE.fullmatch(file) and first == at < end):
                raise ValueError(f"{name}: {file} has rows {first} to {end}")
            at = end
        if at != (shape[0] if shape else 1) or type(values["dtype"]) is not torch.dtype:
            raise ValueError(f"{name}: {at} rows of {tuple(shape)}, {values['dtype']}")
        return cls(files, name, values["dtype"], shape, pieces)

    def whole(self) -> Tensor:
        return self.rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    def rows(self, first: int, count: int) -> Tensor:
        """So many from the first on, zeros where there are no more; only files that have some of them are read. Of a
        number, which has no rows, one. ValueError, OSError, SafetensorError: a file has another tensor, or is none."""
        trailing = self.shape[1:]
        read = [piece for piece in self.pieces if max(first, piece[1]) < min(first + count, piece[2])]
        slices = [self.files.open(file).get_slice(self.name) for file, _, _ in read]
        for (file, begin, end), piece in zip(read, slices, strict=True):  # before anything of a size that is only told
            if piece.get_shape() != [end - begin, *trailing]:
                raise ValueError(f"{file} has {self.name} of shape {piece.get_shape()}")
        result = torch.zeros((count, *trailing), dtype=self.dtype)
        for (file, begin, end), piece in zip(read, slices, strict=True):
            low, high = max(first, begin), min(first + count, end)
            values = piece[low - begin : high - begin]
            if values.dtype != self.dtype:
                raise ValueError(f"{file} has {self.name} as {values.dtype}")
            result[low - first : high - first] = values
        return result


def stored_in(folder: Path, index: Mapping[str, Any]) -> dict[str, Stored]:
    """By the tensors' names. ValueError, KeyError, TypeError: `index` is none."""
    files = Files(folder)
    return {name: Stored.of(files, name, values) for name, values in index.items()}


def put(state: dict[str, Any], places: Iterable[tuple[Sequence[Any], str]], values: Mapping[str, Any]) -> None:
    """Each value at the ends of its paths in a nest of dictionaries."""
    for path, name in places:
        at = state
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = values[name]
