"""A folder with a folder of pictures for each class, read picture by picture (Pillow, of the extra `aottrain[data]`).

Every file is read once, to see that it is a whole picture of the right size; that is remembered for as long as names,
sizes and times of change of all files stay.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aottrain.data.images import Labelled, divided, whole
from aottrain.data.order import Numbers
from aottrain.data.tokens.documents import files_below, imported
from aottrain.errors import ConfigError
from aottrain.toolchain.cache import has_fields, table

SUFFIXES = (".png", ".jpg", ".jpeg")
PARTS = (("train", "val"), ("train", "test"))  # folders that say themselves what is held out
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels
_ENDS = {b"\x89PNG": b"IEND", b"\xff\xd8": b"\xff\xd9"}  # what a file that begins so must have near its end
_NEAR = 1024
_LOOKS = partial(has_fields, fields={"width": int, "height": int, "sha256": str})  # what is kept of a folder


@dataclass(frozen=True)
class Pictures:
    """Files of one size."""

    files: tuple[Path, ...]
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.files)

    def at(self, numbers: Numbers) -> Numbers:
        """uint8 of (len(numbers), channels, height, width). ConfigError names a file that cannot be decoded."""
        return np.stack([decoded(self.files[number], self.shape) for number in numbers])


def decoded(file: Path, shape: tuple[int, int, int]) -> Numbers:
    """uint8 of `shape`. ConfigError: it cannot be decoded, or has become another since it was looked at."""
    library = imported("PIL.Image", f"data.path={file}", "pillow")
    try:
        with library.open(file) as picture:
            if picture.mode.startswith("I"):  # 16 bits, of which `convert` would make 255 of all above it
                picture = library.fromarray((np.asarray(picture).astype(np.float64) / 257).round().astype(np.uint8))
            pixels = np.asarray(picture.convert(MODES[shape[0]]))
    except Exception as error:  # Pillow has many for a damaged file
        raise ConfigError(f"data.path={file}: cannot be decoded: {_first_line(error)}") from error
    pixels = pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)
    if pixels.shape != shape:
        raise ConfigError(f"data.path={file}: is {list(pixels.shape[1:])} now, {list(shape[1:])} when it was looked at")
    return pixels


def is_class_folder(root: Path) -> bool:
    """Whether there are folders in it, hidden ones apart."""
    return any(_classes(root))


def _classes(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_folder(root: Path, held_out: float, channels: int) -> tuple[Labelled, Labelled, str]:
    """(trained on, held out, fingerprint). Classes are numbered in the order of their folders' names; folders train and
    val (or test) hold the classes of each part. ConfigError: see `_listed`, `_looked_at`."""
    if channels not in MODES:
        raise ConfigError(f"recipe.model.channels={channels}: pictures of a folder have {', '.join(map(str, MODES))}")
    names = {path.name for path in _classes(root)}
    parts = next((pair for pair in PARTS if names == set(pair)), None)
    if parts is None:
        pixels, labels, _, digest = _part(root, channels)
        return (*divided(pixels, labels, held_out), digest)
    (train, labels, classes, first), (rest, rest_labels, other, second) = (_part(root / p, channels) for p in parts)
    if classes != other:
        strange = sorted(set(classes) ^ set(other))[0]
        raise ConfigError(f"data.path={root}: class {strange} is in only one of {parts[0]} and {parts[1]}")
    if train.shape != rest.shape:
        text = f"{parts[0]} has images of {train.shape[1]} x {train.shape[2]}, {parts[1]} of {rest.shape[1]} x "
        raise ConfigError(f"data.path={root}: {text}{rest.shape[2]}")
    return whole(train, labels), whole(rest, rest_labels), hashlib.sha256((first + second).encode()).hexdigest()


def _part(root: Path, channels: int) -> tuple[Pictures, Numbers, list[str], str]:
    files, labels, classes = _listed(root)
    known = _looked_at(root, files)
    return Pictures(tuple(files), (channels, known["height"], known["width"])), labels, classes, known["sha256"]


def _listed(root: Path) -> tuple[list[Path], Numbers, list[str]]:
    """(files, their classes, names of the classes). ConfigError: a class has no picture."""
    files: list[Path] = []
    labels: list[int] = []
    folders = _classes(root)
    for label, folder in enumerate(folders):
        found = files_below(folder, SUFFIXES)
        if not found:
            raise ConfigError(f"data.path={folder}: the class has no file that ends in {', '.join(SUFFIXES)}")
        files += found
        labels += [label] * len(found)
    return files, np.array(labels, dtype=np.int64), [folder.name for folder in folders]


def _looked_at(root: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Height and width of all, and the fingerprint. ConfigError: a file is no whole picture, or of another size."""
    listing = hashlib.sha256()
    for file in files:
        status = file.stat()
        listing.update(os.fsencode(f"{file.relative_to(root)}|{status.st_size}|{status.st_mtime_ns}\n"))
    known, key = table("image_folders", _LOOKS), f"{root.resolve()}|{listing.hexdigest()}"
    values = known.get(key)
    if values is None:
        digest = hashlib.sha256()
        first = None
        for file in files:
            size, content = _size_of(file)
            first = first or (size, file)
            if size != first[0]:
                text = f"is {size[1]} x {size[0]}, but {first[1]} is {first[0][1]} x {first[0][0]}; all must be alike"
                raise ConfigError(f"data.path={file}: {text}")
            digest.update(os.fsencode(f"{file.relative_to(root).as_posix()} {hashlib.sha256(content).hexdigest()}\n"))
        assert first is not None
        values = {"width": first[0][0], "height": first[0][1], "sha256": digest.hexdigest()}
        known.add({key: values})
    return values


def _size_of(file: Path) -> tuple[tuple[int, int], bytes]:
    """((width, height), content) of a picture, from its head. ConfigError: it is none, cut short or damaged."""
    library = imported("PIL.Image", f"data.path={file}", "pillow")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.path={file}: cannot be read: {error.strerror or error}") from error
    if not content:
        raise ConfigError(f"data.path={file}: is empty")
    is_whole = not any(content.startswith(start) and end not in content[-_NEAR:] for start, end in _ENDS.items())
    try:
        with library.open(io.BytesIO(content)) as picture:
            size = picture.size
            if is_whole:
                picture.verify()  # of a PNG the checksums
    except library.UnidentifiedImageError as error:  # whose text has the address of an object
        raise ConfigError(f"data.path={file}: is no picture: of no kind that Pillow knows") from error
    except Exception as error:
        raise ConfigError(f"data.path={file}: is no picture: {_first_line(error)}") from error
    if not is_whole:
        raise ConfigError(f"data.path={file}: is cut short: the end of the picture is missing")
    return size, content


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
