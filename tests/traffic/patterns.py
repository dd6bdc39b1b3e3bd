"""Patterns that should be one pass over memory: functions and modules with their arguments, made for a type.

Each is as models write it. Sizes are such that activations outweigh weights, and rows fit into a cache. Memory is not
initialised: nothing runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH, CLASSES = 2048, 1024, 8192
Made = tuple[Any, tuple[Any, ...]]  # a function or module, its arguments
Pattern = Callable[[torch.dtype], Made]

PATTERNS: dict[str, Pattern] = {}


def _x(*shape: int, grad: bool = True) -> Callable[[torch.dtype], Tensor]:
    """An argument of the pattern's type: ROWS x WIDTH if nothing is said."""
    return lambda dtype: torch.empty(*(shape or (ROWS, WIDTH)), dtype=dtype, requires_grad=grad)


def _fp32(*shape: int, grad: bool = True) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.empty(*shape, requires_grad=grad)


def _index(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.zeros(*shape, dtype=torch.int64)


def _mask(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.zeros(*shape, dtype=torch.bool)


def pattern(*arguments: Callable[[torch.dtype], Tensor], name: str = "") -> Callable[..., Any]:
    """Register a function under its name, or another one."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(dtype: torch.dtype) -> Made:
            return function, tuple(argument(dtype) for argument in arguments)

        PATTERNS[name or function.__name__] = make
        return function

    return register


def module(name: str, build: Callable[[], nn.Module], *arguments: Callable[[torch.dtype], Tensor]) -> None:
    """Register a module, whose parameters are of the pattern's type."""

    def make(dtype: torch.dtype) -> Made:
        return build().to(dtype), tuple(argument(dtype) for argument in arguments)

    PATTERNS[name] = make


# Norms of rows.
_W = _x(WIDTH)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama's: in float32, the weight after the cast."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pattern(_x(), _W, _W)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


@pattern(_x())
def layer_norm_plain(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


@pattern(_x(), _x(), _W, _W)
def layer_norm_residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, (WIDTH,), weight, bias)


@pattern(_x(), _x(), _W, _W)
def layer_norm_after_sum(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + y, (WIDTH,), weight, bias)


@pattern(_x(), _x(), _W, _W)
def layer_norm_dropout_residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + F.dropout(y, 0.1), (WIDTH,), weight, bias)


@pattern(_x(), _fp32(WIDTH), _fp32(WIDTH))
def layer_norm_in_float32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (WIDTH,), weight, bias).to(x.dtype)


@pattern(_x(), _W, _W)
def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (WIDTH,), weight, bias))


@pattern(_x(), _W)
def layer_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    spread = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(spread + 1e-5) * weight


pattern(_x(), _W, name="rms_norm")(_rms)


@pattern(_x(), _W)
def rms_norm_functional(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight)


@pattern(_x(), _W)
def rms_norm_narrow(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pattern(_x(), _fp32(WIDTH))
def rms_norm_gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)).to(x.dtype)


