"""A variational autoencoder of images; the contract of a recipe is told in transformer.py.

Kingma & Welling (2014), "Auto-Encoding Variational Bayes", arXiv:1312.6114: an encoder gives mean and variance of a
normal distribution of codes, a decoder the mean of one of images, with a variance of its own that is learned with it
(Rybkin, Daniilidis & Levine, 2021, "Simple and Effective VAE Training with Calibrated Decoders", arXiv:2006.13202).
Both are convolutions that halve and double the image. The noise that a code is drawn by comes with the batch.

Without `data=images` the images are made, not loaded: gratings, see _images.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from . import _images
from ._checks import amounts, checked, whole_numbers


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    width: int = 32
    """Channels of the first of two convolutions, from 1; the second has twice as many."""
    code_width: int = 16
    """Numbers of a code, from 1."""
    image_size: int = 16
    """Height and width of an image in pixels, a multiple of 4."""
    channels: int = 1
    """Colours of an image, from 1."""
    noise: float = 0.1
    """Standard deviation of the noise in an image that is made, from 0; the pattern's own is 1."""
    num_classes: int = 10
    """Kinds of images, from 2; what is learned takes no account of them."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "width", "code_width", "channels") + whole_numbers(self, "num_classes", least=2)
        sizes = whole_numbers(self, "image_size", least=4)
        if not sizes and self.image_size % 4:
            sizes.append(f"image_size={self.image_size}: must be a multiple of 4, because it is halved twice")
        return mistakes + sizes + amounts(self, "noise")

    @property
    def small(self) -> tuple[int, int, int]:
        """Channels, height and width of what the convolutions leave of an image."""
        return 2 * self.width, self.image_size // 4, self.image_size // 4


class Vae(nn.Module):
    """(images, float32 of (batch, channels, image_size, image_size); noise, of (batch, code_width)) -> the bound on
    each image's negative log-likelihood, in nats, (batch,)."""

    def __init__(self, options: Options):
        super().__init__()
        width, flat = options.width, math.prod(options.small)
        self.encoder = nn.Sequential(
            nn.Conv2d(options.channels, width, 4, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.SiLU(),
            nn.Flatten(), nn.Linear(flat, 2 * options.code_width),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(options.code_width, flat), nn.SiLU(), nn.Unflatten(1, options.small),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.SiLU(),
            nn.ConvTranspose2d(width, options.channels, 4, stride=2, padding=1),
        )  # fmt: skip
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        code = mean + (log_variance / 2).exp() * noise
        errors = (images - self.decoder(code)) / self.log_scale.exp()
        likelihood = (errors.square() / 2 + self.log_scale + math.log(2 * math.pi) / 2).flatten(1).sum(dim=1)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return likelihood + divergence


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Vae(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The mean bound in nats per pixel and colour; batch: see `prepare`."""
    images, noise = batch
    return model(images, noise).mean() / images[0].numel()


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """As `prepare` gives it, of images that are made."""
    return prepare(options, _images.make_batch(options, batch_size, generator), generator)


def prepare(options: Options, batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(images; standard normal noise, float32 of (batch_size, code_width)), of a batch of images."""
    images = batch[0]
    return images, torch.randn(len(images), options.code_width, generator=generator).to(images.device)


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one image, without recomputation: 2 per weight of a convolution and pixel of
    the smaller side, and per weight of a linear layer; the backward has two products for each of the forward, but needs
    no gradient of the images."""
    channels, height, width = options.small
    outer = 16 * options.channels * options.width * 4 * height * width
    inner = 16 * options.width * channels * height * width
    code = channels * height * width * options.code_width
    return 2 * (3 * (2 * outer + 2 * inner + 3 * code) - outer)
