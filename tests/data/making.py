"""Files of data, and options of models that take them, small enough for a test."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aottrain.config.run import DataConfig
from aottrain.data.batches import Source
from aottrain.data.load import load
from aottrain.data.tokens.token_files import HEADER_BYTES, MAGIC, VERSION


@dataclass(frozen=True, kw_only=True)
class OfTokens:
    context: int = 16
    vocab_size: int = 256


@dataclass(frozen=True, kw_only=True)
class OfImages:
    image_size: int = 8
    channels: int = 1
    num_classes: int = 3


@dataclass(frozen=True, kw_only=True)
class OfRows:
    num_features: int = 2
    num_classes: int = 3


@dataclass(frozen=True, kw_only=True)
class OfTargets:
    num_features: int = 2


OPTIONS = {"text": OfTokens(), "tokens": OfTokens(), "images": OfImages(), "arrays": OfRows()}


def read(name: str, path: Path | None, options: Any = None, step: int = 8, **changes: Any) -> Source:
    """The source of `data=name`, for a recipe that takes it."""
    order = "random" if name in ("text", "tokens") else "epochs"
    data = DataConfig(name=name, path=None if path is None else str(path), **{"order": order, **changes})
    return load(data, options or OPTIONS[name], step)


def header(count: int, magic: int = MAGIC, version: int = VERSION) -> bytes:
    values = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    values[:3] = magic, version, count
    return values.tobytes()


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tokens(size: int, below: int = 250, dtype: str = "<u2") -> np.ndarray:
    return (np.arange(size) * 7 % below).astype(dtype)


def images(count: int, size: int = 8, channels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 of (count, size, size) or with channels last, labels of 3 classes)."""
    shape = (count, size, size) if channels == 1 else (count, size, size, channels)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8), np.arange(count) % 3


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def mnist(folder: Path, name: str, count: int, zipped: bool = False) -> None:
    pixels, labels = images(count)
    contents = {f"{name}-images-idx3-ubyte": pixels, f"{name}-labels-idx1-ubyte": labels.astype("u1")}
    for file, array in contents.items():
        write(folder / (file + ".gz" * zipped), gzip.compress(idx(array)) if zipped else idx(array))


def class_folder(folder: Path, count: int = 12, size: int = 8, suffix: str = ".png") -> Path:
    """A folder of three classes; needs Pillow."""
    from PIL import Image

    pixels, labels = images(count, size)
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = folder / "abc"[label] / f"{number:03d}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return folder


def rows(path: Path, count: int = 30) -> Path:
    """A .csv file of columns a, b and y."""
    lines = [f"{number / 10},{-number},{number % 3}" for number in range(count)]
    return write(path, "\n".join(["a,b,y", *lines]))
