"""Batches of recipe hf: text with some of its bytes hidden, and images and sounds that it makes itself."""

from __future__ import annotations

import math
from typing import Any

import torch

MASKED_FRACTION = 0.15
IGNORED = -100  # the label that transformers' losses leave out
NOISE = 0.5
PIXELS_PER_CREST = 6.0
FRAMES_PER_TURN = 16.0
SAMPLES = 2000
FRAMES = 64


def hide(tokens: torch.Tensor, mask_token: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens with 15 % of each row replaced by `mask_token`, at least one; where they were, bool).

    tokens: int64 of (batch, time), on any device; generator: a CPU generator. That share is Devlin et al.'s (2019),
    "BERT", arXiv:1810.04805, who leave a fifth of the chosen tokens readable; here none is.
    """
    chosen = torch.rand(tokens.shape, generator=generator) < MASKED_FRACTION
    chosen[~chosen.any(dim=1), 0] = True
    chosen = chosen.to(tokens.device)
    return tokens.masked_fill(chosen, mask_token), chosen


def images(
    labels: torch.Tensor, num_classes: int, channels: int, size: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    """float32 of (batch, channels, *size): a grating whose direction is pi * label / num_classes, under noise."""
    count = len(labels)
    phases = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    strengths = torch.randn(count, channels, 1, 1, generator=generator)
    noise = torch.randn(count, channels, *size, generator=generator)
    turns = (math.pi / num_classes * labels)[:, None, None]
    rows, columns = torch.arange(size[0])[:, None], torch.arange(size[1])[None, :]
    along = turns.cos() * columns + turns.sin() * rows
    gratings = math.sqrt(2) * torch.sin(2 * math.pi / PIXELS_PER_CREST * along + phases)
    return strengths * gratings[:, None] + NOISE * noise


def sounds(labels: torch.Tensor, num_classes: int, generator: torch.Generator) -> torch.Tensor:
    """float32 of (batch, SAMPLES): a tone whose frequency says the class, under noise."""
    phases = 2 * math.pi * torch.rand(len(labels), 1, generator=generator)
    noise = torch.randn(len(labels), SAMPLES, generator=generator)
    # From a crest in 80 samples to one in 8, in equal steps of pitch.
    frequencies = (1 / 80) * 10 ** (labels / max(num_classes - 1, 1))
    tones = math.sqrt(2) * torch.sin(2 * math.pi * frequencies[:, None] * torch.arange(SAMPLES) + phases)
    return tones + NOISE * noise


def spectrograms(
    labels: torch.Tensor, num_classes: int, frames: int, bands: int, generator: torch.Generator
) -> torch.Tensor:
    """float32 of (batch, frames, bands): energy around the band that says the class, swelling in time, under noise."""
    phases = 2 * math.pi * torch.rand(len(labels), 1, 1, generator=generator)
    noise = torch.randn(len(labels), frames, bands, generator=generator)
    centres = ((labels + 0.5) * bands / num_classes)[:, None, None]
    width = max(bands / num_classes / 2, 1.0)
    ridge = torch.exp(-(((torch.arange(bands) - centres) / width) ** 2))
    swell = 1 + torch.sin(2 * math.pi / FRAMES_PER_TURN * torch.arange(frames)[None, :, None] + phases)
    return ridge * swell + NOISE * noise


def sound_for(config: Any, labels: torch.Tensor, num_classes: int, generator: torch.Generator) -> torch.Tensor:
    """Sounds in the form that a model type reads: samples, or a spectrogram of the sizes of its configuration."""
    kind = config.model_type
    if kind == "audio-spectrogram-transformer":
        return spectrograms(labels, num_classes, config.max_length, config.num_mel_bins, generator)
    if kind == "whisper":  # which halves the number of frames, and has the bands first
        frames = 2 * config.max_source_positions
        return spectrograms(labels, num_classes, frames, config.num_mel_bins, generator).transpose(1, 2).contiguous()
    if kind == "wav2vec2-bert":
        return spectrograms(labels, num_classes, FRAMES, config.feature_projection_input_dim, generator)
    return sounds(labels, num_classes, generator)


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images of a configuration; 32 x 32 where any will do."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or 32
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def num_channels(config: Any) -> int:
    """Of the images of a configuration."""
    return getattr(getattr(config, "vision_config", config), "num_channels", 3)
