"""Rows of numbers and what is to be found from each, from .npz and .csv files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aottrain.data.array_files import has_split, named, read_csv, read_npz
from aottrain.data.batches import Source
from aottrain.data.images import as_float32, as_labels, digest_of, exists
from aottrain.data.order import Numbers, fixed_split
from aottrain.errors import ConfigError
from aottrain.step import Batch

if TYPE_CHECKING:
    from aottrain.config.run import DataConfig


@dataclass(frozen=True)
class Rows:
    """Example: (x, float32 of (n, num_features); y, int64 of (n,) for classes, else float32 of (n,))."""

    x: Numbers
    y: Numbers
    part: Numbers
    """Those that belong to it, by number."""

    def __len__(self) -> int:
        return len(self.part)

    def read(self, numbers: Numbers, keys: Numbers | None) -> Batch:
        """Nothing is drawn."""
        chosen = self.part[numbers]
        return torch.from_numpy(self.x[chosen]), torch.from_numpy(self.y[chosen])


def load_arrays(data: DataConfig, options: Any) -> Source:
    """Read and check a file. `options` has num_features, and num_classes where y is a class. ConfigError: the file is
    missing, damaged or of another kind, lacks a column or array, or has a value that is not finite."""
    if data.path is None:
        raise ConfigError("data.path=null: data=arrays needs a .csv or .npz file")
    file = exists(data.path)
    num_held_out = None
    if file.suffix.lower() == ".csv":
        columns, x = read_csv(file, data.x, data.y or "y")
        y = read_csv(file, [data.y or "y"], "")[1][:, 0]
    elif file.suffix.lower() == ".npz":
        if not data.x and data.y is None and has_split(read_npz(file, ())):
            (x, y), (others, more) = (_from_npz(file, (f"x_{part}",), f"y_{part}") for part in ("train", "test"))
            if x.shape[1] != others.shape[1]:
                text = f"x_train has {x.shape[1]} columns, x_test {others.shape[1]}"
                raise ConfigError(f"data.path={data.path}: {text}")
            x, y, num_held_out = np.concatenate((x, others)), np.concatenate((y, more)), len(more)
        else:
            x, y = _from_npz(file, data.x or ("x",), data.y or "y")
        columns = [f"feature {index}" for index in range(x.shape[1])]
    else:
        raise ConfigError(f"data.path={data.path}: must end in .csv or .npz")
    if x.shape[1] != options.num_features:
        text = f"x has {x.shape[1]} columns; recipe.model.num_features={options.num_features}"
        raise ConfigError(f"data.path={data.path}: {text}")
    for name, values in (*zip(columns, x.T, strict=True), (data.y or "y", y)):
        finite = np.isfinite(as_float32(values))
        if not finite.all():
            at = int(np.flatnonzero(~finite)[0])
            text = f"{name} is {values[at]} in row {at:,} (from 0); finite numbers of float32 are needed"
            raise ConfigError(f"data.path={data.path}: {text}")
    y = _classes(data, y, options.num_classes) if hasattr(options, "num_classes") else y.astype(np.float32)
    x = x.astype(np.float32)
    train, rest = fixed_split(len(x), int(len(x) * data.held_out))
    if num_held_out is not None:
        train, rest = np.split(np.arange(len(x)), [len(x) - num_held_out])
    note = f"arrays: {data.path}, {x.shape[1]} features, {len(train):,} rows trained on, {len(rest):,} held out"
    return Source(Rows(x, y, train), Rows(x, y, rest), digest_of(x, y), (note,))


def _from_npz(file: Path, x_names: tuple[str, ...], y_name: str) -> tuple[Numbers, Numbers]:
    """(float64 of (rows, columns), (rows,)). ConfigError: an array is missing, no number, or of another length."""
    arrays = named(file, [*x_names, y_name])
    for name, values in arrays.items():
        if values.dtype.kind not in "iufb" or values.ndim not in (1, 2):
            text = f"{name} is of type {values.dtype} and shape {list(values.shape)}"
            raise ConfigError(f"data.path={file}: {text}; numbers of [rows] or [rows, columns] are needed")
        if not len(values):
            raise ConfigError(f"data.path={file}: {name} has no row")
    for name, values in arrays.items():
        if len(values) != len(arrays[y_name]):
            raise ConfigError(f"data.path={file}: {name} has {len(values):,} rows, {y_name} {len(arrays[y_name]):,}")
    if arrays[y_name].ndim == 2 and arrays[y_name].shape[1] != 1:
        raise ConfigError(f"data.path={file}: {y_name} is of shape {list(arrays[y_name].shape)}; one number a row")
    columns = [arrays[name].reshape(len(arrays[name]), -1).astype(np.float64) for name in x_names]
    return np.concatenate(columns, axis=1), arrays[y_name].reshape(-1)


def _classes(data: DataConfig, y: Numbers, num_classes: int) -> Numbers:
    """ConfigError: one is no whole number, or beyond the model's classes."""
    labels = as_labels(str(data.path), data.y or "y", y, len(y))
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        text = f"row {int(wrong[0]):,} (from 0) has class {int(labels[wrong[0]])}"
        raise ConfigError(f"data.path={data.path}: {text}; recipe.model.num_classes={num_classes}")
    return labels
