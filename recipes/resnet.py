"""A residual network, for small images and for ImageNet; the contract of a recipe is told in recipes/transformer.py.

The network is that of section 4.2 of He et al. (2016), "Deep Residual Learning for Image Recognition",
arXiv:1512.03385: a 3 x 3 convolution, three stages of equal length whose channels double while the image halves,
the mean over the image, and a linear classifier. With 3 blocks a stage and width 16 it is their ResNet-20. Where a
stage changes the shape, the shortcut is a 1 x 1 convolution (their option B). Batch normalisation: Ioffe & Szegedy
(2015), arXiv:1502.03167. With `depth` it is one of their networks for ImageNet (table 1), which halve the image in the
3 x 3 convolution of a bottleneck, as usual since, and not in the 1 x 1 before it.

Without `data=images` the images are made, not loaded, so that a first run needs no download: see _images.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._checks import amounts, checked, rates, whole_numbers
from ._images import loss, make_batch, predict

__all__ = ["Options", "build", "flops_per_sample", "loss", "make_batch", "predict"]

# Blocks of each stage by depth: table 1 of the paper.
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
EXPANSION = 4  # channels that a bottleneck writes, of those within it
STEM_KERNEL = 7


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    width: int = 16
    """Channels of the first stage, from 1; each next stage has twice as many."""
    num_blocks: int = 3
    """Residual blocks of each of three stages, from 1, two convolutions each: n make ResNet-(6n + 2)."""
    depth: int | None = None
    """The shape for ImageNet of 18, 34, 50, 101 or 152 layers, whatever num_blocks; null is that for small images."""
    num_classes: int = 10
    """Kinds of images, from 2."""
    image_size: int = 32
    """Height and width of an image in pixels, from 8."""
    channels: int = 3
    """Colours of an image, from 1."""
    noise: float = 1.0
    """Standard deviation of the noise in an image, from 0; the pattern's own is 1."""
    label_smoothing: float = 0.0
    """Part of each label that is spread over all classes in training, from 0 to below 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "width", "num_blocks", "channels")
        # 8 pixels show a whole crest of a pattern, and leave the last stage more than one, so that even a batch of one
        # image has a variance there; as 33 do where there are four stages after a stem that halves twice.
        least = 33 if self.depth else 8
        mistakes += whole_numbers(self, "num_classes", least=2) + whole_numbers(self, "image_size", least=least)
        if self.depth is not None and self.depth not in DEPTHS:
            mistakes.append(f"depth={self.depth!r}: must be one of {', '.join(map(str, DEPTHS))}, or null")
        return mistakes + amounts(self, "noise") + rates(self, "label_smoothing")

    @property
    def stages(self) -> tuple[int, ...]:
        """Residual blocks of each stage."""
        return DEPTHS[self.depth] if self.depth else (self.num_blocks,) * 3

    @property
    def expansion(self) -> int:
        """Channels that a block writes, of those within it."""
        return EXPANSION if (self.depth or 0) >= 50 else 1


class Shortcut(nn.Sequential):
    """x, or where the shape changes a 1 x 1 convolution of it."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        if stride == 1 and channels_in == channels:
            super().__init__()
        else:
            super().__init__(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))


class Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))"""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = Shortcut(channels_in, channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(hidden)))


class Bottleneck(nn.Module):
    """As Block, of three convolutions: 1 x 1 to `channels`, 3 x 3, and 1 x 1 to four times as many."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, EXPANSION * channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(EXPANSION * channels)
        self.shortcut = Shortcut(channels_in, EXPANSION * channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        hidden = F.relu(self.norm2(self.conv2(hidden)))
        return F.relu(self.shortcut(x) + self.norm3(self.conv3(hidden)))


class ResNet(nn.Module):
    """images, float32 of (batch, channels, image_size, image_size) -> logits of (batch, num_classes)."""

    def __init__(self, options: Options):
        super().__init__()
        size = {"kernel_size": STEM_KERNEL, "stride": 2} if options.depth else {"kernel_size": 3}
        self.stem = nn.Conv2d(options.channels, options.width, padding=size["kernel_size"] // 2, bias=False, **size)
        self.label_smoothing = options.label_smoothing
        self.stem_norm = nn.BatchNorm2d(options.width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if options.depth else nn.Identity()
        kind = Bottleneck if options.expansion > 1 else Block
        blocks, channels = [], options.width
        for stage, num_blocks in enumerate(options.stages):
            for index in range(num_blocks):
                halves = stage > 0 and index == 0
                blocks.append(kind(channels, options.width * 2**stage, stride=2 if halves else 1))
                channels = options.width * 2**stage * options.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, options.num_classes)
        self._initialise()

    def _initialise(self) -> None:
        """Convolutions as in He et al. (2015), arXiv:1502.01852, by the fan-out; the rest as PyTorch does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.stem_norm(self.stem(images))))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return ResNet(checked(options))


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one image, without recomputation.

    Forward: 2 per weight of a convolution and pixel that it writes, and 2 per weight of the head. The backward has two
    products for each of the forward, but the first convolution needs no gradient of the images.
    """
    size, width = options.image_size, options.width
    size = math.ceil(size / 2) if options.depth else size
    products = [(STEM_KERNEL if options.depth else 3) ** 2 * options.channels * width * size**2]
    size, channels = math.ceil(size / 2) if options.depth else size, width
    for stage, num_blocks in enumerate(options.stages):
        width = options.width * 2**stage
        for index in range(num_blocks):
            before, halves = size, stage > 0 and index == 0
            size = math.ceil(size / 2) if halves else size
            out = width * options.expansion
            if options.expansion > 1:
                weights = [channels * width * before**2, 9 * width**2 * size**2, width * out * size**2]
            else:
                weights = [9 * channels * width * size**2, 9 * width**2 * size**2]
            shortcut = channels * out * size**2 if halves or channels != out else 0
            products += [*weights, shortcut]
            channels = out
    return 2 * (3 * (sum(products) + channels * options.num_classes) - products[0])
