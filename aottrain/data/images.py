"""Images with a class each: what is held in memory, and what every kind of them has in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from aottrain.data.order import Numbers, fixed_split, mixed
from aottrain.data.tokens.documents import imported
from aottrain.errors import ConfigError
from aottrain.step import Batch

MEASURED_IMAGES = 1024  # at most, evenly spaced, from which mean and standard deviation are taken
LARGEST_LABEL = 1 << 53  # up to which a float has every whole number
_CHANNELS = (1, 3, 4)


class Pixels(Protocol):
    """Images by number."""

    shape: tuple[int, int, int]
    """Channels, height and width of each."""

    def __len__(self) -> int: ...

    def at(self, numbers: Numbers) -> Numbers:
        """uint8, or float32 as they shall be, of (len(numbers), channels, height, width)."""
        ...


@dataclass(frozen=True)
class InMemory:
    """All of them, in an array of (n, channels, height, width)."""

    images: Numbers

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __len__(self) -> int:
        return len(self.images)

    def at(self, numbers: Numbers) -> Numbers:
        return self.images[numbers]


@dataclass(frozen=True)
class Labelled:
    """Images and their classes."""

    pixels: Pixels
    labels: Numbers
    """int64 of (n,)."""
    part: Numbers
    """Those that belong to it, by number."""

    def __len__(self) -> int:
        return len(self.part)


@dataclass(frozen=True)
class Look:
    """How an image is shown to the model."""

    mean: Numbers
    """float32 of (channels,), of values from 0 to 1."""
    std: Numbers
    pad: int = 0
    flip: bool = False


@dataclass(frozen=True)
class Shown:
    """Example: (images, float32 of (n, channels, height, width); labels, int64 of (n,))."""

    images: Labelled
    look: Look

    def __len__(self) -> int:
        return len(self.images)

    def read(self, numbers: Numbers, keys: Numbers | None) -> Batch:
        """With keys, each is moved and turned as its own key says.

        By numpy alone: it may run in a thread beside the one that trains, whose kernels and traces are torch's.
        """
        chosen = self.images.part[numbers]
        images = (_scaled(self.images.pixels.at(chosen)) - _by_channel(self.look.mean)) / _by_channel(self.look.std)
        if keys is not None:
            images = augmented(images, keys, self.look.pad, self.look.flip)
        images = np.ascontiguousarray(images)  # numpy keeps the order in memory of what it took them from
        return torch.from_numpy(images), torch.from_numpy(self.images.labels[chosen])


def _scaled(pixels: Numbers) -> Numbers:
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels


def _by_channel(values: Numbers) -> Numbers:
    return values[:, None, None]


def augmented(images: Numbers, keys: Numbers, pad: int, flip: bool) -> Numbers:
    """Each image moved by up to `pad` pixels, zeros coming in, and turned left to right for every second key.

    images: float32 of (n, channels, height, width); keys: uint64 of (n,). An image is the same whatever batch it is in.
    """
    n, _, height, width = images.shape
    if pad:
        down, right = (_drawn(keys, which, 2 * pad + 1) for which in (1, 2))
        rows = (down[:, None] + np.arange(height))[:, None, :, None]
        columns = (right[:, None] + np.arange(width))[:, None, None, :]
        padded = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        channels = np.arange(images.shape[1])[:, None, None]
        images = padded[np.arange(n)[:, None, None, None], channels, rows, columns]
    if flip:
        images = np.where((_drawn(keys, 3, 2) == 1)[:, None, None, None], images[..., ::-1], images)
    return images


def _drawn(keys: Numbers, which: int, below: int) -> Numbers:
    """For each key a whole number from 0; another `which` gives others."""
    return (mixed(keys ^ np.uint64(which)) % np.uint64(below)).astype(np.int64)


def look_of(images: Labelled, mean: Sequence[float] | None, std: Sequence[float] | None, pad: int, flip: bool) -> Look:
    """With the mean and standard deviation that are given, else measured. ConfigError: of another number of
    channels."""
    channels = images.pixels.shape[0]
    for name, given in (("mean", mean), ("std", std)):
        if given is not None and len(given) != channels:
            raise ConfigError(f"data.{name}=[{','.join(map(str, given))}]: the images have {channels} channels")
    measured: list[Numbers] = [np.zeros(0), np.zeros(0)]
    if mean is None or std is None:
        count = min(len(images), MEASURED_IMAGES)
        chosen = images.part[np.arange(count) * len(images) // count]
        pixels = _scaled(images.pixels.at(chosen)).astype(np.float64)
        measured = [pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))]
        measured[1][measured[1] == 0] = 1.0
    mean_of, std_of = (m if g is None else np.array(g) for g, m in zip((mean, std), measured, strict=True))
    return Look(mean_of.astype(np.float32), std_of.astype(np.float32), pad, flip)


def divided(pixels: Pixels, labels: Numbers, held_out: float) -> tuple[Labelled, Labelled]:
    """(trained on, held out): a fixed part is held out."""
    train, rest = fixed_split(len(labels), int(len(labels) * held_out))
    return Labelled(pixels, labels, train), Labelled(pixels, labels, rest)


def whole(pixels: Pixels, labels: Numbers) -> Labelled:
    return Labelled(pixels, labels, np.arange(len(labels)))


def check_images(source: str, images: Labelled, options: Any, *, all_classes: bool = False) -> None:
    """ConfigError: their size, channels or classes are not the model's. all_classes: there must be just as many."""
    channels, height, width = images.pixels.shape
    asked = {"image_size": options.image_size, "channels": getattr(options, "channels", 3)}
    if height != width or (height, channels) != (asked["image_size"], asked["channels"]):
        named = {name: f"recipe.model.{getattr(options, 'data_keys', {}).get(name, name)}" for name in asked}
        given = ", ".join(f"{named[name]}={value}" for name, value in asked.items())
        hint = f"{named['image_size']}={height} {named['channels']}={channels} would fit"
        hint = hint if height == width else "they must be square; scale or cut them first"
        size = shown_size(images.pixels)
        raise ConfigError(f"data.path={source}: images are {size}; {given}: {hint}")
    labels = images.labels
    if labels.min() < 0 or labels.max() >= options.num_classes:
        at = int(np.flatnonzero((labels < 0) | (labels >= options.num_classes))[0])
        text = f"image {at:,} (from 0) has label {int(labels[at])}; recipe.model.num_classes={options.num_classes}"
        raise ConfigError(f"data.path={source}: {text}")
    if all_classes and int(labels.max()) + 1 != options.num_classes:
        text = f"has {int(labels.max()) + 1} classes; recipe.model.num_classes={options.num_classes}"
        raise ConfigError(f"data.path={source}: {text}")


