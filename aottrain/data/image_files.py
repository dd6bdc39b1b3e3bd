"""Images from what a path names: a folder of classes, an .npz file, the files of MNIST, or scikit-learn's digits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aottrain.data.array_files import SPLIT, has_split, listed, named, read_idx, read_npz
from aottrain.data.batches import Source
from aottrain.data.image_folder import is_class_folder, read_folder
from aottrain.data.images import (
    Labelled,
    Shown,
    as_images,
    as_labels,
    check_images,
    digest_of,
    digits,
    divided,
    exists,
    look_of,
    shown_size,
    whole,
)
from aottrain.data.order import Numbers
from aottrain.errors import ConfigError

if TYPE_CHECKING:
    from aottrain.config.run import DataConfig

HELD_OUT_NAMES = ("t10k", "test", "val")
DIGITS = "the digits of scikit-learn"
_Parts = tuple[Labelled, Labelled, str]


def load_images(data: DataConfig, options: Any) -> Source:
    """Find out what `data.path` is, read and check it. ConfigError: it is missing, of another kind, damaged, or its
    images' size, channels or classes are not those of `options` (image_size, channels or else 3, num_classes)."""
    source, channels = data.path or DIGITS, getattr(options, "channels", 3)
    is_folder = False
    if data.path is None:
        pixels, labels = digits()
        train, rest = divided(pixels, labels, data.held_out)
        digest = digest_of(pixels.images, labels)
    else:
        root = exists(data.path)
        if files := idx_files(root):
            train, rest, digest = _from_idx(files, data.held_out, channels)
        elif root.is_dir() and is_class_folder(root):
            is_folder = True
            train, rest, digest = read_folder(root, data.held_out, channels)
        elif root.is_file() and root.suffix.lower() == ".npz":
            train, rest, digest = _from_npz(root, data, channels)
        else:
            text = "is no folder of a folder for each class, no .npz file and none of MNIST's (...-images-idx3-ubyte)"
            raise ConfigError(f"data.path={source}: {text}")
    for part in (train, rest):
        check_images(source, part, options, all_classes=is_folder)
    look = look_of(train, data.mean, data.std, data.pad, data.flip)
    note = f"images: {source}, {shown_size(train.pixels)}, {len(train):,} trained on, {len(rest):,} held out"
    return Source(Shown(train, look), Shown(rest, look), digest, (note,), is_decoded=is_folder)


def idx_files(root: Path) -> list[Path]:
    """The images among MNIST's files: what the path names, or those of the folder."""
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    return [file for file in files if file.is_file() and re.search(r"images.idx3", file.name)]


def _from_idx(files: Sequence[Path], held_out: float, channels: int) -> _Parts:
    parts = [_idx_pair(file, channels) for file in files]
    digest = digest_of(*(array for pixels, labels in parts for array in (pixels.images, labels)))
    rest = [part for file, part in zip(files, parts, strict=True) if file.name.startswith(HELD_OUT_NAMES)]
    train = [part for file, part in zip(files, parts, strict=True) if not file.name.startswith(HELD_OUT_NAMES)]
    if len(train) > 1 or len(rest) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"data.path={files[0].parent}: has several files of images ({names}); name one")
    if train and rest:
        return whole(*train[0]), whole(*rest[0]), digest
    return (*divided(*(train or rest)[0], held_out), digest)


def _idx_pair(file: Path, channels: int):  # type: ignore[no-untyped-def]
    """(images, labels) of one file of images and the file of labels beside it."""
    beside = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1"))
    if not beside.exists() and beside.with_name(beside.name + ".gz").exists():
        beside = beside.with_name(beside.name + ".gz")
    if not beside.exists():
        raise ConfigError(f"data.path={file}: its labels are missing: there is no {beside.name}")
    pixels = as_images(str(file), "it", read_idx(file), channels)
    return pixels, as_labels(str(beside), "it", read_idx(beside), len(pixels))


def _from_npz(file: Path, data: DataConfig, channels: int) -> _Parts:
    arrays = arrays_of(file, data.x, data.y)
    parts = []
    for (x_name, y_name), (x, y) in arrays.items():
        pixels = as_images(str(file), x_name, x, channels)
        parts.append((pixels, as_labels(str(file), y_name, y, len(pixels))))
    digest = digest_of(*(array for pixels, labels in parts for array in (pixels.images, labels)))
    if len(parts) == 2:
        return whole(*parts[0]), whole(*parts[1]), digest
    return (*divided(*parts[0], data.held_out), digest)


def arrays_of(file: Path, x: Sequence[str], y: str | None) -> dict[tuple[str, str], tuple[Numbers, Numbers]]:
    """By their names the arrays (x, y) of what is trained on, and, if the file has them, of what is held out."""
    if x or y:
        if len(x) > 1:
            raise ConfigError(f"data.x=[{','.join(x)}]: images are in one array")
        pairs = [(x[0] if x else "x", y or "y")]
    else:
        found = read_npz(file, ())
        parts = ("_train", "_test") if has_split(found) else ("",)
        pairs = [(f"x{part}", f"y{part}") for part in parts]
        if not {"x", "y"} <= found.keys() and parts == ("",):
            text = f"has neither x and y nor {', '.join(SPLIT)}; data.x and data.y name others"
            raise ConfigError(f"data.path={file}: {text} ({listed(found)})")
    arrays = named(file, [name for pair in pairs for name in pair])
    return {pair: (arrays[pair[0]], arrays[pair[1]]) for pair in pairs}