@pattern(_x(), _x(), _W)
def rms_norm_residual(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _rms(total, weight)


@pattern(_x(), _x(), _W)
def rms_norm_after_sum(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return _rms(x + y, weight)


@pattern(_x(), _x(), _W)
def rms_norm_then_residual(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return x + _rms(y, weight)


@pattern(_x(), _x(), _W)
def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return _rms(x, weight) * F.silu(gate)


@pattern(_x(), _x(), _W)
def rms_norm_of_gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return _rms(x * F.silu(gate), weight)


# Modulated norms, as of diffusion transformers: scale and shift of each sequence.
_SEQUENCE = (8, 256, WIDTH)


@pattern(_x(*_SEQUENCE), _x(8, WIDTH), _x(8, WIDTH))
def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,)) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@pattern(_x(*_SEQUENCE), _x(*_SEQUENCE), _x(8, WIDTH))
def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x + gate.unsqueeze(1) * y


@pattern(_x(*_SEQUENCE), _x(*_SEQUENCE), _x(8, WIDTH), _x(8, WIDTH), _x(8, WIDTH))
def modulated_residual_norm(x: Tensor, y: Tensor, gate: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = x + gate.unsqueeze(1) * y
    return total, F.layer_norm(total, (WIDTH,)) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@pattern(_x(*_SEQUENCE), _x(8, 3 * WIDTH))
def modulated_from_chunks(x: Tensor, condition: Tensor) -> Tensor:
    shift, scale, gate = condition.unsqueeze(1).chunk(3, -1)
    return gate * (F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


# Rotary embeddings and norms of queries and keys.
_HEADS, _ANGLES = (4, 8, 256, 64), (256, 64)


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


@pattern(_x(*_HEADS), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_half(x) * sin


@pattern(_x(*_HEADS), _x(*_HEADS), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def rotary_of_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


@pattern(_x(4, 256, 512), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def rotary_from_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.view(4, 256, 8, 64).transpose(1, 2)
    return heads * cos + _rotate_half(heads) * sin


@pattern(_x(4, 256, 3 * 512), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def rotary_from_packed(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    query, key, value = x.view(4, 256, 3, 8, 64).permute(2, 0, 3, 1, 4)
    query, key = (part * cos + _rotate_half(part) * sin for part in (query, key))
    return query, key, value.contiguous()


@pattern(_x(*_HEADS), _x(256, 32, grad=False), _x(256, 32, grad=False))
def rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@pattern(_x(*_HEADS), _x(256, 16, grad=False), _x(256, 16, grad=False))
def rotary_of_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x.chunk(2, -1)
    left, right = turned.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, kept), -1)


@pattern(_x(*_HEADS), _x(64))
def qk_norm(x: Tensor, weight: Tensor) -> Tensor:
    return _rms(x, weight)


@pattern(_x(*_HEADS), _x(64), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def qk_norm_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = _rms(x, weight)
    return normed * cos + _rotate_half(normed) * sin


@pattern(_x(4, 256, 512), _x(64), _x(*_ANGLES, grad=False), _x(*_ANGLES, grad=False))
def qk_norm_rotary_from_product(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed = _rms(x.view(4, 256, 8, 64), weight).transpose(1, 2)
    return normed * cos + _rotate_half(normed) * sin


# Activations, gates, caps.
def _gate(name: str, activation: Callable[[Tensor], Tensor]) -> None:
    pattern(_x(), _x(), name=name)(lambda x, gate: activation(gate) * x)


_gate("gate_silu", F.silu)
_gate("gate_gelu", F.gelu)
_gate("gate_gelu_tanh", functools.partial(F.gelu, approximate="tanh"))
_gate("gate_sigmoid", torch.sigmoid)
_gate("gate_relu_squared", lambda gate: F.relu(gate).square())


@pattern(_x(ROWS, 2 * WIDTH))
def gate_of_chunks(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


@pattern(_x(ROWS, 2 * WIDTH))
def glu(x: Tensor) -> Tensor:
    return F.glu(x)


@pattern(_x(), _W)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@pattern(_x(), _W)
def bias_gelu_dropout(x: Tensor, bias: Tensor) -> Tensor:
    return F.dropout(F.gelu(x + bias), 0.1)


@pattern(_x())
def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


@pattern(_x())
def soft_cap(x: Tensor) -> Tensor:
    return 30 * torch.tanh(x / 30)


@pattern(_x())
def soft_cap_in_float32(x: Tensor) -> Tensor:
    return (30 * torch.tanh(x.float() / 30)).to(x.dtype)


@pattern(_x(ROWS, CLASSES), _index(ROWS))
def soft_cap_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(x / 30), target)


# Losses.
_LOGITS, _TARGET = _x(ROWS, CLASSES), _index(ROWS)


@pattern(_LOGITS, _TARGET)
def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


@pattern(_LOGITS, _TARGET)
def cross_entropy_of_float(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


@pattern(_LOGITS, _TARGET)
def cross_entropy_each(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


@pattern(_LOGITS, _TARGET, _x(CLASSES, grad=False))
def cross_entropy_weighted(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x, target, weight)


@pattern(_x(8, 257, CLASSES), _index(8, 257))
def cross_entropy_shifted(x: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(x[:, :-1].float().reshape(-1, CLASSES), tokens[:, 1:].reshape(-1))


@pattern(_LOGITS, _TARGET)
def label_smoothing(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, label_smoothing=0.1)


@pattern(_LOGITS, _TARGET)
def label_smoothing_of_float(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target, label_smoothing=0.1)


@pattern(_LOGITS, _TARGET)
def z_loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target) + 1e-4 * torch.logsumexp(x, -1).square().mean()


@pattern(_LOGITS, _x(ROWS, CLASSES, grad=False))
def soft_targets(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


@pattern(_LOGITS, _x(ROWS, CLASSES, grad=False))
def kl_of_logits(x: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(teacher, -1), log_target=True, reduction="batchmean")


@pattern(_LOGITS, _x(ROWS, CLASSES, grad=False))
def kl_of_probabilities(x: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")


@pattern(_LOGITS, _TARGET)
def log_probability_of(x: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


@pattern(_LOGITS)
def entropy(x: Tensor) -> Tensor:
    logs = F.log_softmax(x, -1)
    return -(logs.exp() * logs).sum(-1).mean()


@pattern(_x(), _x(grad=False))
def mean_square_error(x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(x, target)


@pattern(_x(), _x(grad=False))
def binary_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target)


@pattern(_x(), _x())
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y, -1)


@pattern(_x())
def normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@pattern(_x(), _x())
def normalize_both(x: Tensor, y: Tensor) -> Tensor:
    return (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)


# Softmaxes.
_SCORES = (4, 8, 256, 256)


@pattern(_x(*_SCORES))
def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@pattern(_x(*_SCORES), _mask(256, 256))
def softmax_masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(mask, -math.inf), -1)


@pattern(_x(*_SCORES), _x(4, 1, 256, 256, grad=False))
def softmax_biased(x: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(x / 8 + bias, -1)


@pattern(_x(*_SCORES), _mask(256, 256))
def softmax_masked_dropout(x: Tensor, mask: Tensor) -> Tensor:
    return F.dropout(torch.softmax((x / 8).masked_fill(mask, -math.inf), -1), 0.1)


@pattern(_x(*_SCORES))
def softmax_in_float32(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)


@pattern(_x(*_SCORES), _mask(256, 256))
def softmax_capped(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((50 * torch.tanh(x / 50)).masked_fill(mask, -math.inf), -1)


@pattern(_LOGITS)
def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, -1)


# Dropout.
@pattern(_x())
def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


@pattern(_x(), _x())
def dropout_residual(x: Tensor, y: Tensor) -> Tensor:
    return x + F.dropout(y, 0.1)


@pattern(_x(), _x(), _W)
def bias_dropout_residual(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return x + F.dropout(y + bias, 0.1)


@pattern(_x(), _x())
def dropout_chain(x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(F.relu(x + F.dropout(y, 0.1)), 0.2)


@pattern(_x(8, 256, WIDTH), _x(8, 256, WIDTH))
def drop_path(x: Tensor, y: Tensor) -> Tensor:
    keep = torch.rand(8, 1, 1, device=x.device) < 0.9
    return x + y * keep / 0.9


# Norms of images with activations, and pooling.
_IMAGES = _x(8, 64, 32, 32)
module("batch_norm", lambda: nn.BatchNorm2d(64), _IMAGES)
module("batch_norm_relu", lambda: nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()), _IMAGES)
module("batch_norm_silu", lambda: nn.Sequential(nn.BatchNorm2d(64), nn.SiLU()), _IMAGES)
module("batch_norm_in_evaluation", lambda: nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).eval(), _IMAGES)
module("batch_norm_of_rows", lambda: nn.BatchNorm1d(WIDTH), _x())
module("group_norm", lambda: nn.GroupNorm(32, 64), _IMAGES)
module("group_norm_silu", lambda: nn.Sequential(nn.GroupNorm(32, 64), nn.SiLU()), _IMAGES)
module("instance_norm", lambda: nn.InstanceNorm2d(64, affine=True), _IMAGES)


class _BatchNormAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return F.relu(self.norm(x) + shortcut)


module("batch_norm_residual_relu", _BatchNormAdd, _IMAGES, _IMAGES)


@pattern(_IMAGES, _x(64), _x(64))
def batch_norm_of_one_type_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, True))


@pattern(_IMAGES)
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


@pattern(_IMAGES)
def average_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


@pattern(_IMAGES)
def relu_max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 2)


@pattern(_IMAGES)
def global_pool(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


@pattern(_x(8, 256, WIDTH), _mask(8, 256))
def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    kept = mask.unsqueeze(-1).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1)


# Embeddings.
@pattern(_x(8, 256, WIDTH), _x(256, WIDTH), _x(3, WIDTH), _index(8, 256), _x(WIDTH), _x(WIDTH))
def embeddings_with_types(
    x: Tensor, positions: Tensor, table: Tensor, types: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return F.layer_norm(x + positions + F.embedding(types, table), (WIDTH,), weight, bias)


@pattern(_index(8, 256), _x(256, WIDTH), _x(8, 256, WIDTH))
def position_embedding(index: Tensor, table: Tensor, x: Tensor) -> Tensor:
    return x + table[None, :256]


@pattern(_x(), _W)
def layer_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x + x.tanh() * scale


# Parts, shifts and rearrangements.
_PAIR = _x(ROWS, 2 * WIDTH)


@pattern(_PAIR, _x(2 * WIDTH))
def gate_of_biased_chunks(x: Tensor, bias: Tensor) -> Tensor:
    left, right = (x + bias).chunk(2, -1)
    return F.silu(left) * right


@pattern(_x(8, 512, 1024), _x(8, 512, 1024))
def gate_of_waves(x: Tensor, condition: Tensor) -> Tensor:
    left, right = (x + condition).chunk(2, 1)
    return torch.tanh(left) * torch.sigmoid(right)


@pattern(_x(*_SEQUENCE), _W, _W)
def token_shift(x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    before = F.pad(x, (0, 0, 1, -1))
    return x * key + before * (1 - key), x * value + before * (1 - value)


@pattern(_x(*_SEQUENCE), _x(4, WIDTH))
def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(padded[:, i : i + 256] * weight[i] for i in range(4)))


@pattern(_x(8, 64, 33, 33))
def blur_by_shifts(x: Tensor) -> Tensor:
    return (x[:, :, :-1, :-1] + x[:, :, 1:, :-1] + x[:, :, :-1, 1:] + x[:, :, 1:, 1:]) / 4


@pattern(_IMAGES)
def wavelet(x: Tensor) -> Tensor:
    a, b, c, d = x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]
    return torch.cat((a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d), 1) / 2


@pattern(_x(8, 32, 32, 96), _x(384), _x(384))
def patch_merging(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    parts = x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]
    return F.layer_norm(torch.cat(parts, -1), (384,), weight, bias)


@pattern(_x(8, 256, 32, 32))
def pixel_shuffle_relu(x: Tensor) -> Tensor:
    return F.relu(F.pixel_shuffle(x, 2))


@pattern(_x(8, 3, 224, 224))
def patches(x: Tensor) -> Tensor:
    return x.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).reshape(8, 196, 768)


@pattern(_x(*_HEADS), _fp32(32, grad=False))
def rotary_of_made_angles(x: Tensor, frequencies: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(256, dtype=torch.float32), frequencies).repeat(1, 2)
    return x * angles.cos().to(x.dtype) + _rotate_half(x) * angles.sin().to(x.dtype)


# Norms and losses that wait for sums over everything.
@pattern(_x(8, 32, 32, 256), _x(256), _x(256))
def response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = F.gelu(x)
    lengths = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    return weight * (x * (lengths / (lengths.mean(-1, keepdim=True) + 1e-6))) + bias + x


@pattern(_x())
def standardised(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-8)


@pattern(_IMAGES, _IMAGES)
def adaptive_instance_norm(x: Tensor, style: Tensor) -> Tensor:
    def moments(y: Tensor) -> tuple[Tensor, Tensor]:
        return y.mean((2, 3), keepdim=True), y.std((2, 3), keepdim=True) + 1e-5

    (mean, spread), (new_mean, new_spread) = moments(x), moments(style)
    return (x - mean) / spread * new_spread + new_mean


@pattern(_IMAGES, _x(64), _x(64))
def instance_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, spread = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(spread + 1e-5) * weight[:, None, None] + bias[:, None, None]


@pattern(_x(8, 96, 32, 32), _x(96), _x(96))
def layer_norm_of_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    spread = (x - mean).pow(2).mean(1, keepdim=True)
    return weight[:, None, None] * ((x - mean) / torch.sqrt(spread + 1e-6)) + bias[:, None, None]


@pattern(_x(8, 4, 128, 128), _x(8, 4, 128, 128, grad=False))
def cross_entropy_and_dice(x: Tensor, target: Tensor) -> Tensor:
    shares = torch.sigmoid(x)
    overlap = (2 * (shares * target).sum() + 1) / (shares.sum() + target.sum() + 1)
    return F.binary_cross_entropy_with_logits(x, target) + 1 - overlap


@pattern(_x(), _x(grad=False), _x(WIDTH, grad=False))
def binary_cross_entropy_weighted(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, target, pos_weight=weight)


@pattern(_LOGITS, _TARGET)
def focal_loss(x: Tensor, target: Tensor) -> Tensor:
    logs = F.log_softmax(x, -1).gather(-1, target[:, None])[:, 0]
    return -((1 - logs.exp()) ** 2 * logs).mean()


@pattern(_LOGITS, _TARGET)
def hinge_of_classes(x: Tensor, target: Tensor) -> Tensor:
    return F.relu(1 - x.gather(1, target[:, None]) + x).mean()


@pattern(_x(2048, 2048), _x(1))
def pairs_by_sigmoids(scores: Tensor, bias: Tensor) -> Tensor:
    signs = 2 * torch.eye(2048, dtype=scores.dtype) - 1
    return -F.logsigmoid(signs * (scores + bias)).sum() / 2048


@pattern(_x(2048, 2048))
def decorrelation(x: Tensor) -> Tensor:
    others = x.masked_fill(torch.eye(2048, dtype=torch.bool), 0)
    return (torch.diagonal(x) - 1).pow(2).sum() + 0.005 * others.pow(2).sum()


@pattern(_x(), _x(), _x())
def triplet_margin(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    return F.triplet_margin_loss(anchor, positive, negative)


@pattern(_x(*_SCORES), _x(*_SCORES))
def softmax_difference(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x, -1) - 0.8 * torch.softmax(y, -1)


@pattern(_x(1024, 1024, grad=False), _x(1024, 1024, grad=False), _x(1024, grad=False), _x(1024, grad=False))
def factored_update(weight: Tensor, gradient: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    squares = gradient * gradient + 1e-30
    rows, columns = 0.9 * rows + 0.1 * squares.mean(1), 0.9 * columns + 0.1 * squares.mean(0)
    update = gradient * (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()
    return weight - 1e-2 * update / update.square().mean().sqrt().clamp(min=1), rows, columns


@pattern(_x(2048, 2048))
def latent_of_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_variance = x.chunk(2, -1)
    log_variance = log_variance.clamp(-30, 20)
    latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    return latent, 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)


@pattern(_x(), _x())
def reparametrised(mean: Tensor, log_variance: Tensor) -> Tensor:
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)


# A layer beside an output, which is computed again where that is quick, and a shift of windows.
@pattern(_IMAGES, _x(8, 128))
def film_relu(x: Tensor, condition: Tensor) -> Tensor:
    scale, shift = condition.chunk(2, 1)
    return F.relu(x * scale[..., None, None] + shift[..., None, None])


# What is compared by rows and by columns, sums that wait for others, and parts that take turns.
@pattern(_x(1024, 1024), _x(1))
def contrastive(scores: Tensor, scale: Tensor) -> Tensor:
    scores, target = scores * scale.exp(), torch.arange(1024)
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2


@pattern(_x(1024, 1024), _x(1024, 1024))
def variances_of_batches(x: Tensor, y: Tensor) -> Tensor:
    invariance, x, y = F.mse_loss(x, y), x - x.mean(0), y - y.mean(0)
    spreads = F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean() + F.relu(1 - (y.var(0) + 1e-4).sqrt()).mean()
    return 25 * invariance + 12.5 * spreads


@pattern(_x(8, 21, 128, 128), _x(8, 21, 128, 128, grad=False))
def dice_of_classes(x: Tensor, target: Tensor) -> Tensor:
    shares = torch.softmax(x, 1)
    overlap, total = (shares * target).sum((2, 3)), (shares + target).sum((2, 3))
    return 1 - (2 * overlap / (total + 1e-5)).mean()


@pattern(_x(1024, 1024))
def orthogonality(x: Tensor) -> Tensor:
    return (x - torch.eye(1024, dtype=x.dtype)).square().sum().sqrt()


@pattern(_x(4, 256, 512), _x(512), _x(256, 32, grad=False), _x(256, 32, grad=False))
def norm_of_all_heads_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = _rms(x, weight).view(4, 256, 8, 64).transpose(1, 2).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@pattern(_x(*_HEADS), _x(*_HEADS), _index(4, 256))
def rotary_at_positions(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = 1 / 50000 ** (torch.arange(0, 64, 2).float() / 64)
    angles = (positions[:, :, None].float() * frequencies).repeat(1, 1, 2)[:, None]
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


@pattern(_x(4, 256, 8, 64), _fp32(256, 32, 2, grad=False))
def rotary_of_pairs_in_float32(x: Tensor, turns: Tensor) -> Tensor:
    real, imaginary = x.float().reshape(4, 256, 8, 32, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
    return turned.flatten(3).to(x.dtype)


@pattern(_PAIR, _x(2 * WIDTH))
def gate_of_biased_turns(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    gate, value = x[..., ::2].clamp(max=7), x[..., 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (value + 1)


@pattern(_PAIR)
def gate_of_relu_dropout(x: Tensor) -> Tensor:
    value, gate = x.chunk(2, -1)
    return F.dropout(value * F.relu(gate), 0.1)
