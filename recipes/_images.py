"""What recipes of images have in common: how they classify, and images that they make themselves, so that a first run
needs no files: gratings, whose direction is their class.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

PIXELS_PER_CREST = 6.0


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per image; batch = (images, labels), see `make_batch`. A model with `label_smoothing`
    is trained with it."""
    logits, labels = predict(model, batch)
    smoothing = getattr(model, "label_smoothing", 0.0) if model.training else 0.0
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, of (batch_size, num_classes); labels, int64 of (batch_size,))."""
    images, labels = batch
    return model(images), labels


def make_batch(options: Any, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, float32 of (batch_size, channels, image_size, image_size); labels, int64 of (batch_size,)).

    options: with num_classes, channels, image_size, and noise, the standard deviation of that in an image. An image is
    a sine grating of standard deviation 1 under it. Its class, k of n, is the direction of the grating: pi * k / n.
    Where the crests lie and how strong they are in each colour is drawn for each image, so that neither a pixel's value
    nor a colour tells the class; what a small convolution sees does.
    """
    labels = torch.randint(options.num_classes, (batch_size,), generator=generator)
    phases = 2 * math.pi * torch.rand(batch_size, generator=generator)
    colours = torch.randn(batch_size, options.channels, generator=generator)
    noise = torch.randn(batch_size, options.channels, options.image_size, options.image_size, generator=generator)

    turns = math.pi * labels / options.num_classes
    directions = torch.stack((turns.cos(), turns.sin()), dim=1)
    pixels = torch.arange(options.image_size, dtype=torch.float32)
    along = directions[:, 0, None, None] * pixels + directions[:, 1, None, None] * pixels[:, None]
    waves = math.sqrt(2) * torch.sin(2 * math.pi / PIXELS_PER_CREST * along + phases[:, None, None])
    return colours[:, :, None, None] * waves[:, None] + options.noise * noise, labels
