"""A vision transformer; the contract of a recipe is told in transformer.py.

Dosovitskiy et al. (2021), "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
arXiv:2010.11929: patches of the image as tokens, a class token before them, learned positions, blocks normalised
before attention and layer, and a linear classifier of the class token.

Without `data=images` the images are made, not loaded: gratings, see _images.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ._blocks import FeedForward, SelfAttention, block_products, initialise
from ._checks import amounts, checked, divides, rates, whole_numbers
from ._images import loss, make_batch, predict

__all__ = ["Options", "build", "flops_per_sample", "loss", "make_batch", "predict"]

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 96
    """Model dimension, which num_heads divides."""
    num_heads: int = 3
    """Attention heads, from 1."""
    mlp_width: int = 384
    """Width of the layer after attention, from 1; 4 * width in the paper."""
    patch_size: int = 4
    """Height and width of a patch in pixels, which divides image_size."""
    dropout: float = 0.0
    """Probability that dropout zeroes a value, from 0 to below 1; one rate everywhere."""
    num_classes: int = 10
    """Kinds of images, from 2."""
    image_size: int = 32
    """Height and width of an image in pixels, from 1."""
    channels: int = 3
    """Colours of an image, from 1."""
    noise: float = 0.5
    """Standard deviation of the noise in an image that is made, from 0; the pattern's own is 1."""

    @property
    def time(self) -> int:
        """Positions of a sequence: patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        sizes = ("num_layers", "width", "num_heads", "mlp_width", "patch_size", "image_size", "channels")
        mistakes = whole_numbers(self, *sizes)
        mistakes = mistakes or divides(self, "num_heads", "width") + divides(self, "patch_size", "image_size")
        return mistakes + whole_numbers(self, "num_classes", least=2) + rates(self, "dropout") + amounts(self, "noise")


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, options: Options):
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.attention = SelfAttention(options.width, options.num_heads)
        self.mlp_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.mlp = FeedForward(options.width, options.mlp_width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Vit(nn.Module):
    """images, float32 of (batch, channels, image_size, image_size) -> logits of (batch, num_classes)."""

    def __init__(self, options: Options):
        super().__init__()
        self.patches = nn.Conv2d(options.channels, options.width, options.patch_size, stride=options.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, options.width))
        self.position_embedding = nn.Parameter(torch.empty(options.time, options.width))
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.final_norm = nn.LayerNorm(options.width, eps=NORM_EPS)
        self.head = nn.Linear(options.width, options.num_classes)
        initialise(self)
        nn.init.normal_(self.position_embedding, std=0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1)
        x = self.dropout(x + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x[:, 0]))


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Vit(checked(options))


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one image, without recomputation: 2 for each multiplication of blocks, head and
    patches; the backward has two products for each of the forward, but needs no gradient of the images."""
    patches = (options.time - 1) * options.patch_size**2 * options.channels * options.width
    blocks = options.num_layers * block_products(options.time, options.width, options.mlp_width)
    return 2 * (3 * (blocks + options.width * options.num_classes) + 2 * patches)
