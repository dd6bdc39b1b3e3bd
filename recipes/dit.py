"""A diffusion transformer, which finds the noise in an image; the contract of a recipe is told in transformer.py.

Peebles & Xie (2023), "Scalable Diffusion Models with Transformers", arXiv:2212.09748: patches as tokens, fixed
positions of sines, and blocks whose norms are shifted, scaled and gated by what time and class make of them, gates
that begin at 0 (adaLN-Zero). Noise, schedule and loss: Ho, Jain & Abbeel (2020), "Denoising Diffusion Probabilistic
Models", arXiv:2006.11239: an image is mixed with noise as step t of 1,000 says, and the mean squared error of the
noise that is found counts. Variances are not learned. One class in ten is not told (Ho & Salimans, 2022, "Classifier-
Free Diffusion Guidance", arXiv:2207.12598). Step, class and noise come with the batch.

Without `data=images` the images are made, not loaded: gratings, see _images.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from . import _images
from ._blocks import FeedForward, SelfAttention, block_products, initialise
from ._checks import amounts, checked, divides, whole_numbers

NUM_STEPS = 1000
UNTOLD = 0.1
STEP_WIDTH = 256  # sines and cosines that say a step
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 4
    """Transformer blocks, from 1."""
    width: int = 96
    """Model dimension, which num_heads and 4 divide."""
    num_heads: int = 3
    """Attention heads, from 1."""
    patch_size: int = 2
    """Height and width of a patch in pixels, which divides image_size."""
    num_classes: int = 10
    """Kinds of images, from 2."""
    image_size: int = 16
    """Height and width of an image in pixels, from 1."""
    channels: int = 1
    """Colours of an image, from 1; of a latent one 4."""
    noise: float = 0.0
    """Standard deviation of the noise in an image that is made, from 0; the pattern's own is 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "num_layers", "width", "num_heads", "patch_size", "image_size", "channels")
        if not mistakes:
            mistakes += divides(self, "num_heads", "width") + divides(self, "patch_size", "image_size")
            mistakes += [f"width={self.width}: must be a multiple of 4"] if self.width % 4 else []
        return mistakes + whole_numbers(self, "num_classes", least=2) + amounts(self, "noise")

    @property
    def time(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.patch_size**2 * self.channels


def waves(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Cosines and sines of (n,) at width / 2 rates from 1 to nearly 1/10,000: (n, width)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=positions.device) / (width // 2))
    angles = positions[:, None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class Block(nn.Module):
    """x + gate * attention(shifted and scaled norm(x)), then the same with the layer; condition: (batch, width)."""

    def __init__(self, options: Options):
        super().__init__()
        self.norm = nn.LayerNorm(options.width, eps=NORM_EPS, elementwise_affine=False)
        self.attention = SelfAttention(options.width, options.num_heads)
        self.mlp = FeedForward(options.width, 4 * options.width, approximate="tanh")
        self.modulation = nn.Linear(options.width, 6 * options.width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


class Dit(nn.Module):
    """(images under noise, float32 of (batch, channels, image_size, image_size); steps, from 0; classes, num_classes
    for one that is not told: int64 of (batch,)) -> the noise in them, of the images' shape."""

    def __init__(self, options: Options):
        super().__init__()
        self.patch_size, self.num_patches = options.patch_size, options.image_size // options.patch_size
        self.patches = nn.Linear(options.patch_width, options.width)
        rows = torch.arange(options.time) // self.num_patches
        columns = torch.arange(options.time) % self.num_patches
        positions = torch.cat((waves(rows, options.width // 2), waves(columns, options.width // 2)), dim=1)
        self.register_buffer("positions", positions, persistent=False)
        self.step_embedding = nn.Sequential(
            nn.Linear(STEP_WIDTH, options.width), nn.SiLU(), nn.Linear(options.width, options.width)
        )
        self.class_embedding = nn.Embedding(options.num_classes + 1, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.final_norm = nn.LayerNorm(options.width, eps=NORM_EPS, elementwise_affine=False)
        self.final_modulation = nn.Linear(options.width, 2 * options.width)
        self.head = nn.Linear(options.width, options.patch_width)
        remaining = (1 - torch.linspace(1e-4, 0.02, NUM_STEPS, dtype=torch.float64)).cumprod(dim=0)
        self.register_buffer("remaining", remaining.float(), persistent=False)  # of an image's variance at a step
        self._initialise()

    def _initialise(self) -> None:
        """Each block begins as the identity, and the noise that is found at 0."""
        initialise(self)
        for module in (self.final_modulation, self.head, *(block.modulation for block in self.blocks)):
            nn.init.zeros_(module.weight)

    def forward(self, images: torch.Tensor, steps: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        condition = F.silu(self.step_embedding(waves(steps, STEP_WIDTH)) + self.class_embedding(classes))
        x = self.patches(F.pixel_unshuffle(images, self.patch_size).flatten(2).transpose(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.final_modulation(condition)[:, None].chunk(2, dim=-1)
        x = self.head(self.final_norm(x) * (1 + scale) + shift).transpose(1, 2)
        return F.pixel_shuffle(x.unflatten(2, (self.num_patches, self.num_patches)), self.patch_size)


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Dit(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean squared error of the noise that is found, 1 of a model that finds none; batch: see `prepare`."""
    images, steps, classes, noise = batch
    remaining = model.remaining[steps][:, None, None, None]
    mixed = remaining.sqrt() * images + (1 - remaining).sqrt() * noise
    return F.mse_loss(model(mixed, steps, classes), noise)


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """As `prepare` gives it, of images that are made."""
    return prepare(options, _images.make_batch(options, batch_size, generator), generator)


def prepare(options: Options, batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(images; steps, from 0, and classes, num_classes for one in ten, which is not told: int64 of (batch_size,);
    standard normal noise of the images' shape), of a batch of images."""
    images, labels = batch
    steps = torch.randint(NUM_STEPS, (len(images),), generator=generator).to(images.device)
    untold = (torch.rand(len(images), generator=generator) < UNTOLD).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    return images, steps, labels.masked_fill(untold, options.num_classes), noise


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one image, without recomputation: 2 for each multiplication; the backward has
    two products for each of the forward, but needs no gradient of images and steps."""
    width, time = options.width, options.time
    blocks = options.num_layers * (block_products(time, width, 4 * width) + 6 * width**2)
    patches, steps = time * options.patch_width * width, STEP_WIDTH * width
    rest = width**2 + 2 * width**2 + time * width * options.patch_width
    return 2 * (3 * (blocks + rest) + 2 * (patches + steps))
