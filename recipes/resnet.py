"""A residual network for small images; the contract of a recipe is told in recipes/transformer.py.

The network is that of section 4.2 of He et al. (2016), "Deep Residual Learning for Image Recognition",
arXiv:1512.03385: a 3 x 3 convolution, three stages of equal length whose channels double while the image halves,
the mean over the image, and a linear classifier. With 3 blocks a stage and width 16 it is their ResNet-20. Where a
stage changes the shape, the shortcut is a 1 x 1 convolution (their option B). Batch normalisation: Ioffe & Szegedy
(2015), arXiv:1502.03167.

Without `data=images` the images are made, not loaded, so that a first run needs no download: see `make_batch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

NUM_STAGES = 3
PIXELS_PER_CREST = 6.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    width: int = 16
    """Channels of the first of three stages, from 1; each next stage has twice as many."""
    num_blocks: int = 3
    """Residual blocks of each stage, from 1, two convolutions each: n make ResNet-(6n + 2)."""
    num_classes: int = 10
    """Kinds of images, from 2."""
    image_size: int = 32
    """Height and width of an image in pixels, from 8."""
    channels: int = 3
    """Colours of an image, from 1."""
    noise: float = 1.0
    """Standard deviation of the noise in an image, from 0; the pattern's own is 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = []
        # 8 pixels show a whole crest of a pattern, and leave the last stage more than one, so that even a batch of one
        # image has a variance there.
        for name, least in (("width", 1), ("num_blocks", 1), ("num_classes", 2), ("image_size", 8), ("channels", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                mistakes.append(f"{name}={value!r}: must be a whole number of at least {least}")
        noise = self.noise
        if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
            mistakes.append(f"noise={noise!r}: must be a finite number of at least 0")
        return mistakes


class Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))"""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(hidden)))


class ResNet(nn.Module):
    """images, float32 of (batch, channels, image_size, image_size) -> logits of (batch, num_classes)."""

    def __init__(self, options: Options):
        super().__init__()
        self.stem = nn.Conv2d(options.channels, options.width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(options.width)
        blocks, channels = [], options.width
        for stage in range(NUM_STAGES):
            for index in range(options.num_blocks):
                halves = stage > 0 and index == 0
                blocks.append(Block(channels, options.width * 2**stage, stride=2 if halves else 1))
                channels = options.width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, options.num_classes)
        self._initialise()

    def _initialise(self) -> None:
        """Convolutions as in He et al. (2015), arXiv:1502.01852, by the fan-out; the rest as PyTorch does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem_norm(self.stem(images)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    mistakes = options.check()
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return ResNet(options)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per image; batch = (images, labels), see `make_batch`."""
    logits, labels = predict(model, batch)
    return F.cross_entropy(logits, labels)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, of (batch_size, num_classes); labels, int64 of (batch_size,))."""
    images, labels = batch
    return model(images), labels


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, float32 of (batch_size, channels, image_size, image_size); labels, int64 of (batch_size,)).

    An image is a sine grating under noise. Its class, k of n, is the direction of the grating: pi * k / n. Where the
    crests lie and how strong they are in each colour is drawn for each image, so that neither a pixel's value nor a
    colour tells the class; what a small convolution sees does.
    """
    labels = torch.randint(options.num_classes, (batch_size,), generator=generator)
    phases = 2 * math.pi * torch.rand(batch_size, generator=generator)
    colours = torch.randn(batch_size, options.channels, generator=generator)
    noise = torch.randn(batch_size, options.channels, options.image_size, options.image_size, generator=generator)

    turns = math.pi * labels / options.num_classes
    directions = torch.stack((turns.cos(), turns.sin()), dim=1)
    pixels = torch.arange(options.image_size, dtype=torch.float32)
    along = directions[:, 0, None, None] * pixels + directions[:, 1, None, None] * pixels[:, None]
    gratings = math.sqrt(2) * torch.sin(2 * math.pi / PIXELS_PER_CREST * along + phases[:, None, None])
    return colours[:, :, None, None] * gratings[:, None] + options.noise * noise, labels


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one image, without recomputation.

    Forward: 2 per weight of a convolution and pixel that it writes, and 2 per weight of the head. The backward has two
    products for each of the forward, but the first convolution needs no gradient of the images.
    """
    size, channels = options.image_size, options.width
    stem = 9 * options.channels * channels * size**2
    weights = stem
    for stage in range(NUM_STAGES):
        before, channels = channels, options.width * 2**stage
        size = math.ceil(size / 2) if stage else size
        first = 9 * before * channels + (before * channels if stage else 0)
        weights += (first + 9 * channels**2 * (2 * options.num_blocks - 1)) * size**2
    weights += channels * options.num_classes
    return 2 * (3 * weights - stem)
