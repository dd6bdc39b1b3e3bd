"""Low-rank adapters: Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.

A layer with weight W, frozen, gives W x + (alpha / rank) B A x; A (rank, inputs) and B (outputs, rank) alone are
trained. B is zero at first, so that the model begins as what it was. A convolution has as A one of its own shape with
`rank` channels, and as B one of 1 x 1.

The layer stays in its place, under its name: its class becomes one with the same weight and two parameters more, so
that names of the base's weights in checkpoints, patterns and reports are those from before.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from aottrain.errors import ConfigError
from aottrain.trainer.weights.naming import chosen, matches

if TYPE_CHECKING:
    from aottrain.config.run import AdapterConfig

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The linear layer of GPT-2 in the package transformers, whose weight has the inputs first; it is not imported here.
_TRANSPOSED = "Conv1D"


class Adapted(nn.Module):
    """Of a layer, by `_class_of`: its own class is the next one."""

    lora_a: nn.Parameter
    """(rank, inputs), or (rank, channels, *kernel)."""
    lora_b: nn.Parameter
    """(outputs, rank)"""
    lora_scale: float
    lora_dropout: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = super()
        inner = F.dropout(x, self.lora_dropout, training=self.training) if self.lora_dropout else x
        if isinstance(self, _KINDS[1:]):
            layer: Any = self
            low = layer._conv_forward(inner, self.lora_a, None)
            change = F.linear(low.movedim(1, -1), self.lora_b).movedim(-1, 1)
        else:
            change = F.linear(F.linear(inner, self.lora_a), self.lora_b)
        return own.forward(x) + change * self.lora_scale


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lora{kind.__name__}", (Adapted, kind), {"__module__": kind.__module__, "own_class": kind})


def adapt(model: nn.Module, config: AdapterConfig) -> nn.Module:
    """`model`, with every parameter frozen, and adapters on the layers that `adapter.modules` names, which draw from
    torch's default generator. ConfigError: a pattern names no layer that can be adapted, or there is none."""
    names = _names(model, config)
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name in names:
        _adapt_layer(modules[name], config)
    return model


def _names(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Of the layers to adapt."""
    layers = {name: module for name, module in model.named_modules() if _is_layer(module)}
    uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    tied = [name for name, module in layers.items() if uses[id(module.weight)] > 1]
    free = [name for name in layers if name not in tied]
    key = "adapter.modules"
    for pattern in config.modules:
        if own := [name for name in tied if matches(name, pattern)]:
            text = f"the weight of {own[0]} is another module's, too, and would change there when the two are merged"
            raise ConfigError(f"{key}={pattern}: {text}")
    if not free:
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigError(f"adapter={config.name}: the model has no layer that can be adapted ({kinds}, groups=1)")
    return chosen(free, config.modules, key, "layer that can be adapted") if config.modules else free


def _is_layer(module: nn.Module) -> bool:
    """Whether its forward is the product alone: a subclass may do more, or be read without being called."""
    kind = type(module)
    is_transposed = kind.__name__ == _TRANSPOSED and kind.__module__.startswith("transformers.")
    return is_transposed or (kind in _KINDS and getattr(module, "groups", 1) == 1)


def _adapt_layer(layer: nn.Module, config: AdapterConfig) -> None:
    weight = layer.weight
    matrix = weight.T if type(layer).__name__ == _TRANSPOSED else weight
    like: Any = {"dtype": weight.dtype, "device": weight.device}
    layer.__class__ = _class_of(type(layer))
    layer.lora_a = nn.Parameter(torch.empty(config.rank, *matrix.shape[1:], **like))
    layer.lora_b = nn.Parameter(torch.zeros(len(matrix), config.rank, **like))
    layer.lora_scale, layer.lora_dropout = config.alpha / config.rank, config.dropout
    nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))  # as the layers themselves begin


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """`model` with each adapter added to its layer's weight, and no adapters any more; in place."""
    for layer in list(model.modules()):
        if isinstance(layer, Adapted):
            change = (layer.lora_b.double() @ layer.lora_a.double().flatten(1)) * layer.lora_scale
            kind: Any = type(layer).own_class
            change = change.T if kind.__name__ == _TRANSPOSED else change
            layer.weight.copy_(layer.weight.double() + change.reshape(layer.weight.shape))
            layer.__class__ = kind
            for name in ("lora_a", "lora_b", "lora_scale", "lora_dropout"):
                delattr(layer, name)
    return model


def unreached(model: nn.Module) -> list[str]:
    """Adapters that a backward has given no gradient: their layer was not called."""
    return [name for name, layer in model.named_modules() if isinstance(layer, Adapted) and layer.lora_b.grad is None]