def shown_size(pixels: Pixels) -> str:
    channels, height, width = pixels.shape
    return f"{height} x {width} with {channels} channel{'s' * (channels > 1)}"


def as_images(source: str, name: str, values: Numbers, channels: int) -> InMemory:
    """An array of (n, height, width), (n, height, width, channels) or (n, channels, height, width) as images.

    ConfigError: it is of another shape or type, or has a value that is no finite number."""
    if values.dtype != np.uint8 and values.dtype.kind != "f":
        raise ConfigError(f"data.path={source}: {name} is of type {values.dtype}; images are uint8 or float")
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[1] != channels and values.shape[3] in (channels, *_CHANNELS):
        values = values.transpose(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in (channels, *_CHANNELS):
        text = f"{name} is of shape {list(values.shape)}; images are [n, height, width] or [n, height, width, channels]"
        raise ConfigError(f"data.path={source}: {text}")
    if not len(values):
        raise ConfigError(f"data.path={source}: {name} is empty")
    if values.dtype.kind == "f":
        values = as_float32(values)
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not finite.all():
            at = int(np.flatnonzero(~finite)[0])
            text = f"{name} has a value in image {at:,} (from 0) that is not finite in float32"
            raise ConfigError(f"data.path={source}: {text}")
    return InMemory(values)


def as_labels(source: str, name: str, values: Numbers, count: int) -> Numbers:
    """int64 of (count,). ConfigError: it is of another shape or has no whole numbers, or larger ones."""
    if values.shape not in ((count,), (count, 1)):
        text = f"{name} is of shape {list(values.shape)}; there are {count:,} examples"
        raise ConfigError(f"data.path={source}: {text}")
    if values.dtype.kind not in "iubf":
        raise ConfigError(f"data.path={source}: {name} is of type {values.dtype}; labels are whole numbers")
    values = values.reshape(count)
    wrong = np.flatnonzero((values != np.floor(values)) | (np.abs(values.astype(np.float64)) > LARGEST_LABEL))
    if len(wrong):
        at = int(wrong[0])
        raise ConfigError(
            f"data.path={source}: {name} is {values[at]} at {at:,} (from 0); labels are whole numbers up to 2**53"
        )
    return values.astype(np.int64)


def as_float32(values: Numbers) -> Numbers:
    """What is larger than any of its numbers is infinite, without a warning."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def digest_of(*arrays: Numbers) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def digits() -> tuple[InMemory, Numbers]:
    """1,797 handwritten digits of 8 x 8 grey pixels (E. Alpaydin & C. Kaynak, UCI, 1998), as scikit-learn has them."""
    datasets = imported("sklearn.datasets", "data=images without data.path (the digits)", "scikit-learn")
    loaded = datasets.load_digits()
    return InMemory((loaded.images[:, None] / 16).astype(np.float32)), loaded.target.astype(np.int64)


def exists(path: str) -> Path:
    """ConfigError: it does not."""
    if not (root := Path(path).expanduser()).exists():
        raise ConfigError(f"data.path={path}: there is no such file or folder")
    return root
