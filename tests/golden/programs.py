"""Programs whose compilation is kept as text: each small, each there for what it alone goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import llama, resnet, transformer


@dataclass(frozen=True)
class Golden:
    """make: gives a function or module and its arguments. options: of `aottrain.compile`."""

    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    options: dict[str, Any] = field(default_factory=dict)


class WithLoss(nn.Module):
    """As the trainer compiles a recipe: with its loss."""

    def __init__(self, network: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, *batch: Any) -> Tensor:
        return self.loss(self.network, batch)


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


def tokens(*shape: int, below: int = 32) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def recipe(module: Any, sizes: dict[str, int], *batch: Any) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def make() -> tuple[Any, tuple[Any, ...]]:
        torch.manual_seed(0)
        return WithLoss(module.build(module.Options(**sizes)), module.loss), batch

    return make


def of(function: Callable[..., Any], *arguments: Any) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    return lambda: (function, arguments)


def seeded(make: Callable[[], nn.Module], *arguments: Any) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    def made() -> tuple[Any, tuple[Any, ...]]:
        torch.manual_seed(0)
        return make(), arguments

    return made


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * x + F.gelu(x, approximate="tanh") * torch.sigmoid(gate)


def written_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    return F.dropout(torch.softmax(scores + mask, -1), 0.1) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)


def loss_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target)


def smoothed_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.dropout(x * 2, 0.25), x + torch.randn_like(x)


def running(x: Tensor, total: Tensor) -> Tensor:
    total.mul_(0.9).add_(x.detach().mean())
    return (x - total).square().sum()


def looked_up(table: Tensor, index: Tensor, bag: Tensor) -> Tensor:
    return table[index].sum(1) + F.embedding(index[:, 0], bag)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    values, places = x.max(-1)
    return values, places, x.logsumexp(-1), x.cumsum(-1), F.normalize(x, dim=-1)


def in_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(F.linear(x, weight)).float().square().mean()


def linked(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(x)
    return hidden, (hidden * hidden).sum()


def deep(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(F.layer_norm(x @ weight, (16,)))
    return x.sum()


def images(channels: int, size: int) -> Tensor:
    return normal(2, channels, size, size)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


_GPT = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8, "vocab_size": 32}
_LLAMA = {
    "num_layers": 2, "width": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 24, "context": 8, "vocab_size": 32
}  # fmt: skip
_SHALLOW, _SHALLOW_LLAMA = _GPT | {"num_layers": 1}, _LLAMA | {"num_layers": 1}
_PAIR = (tokens(2, 8), tokens(2, 8))
_HEADS = tuple(normal(2, 4, 8, 4) for _ in range(3))
_BIG = {"kernel": "cpp"}

PROGRAMS: dict[str, Golden] = {
    "gpt": Golden(recipe(transformer, _GPT, *_PAIR), _BIG),
    "gpt_half_budget": Golden(recipe(transformer, _SHALLOW, *_PAIR), {**_BIG, "budget": 0.5}),
    "gpt_lowest_budget": Golden(recipe(transformer, _SHALLOW, *_PAIR), {**_BIG, "budget": 0.0}),
    "gpt_save_all": Golden(recipe(transformer, _SHALLOW, *_PAIR), {**_BIG, "partition": "save_all"}),
    "gpt_recompute_all": Golden(recipe(transformer, _SHALLOW, *_PAIR), {**_BIG, "partition": "recompute_all"}),
    "gpt_checkpoint": Golden(recipe(transformer, _GPT, *_PAIR), {**_BIG, "partition": "checkpoint"}),
    "gpt_aten": Golden(recipe(transformer, _SHALLOW, *_PAIR), {"kernel": "aten"}),
    "gpt_triton": Golden(recipe(transformer, _SHALLOW, *_PAIR), {"kernel": "triton"}),
    "llama": Golden(recipe(llama, _LLAMA, *_PAIR), _BIG),
    "llama_triton": Golden(recipe(llama, _SHALLOW_LLAMA, *_PAIR), {"kernel": "triton"}),
    "resnet": Golden(
        lambda: (WithLoss(resnet.build(resnet.Options(width=4, num_blocks=1)), resnet.loss),
                 (images(3, 16).detach(), tokens(2, below=10))),
        _BIG,
    ),
    "convolutions": Golden(seeded(convolutions, images(3, 8)), _BIG),
    "convolutions_triton": Golden(seeded(convolutions, images(3, 8)), {"kernel": "triton"}),
    "layer_norm": Golden(seeded(lambda: nn.LayerNorm(16), normal(8, 16)), _BIG),
    "layer_norm_triton": Golden(seeded(lambda: nn.LayerNorm(16), normal(8, 16)), {"kernel": "triton"}),
    "rms_norm_bfloat16": Golden(of(rms_norm, normal(8, 16, dtype=torch.bfloat16), normal(16)), _BIG),
    "gates": Golden(of(gated, normal(8, 16), normal(8, 16)), _BIG),
    "gates_triton": Golden(of(gated, normal(8, 16), normal(8, 16)), {"kernel": "triton"}),
    "gates_float16": Golden(of(gated, *(normal(8, 16, dtype=torch.float16) for _ in range(2))), _BIG),
    "written_attention": Golden(of(written_attention, *_HEADS, normal(8, 8, grad=False)), _BIG),
    "causal_attention": Golden(of(causal_attention, *_HEADS), _BIG),
    "shared_heads": Golden(of(shared_heads, _HEADS[0], *(normal(2, 2, 8, 4) for _ in range(2))), _BIG),
    "loss_head": Golden(
        of(loss_head, normal(16, 8), normal(32, 8), tokens(16)), {**_BIG, "loss_head": "chunked"}
    ),
    "loss_head_whole": Golden(of(loss_head, normal(16, 8), normal(32, 8), tokens(16)), {**_BIG, "loss_head": "whole"}),
    "smoothed_loss": Golden(of(smoothed_loss, normal(16, 32), tokens(16)), _BIG),
    "noise": Golden(of(noisy, normal(8, 16)), _BIG),
    "noise_triton": Golden(of(noisy, normal(8, 16)), {"kernel": "triton"}),
    "noise_eager": Golden(of(noisy, normal(8, 16)), {**_BIG, "rng": "eager"}),
    "running_state": Golden(of(running, normal(8), torch.zeros(())), _BIG),
    "gathering": Golden(of(looked_up, normal(16, 8), tokens(4, 3, below=16), normal(16, 8)), _BIG),
    "reductions": Golden(of(extremes, normal(8, 16)), _BIG),
    "autocast": Golden(of(in_bfloat16, normal(8, 16), normal(32, 16)), _BIG),
    "linked_results": Golden(of(linked, normal(8)), _BIG),
    "deep_within_budget": Golden(of(deep, normal(64, 16), normal(16, 16)), {**_BIG, "budget": 0.2}),
    "dynamic_sizes": Golden(of(gated, normal(8, 16), normal(8, 16)), {"dynamic": True}),
    "inference": Golden(of(gated, normal(8, 16, grad=False), normal(8, 16, grad=False)), _BIG),
}  # fmt: skip
