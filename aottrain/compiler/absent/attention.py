"""Which kernel attention runs as on a CUDA device, where none is there that could be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aottrain.compat_dispatch import all_named

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 256  # head that flash attention takes


class RoutedAttention(TorchFunctionMode):
    """Inside, attention is the kernel that PyTorch takes on a device of compute capability 8 and up: flash where types
    are halves and there is no mask, else the memory-efficient one; with dropout the products, as on a device under
    aottrain's own random numbers. Autocast's casts are made first, as it makes them there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = all_named(func, args, kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The arguments of F.scaled_dot_product_attention, tensors of (batch, heads, time, width)."""
    if dropout_p or query.dim() != 4 or query.device.type != "cuda":
        more: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    is_flat = query.shape[-1] == value.shape[-1] <= _WIDEST
    if attn_mask is None and query.dtype in _HALVES and is_flat:
        padded = [F.pad(tensor, (0, -tensor.shape[-1] % 8)) for tensor in (query, key, value)]
        factor = scale or query.shape[-1] ** -0.5
        out = aten._scaled_dot_product_flash_attention(*padded, 0.0, is_causal, False, scale=factor)[0]
        return out[..., : query.shape[-1]]
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    keeps_sums = any(tensor.requires_grad for tensor in (query, key, value))
    arguments = (query, key, value, bias, keeps_sums, 0.0, is_causal)
    return aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(*query.shape[:2], query.shape[2], key.shape[2])
